"""What the memory cannot explain is said once, counted, and kept."""

import warnings

import pytest
import torch
from helpers import batches, mlp, setups, sgd, trained, whole
from hypothesis import given
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.errors import DualformWarning


def marked(path, before_step=lambda model: None, *, loss=None, after_step=lambda model: None, model=None, steps=8):
    """Record a loop in which something goes on; returns the memory, its marks by kind, and the warnings."""
    model = model or mlp(5, 4, 3)
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with dualform.record(model, optimizer, path, dtype="float64", progress=False) as tape:
            for x, y in batches(steps, 4, 5, 3):
                tape.note(label=y)
                (loss(model, x, y) if loss else F.cross_entropy(model(x), y)).backward()
                before_step(model)
                optimizer.step()
                optimizer.zero_grad()
                after_step(model)
    memory = dualform.open(path)
    kinds: dict[str, dict[str, int]] = {}
    for mark in memory.certificate.marks:
        kinds.setdefault(mark.kind, {})[mark.name] = mark.times
    assert all(issubclass(w.category, DualformWarning) for w in caught)
    return memory, kinds, [str(w.message) for w in caught]


def test_clipped_values_are_marked(tmp_path):
    memory, kinds, said = marked(tmp_path, lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-3))
    assert {"0.weight", "2.weight", "2.bias"} <= set(kinds["changed-unevenly"])
    assert any("'0.weight'" in text and "clip_grad_value_" in text for text in said)
    assert memory.check(full=True).worst > 1e-3


def test_noise_on_gradients_is_marked(tmp_path):
    def noise(model):
        model[2].weight.grad += 0.1 * torch.randn_like(model[2].weight)

    _, kinds, said = marked(tmp_path, noise)
    assert kinds == {"changed-unevenly": {"2.weight": 8}}
    assert len(said) == 1 and "'2.weight'" in said[0]  # said once, counted eight times


def test_a_penalty_in_the_loss_is_marked(tmp_path):
    def loss(model, x, y):
        return F.cross_entropy(model(x), y) + 0.1 * model[0].weight.square().sum()

    memory, kinds, said = marked(tmp_path, loss=loss)
    assert set(kinds) == {"not-a-product"} and set(kinds["not-a-product"]) == {"0.weight"}
    assert 2 <= kinds["not-a-product"]["0.weight"] <= 8  # parameters are looked at in turn
    assert len(said) == 1 and "penalty" in said[0]
    assert memory.check(full=True)["0.weight"] > 1e-3
    assert memory.check(full=True)["2.weight"] < 1e-12


def test_a_penalty_on_the_gradient_of_the_input_is_marked(tmp_path):
    """Its own gradient reaches the weights through the backward pass, where no call of the layer is seen."""

    def loss(model, x, y):
        x = x.clone().requires_grad_()
        value = F.cross_entropy(model(x), y)
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        return value + grad.square().sum()

    memory, kinds, _ = marked(tmp_path, loss=loss)
    assert {"0.weight", "2.weight"} <= set(kinds["not-a-product"])
    assert memory.check(full=True).worst > 1e-3


def test_functional_use_beside_the_layer_is_marked(tmp_path):
    def loss(model, x, y):
        return F.cross_entropy(model(x) + F.linear(model[0](x), model[2].weight), y)

    _, kinds, _ = marked(tmp_path, loss=loss)
    assert set(kinds["not-a-product"]) == {"2.weight"}


def test_functional_use_instead_of_the_layer_is_marked(tmp_path):
    def loss(model, x, y):
        return F.cross_entropy(F.linear(model[0](x).relu(), model[2].weight, model[2].bias), y)

    memory, kinds, said = marked(tmp_path, loss=loss)
    assert set(kinds["without-slots"]) == {"2.weight", "2.bias"}
    assert any("functional use" in text for text in said)
    assert memory.check(full=True)["0.weight"] < 1e-12


def test_a_gradient_put_there_by_hand_is_marked(tmp_path):
    def put(model):
        model[0].bias.grad = torch.ones_like(model[0].bias)

    _, kinds, _ = marked(tmp_path, put)
    assert "0.bias" in kinds.get("changed-unevenly", {}) | kinds.get("without-slots", {})


def test_a_gradient_left_over_from_before_recording_is_marked(tmp_path):
    model = mlp(5, 4, 3)
    F.cross_entropy(model(torch.randn(2, 5, dtype=torch.float64)), torch.tensor([0, 1])).backward()
    _, kinds, _ = marked(tmp_path, model=model)
    assert set(kinds) <= {"not-a-product", "changed-unevenly"} and kinds["not-a-product"]  # some are looked at
    assert max(kinds["not-a-product"].values()) == 1  # and only the first step was wrong


def test_a_gradient_left_over_from_the_last_step_is_marked(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    with pytest.warns(DualformWarning), dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
        for x, y in batches(4, 4, 5, 3):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    memory = dualform.open(tmp_path)
    assert memory.certificate.worst > 1e-3
    assert {mark.name for mark in memory.certificate.marks} >= {"0.weight", "2.weight"}


def test_an_edit_between_steps_is_marked(tmp_path):
    """One parameter is looked at a step, in turn, so it takes a few steps to see all of them."""

    def clamp(model):
        for parameter in model.parameters():
            parameter.data.clamp_(-0.05, 0.05)

    memory, kinds, said = marked(tmp_path, after_step=clamp, steps=12)
    assert set(kinds["edited"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert any("clamp" in text for text in said)
    assert memory.certificate.worst > 1e-3


def test_a_hook_that_changes_gradients_is_marked(tmp_path):
    model = mlp(5, 4, 3)
    model.get_parameter("2.weight").register_hook(
        lambda grad: grad * torch.linspace(0, 1, grad.shape[1], dtype=grad.dtype)
    )
    _, kinds, _ = marked(tmp_path, model=model)
    assert set(kinds) == {"not-a-product"} and set(kinds["not-a-product"]) == {"2.weight"}


def test_a_hook_that_scales_gradients_does_not_pass_silently(tmp_path):
    model = mlp(5, 4, 3)
    model.get_parameter("2.weight").register_hook(lambda grad: grad * 2)
    memory, kinds, _ = marked(tmp_path, model=model)
    assert "2.weight" in kinds.get("not-a-product", {}) or memory.check(full=True).worst < 1e-12


@pytest.mark.parametrize("model", [mlp(5, 4, 3), whole()], ids=["mlp", "whole model"])
def test_marks_stand_in_the_certificate_with_their_count(model, tmp_path):
    def noise(model):
        for parameter in list(model.parameters())[:1]:
            parameter.grad += 0.1 * torch.randn_like(parameter)

    name = next(name for name, _ in model.named_parameters())
    memory, _, _ = marked(tmp_path, noise, model=model)
    (mark,) = memory.certificate.marks
    assert (mark.kind, mark.name, mark.times) == ("changed-unevenly", name, 8)
    assert f"'{name}' from step {mark.first_step}, 8×" in str(memory.certificate)
    assert memory.at(3).certificate.marks == memory.certificate.marks


def test_a_mark_names_the_step_at_which_it_began(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    with pytest.warns(DualformWarning), dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
        for step, (x, y) in enumerate(batches(6, 4, 5, 3), start=1):
            F.cross_entropy(model(x), y).backward()
            if step >= 4:
                grad = model.get_parameter("0.weight").grad
                assert grad is not None
                grad += torch.randn_like(grad)
            optimizer.step()
            optimizer.zero_grad()
    (mark,) = dualform.open(tmp_path).certificate.marks
    assert (mark.first_step, mark.times) == (4, 3)


@given(setup=setups())
def test_a_clean_run_has_no_marks_and_raises_no_warning(setup, tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = setup.run(tmp_path_factory.mktemp("memory"))
    assert run.memory.certificate.marks == ()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
def test_a_clean_run_of_a_whole_model_has_no_marks(precision, dtype, tmp_path):
    model = whole().to(precision)
    data = [(x.to(precision), y) for x, y in batches(30, 6, 5, 3)]
    run = trained(tmp_path, model, sgd(model), data, dtype=dtype)
    assert run.memory.certificate.marks == ()


def test_a_wide_network_of_many_rows_has_no_marks(tmp_path):
    """Sums over many rows round more, and wide layers are watched at some entries only."""
    model = mlp(300, 200, 10).float()
    data = [(x.float(), y) for x, y in batches(4, 700, 300, 10)]
    run = trained(tmp_path, model, sgd(model), data, dtype="float16")
    assert run.memory.certificate.marks == ()
    assert run.memory.certificate.worst < 1e-2


@pytest.mark.parametrize("penalty", [0.0, 1e-3])
@pytest.mark.filterwarnings("ignore::dualform.errors.DualformWarning")
def test_saturated_gates_are_not_taken_for_a_penalty_and_a_penalty_is_seen_beside_them(penalty, tmp_path):
    """Of 1 − y rounding leaves little where y is almost 1, so single entries of a gradient are known badly there."""
    torch.manual_seed(0)
    model = nn.LSTM(8, 24)
    with torch.no_grad():
        model.get_parameter("bias_ih_l0").uniform_(-18, 18)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "memory", dtype="float32", progress=False):
        for _ in range(40):
            output, _ = model(torch.randn(20, 4, 8))
            (output.square().mean() + penalty * model.get_parameter("weight_hh_l0").square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    certificate = dualform.open(tmp_path / "memory").certificate
    assert {mark.name for mark in certificate.marks} == ({"weight_hh_l0"} if penalty else set())
    at_floor = {name for name, error in certificate.items() if error < 8 * certificate.floor[name]}
    assert at_floor == set(certificate) - ({"weight_hh_l0"} if penalty else set())


@pytest.mark.parametrize("seed", range(2))
def test_watched_gates_that_all_become_saturated_are_not_marked(seed, tmp_path):
    """A switch among the inputs opens all units but one wide, after the entries to watch were chosen among them."""
    torch.manual_seed(seed)
    model = nn.LSTM(8, 24)
    with torch.no_grad():
        model.get_parameter("weight_ih_l0")[:, 0].view(4, 24)[:, 1:] = 10.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "memory", dtype="float32", progress=False):
        for step in range(40):
            x = torch.randn(20, 4, 8)
            x[..., 0] = float(step >= 5)
            output, _ = model(x)
            (output - 0.5).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    certificate = dualform.open(tmp_path / "memory").certificate
    assert certificate.marks == ()
    assert all(error < 8 * certificate.floor[name] for name, error in certificate.items())


def uneven(change, step=3):
    """Something that happens to the network in one step alone."""
    steps = iter(range(100))

    def at(model):
        if next(steps) == step:
            change(model)

    return at


@pytest.mark.parametrize(
    ("before", "every"),
    [
        (lambda m: m[0].weight.grad[:10].zero_(), True),
        (lambda m: m[0].weight.grad.data[:, 7].zero_(), True),
        (lambda m: m[0].weight.grad.view(-1)[12345].mul_(1.5), False),
        (lambda m: m[0].weight.grad.copy_(m[0].weight.grad.roll(1, 0)), False),
    ],
)
def test_a_gradient_changed_anywhere_in_a_large_weight_is_marked(before, every, tmp_path):
    model = mlp(200, 100, 3)  # 20,000 entries, of which a few are watched
    optimizer = sgd(model)
    change = before if every else uneven(before)
    with pytest.warns(DualformWarning), dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
        for x, y in batches(6, 4, 200, 3):
            F.cross_entropy(model(x), y).backward()
            change(model)
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert {mark.name for mark in memory.certificate.marks} == {"0.weight"}
    assert memory.certificate.marks[0].times == (6 if every else 1)
    assert memory.certificate["0.weight"] > 1e-6  # under SGD every entry weighs in the certificate, too
    assert memory.certificate["2.weight"] < 1e-12


@pytest.mark.parametrize("model", ["attention", "bert"])
@pytest.mark.parametrize("rule", [torch.optim.AdamW, torch.optim.SGD])
def test_biases_without_a_gradient_but_rounding_are_certified_as_they_are_checked(model, rule, tmp_path):
    """The key bias of attention cannot change the output: what moves it is what rounding leaves of a sum of zero."""
    torch.manual_seed(0)
    width = 16
    if model == "attention":
        net: nn.Module = nn.TransformerEncoderLayer(width, 4, 32, dropout=0.0, batch_first=True)
    else:
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            hidden_size=width, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32, vocab_size=30,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        net = transformers.models.bert.modeling_bert.BertLayer(config)
        config._attn_implementation = "eager"
    optimizer = rule(net.parameters(), lr=1e-3)
    with dualform.record(net, optimizer, tmp_path, dtype="float32", progress=False):
        for _ in range(8):
            output = net(torch.randn(5, 7, width))
            (output[0] if isinstance(output, tuple) else output).pow(3).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    written, checked = memory.certificate, memory.check(net, full=True)
    for name, error in written.items():
        assert error <= 10 * checked[name] + 10 * checked.floor[name], name


def test_weights_clamped_by_a_hook_on_the_optimiser_are_marked_under_a_preconditioned_rule(tmp_path):
    """A hook that was there before recording runs before ours: what it does looks like a part of the step."""
    model = mlp(200, 100, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def clamp(*_):
        with torch.no_grad():
            model.get_parameter("0.weight")[-1].clamp_(-1e-2, 1e-2)

    optimizer.register_step_post_hook(clamp)
    with pytest.warns(DualformWarning, match="rule says"):
        run = trained(tmp_path, model, optimizer, batches(3, 4, 200, 3), dtype="float64")
    certificate = run.memory.certificate
    assert {mark.kind for mark in certificate.marks} == {"stepped-otherwise"}
    assert certificate["0.weight"] > 1e-3 and certificate["2.weight"] < 1e-12


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.AdamW])
def test_a_neuron_that_begins_anew_is_marked_and_shows_in_the_certificate(rule, tmp_path):
    model = mlp(200, 100, 3)
    optimizer = rule(model.parameters(), lr=1e-2)
    with pytest.warns(DualformWarning), dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
        for step, (x, y) in enumerate(batches(12, 4, 200, 3)):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 9:
                model.get_parameter("0.weight").data[7].normal_()
    certificate = dualform.open(tmp_path).certificate
    assert {(mark.kind, mark.name, mark.first_step) for mark in certificate.marks} == {("edited", "0.weight", 11)}
    assert certificate["0.weight"] > 0.1
    assert all(error < 1e-12 for name, error in certificate.items() if name != "0.weight")
