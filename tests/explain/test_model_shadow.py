"""A question never touches the model: it runs on a shadow, which is the same network whatever the model holds."""

import copy
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import batches, close, mlp, sgd, trained, whole
from hypothesis import given
from hypothesis import strategies as st
from kinds import KINDS
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils import prune

import dualform
from dualform.errors import QueryError
from dualform.explain.query.model_shadow import shadow_of

# ---------------------------------------------------------------- what must not change


def bits(model: nn.Module) -> dict[str, Any]:
    """All that a question could change in a model."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    hooks = {
        f"{path}.{name}": dict(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name.endswith("_hooks")
    }
    return {
        "values": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "objects": {name: (id(t), t.data_ptr(), t.requires_grad, id(t.grad)) for name, t in tensors.items()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": hooks,
        "attributes": {name: set(vars(module)) for name, module in model.named_modules()},
    }


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = bits(model)
    for name, value in before.pop("values").items():
        assert torch.equal(value, after["values"][name]), name
    after.pop("values")
    assert before == after


@given(name=st.sampled_from(sorted(KINDS)), mode=st.booleans(), frozen=st.booleans(), seed=st.integers(0, 99))
def test_a_question_changes_no_bit_of_a_model_of_any_kind(name, mode, frozen, seed, tmp_path_factory):
    kind, random = KINDS[name], torch.Generator().manual_seed(seed)
    model = kind.model(seed)
    optimizer = sgd(model)
    path = tmp_path_factory.mktemp("memory")
    with dualform.record(model, optimizer, path, dtype="float64", progress=False, **kind.options) as tape:
        for _ in range(2):
            label = torch.randint(3, (kind.examples,), generator=random)
            tape.note(label=label)
            F.cross_entropy(model(kind.inputs(random)), label).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory, x = dualform.open(path), kind.inputs(random)
    model.train(mode)
    next(model.parameters()).requires_grad_(not frozen)
    raising: list[bool] = []
    list(model.modules())[-1].register_forward_pre_hook(lambda module, args: 1 / 0 if raising else None)
    before = bits(model)
    for view in (memory, memory.at(1), memory.without(f"label = {memory.visits['label'][0]}")):
        spot = view.attend(model, x)
        for layer in kind.layers:
            spot.top(2, layer=layer, per="slot")
            spot.output(layer)
        view.predict(model, x)
        with pytest.raises(QueryError):
            view.attend(model, x, target=99).by("label", layer=kind.layers[0])
        raising.append(True)
        for ask in (lambda view=view: view.predict(model, x), lambda view=view: view.attend(model, x).prediction):
            with pytest.raises(ZeroDivisionError):
                ask()
        raising.clear()
    assert_untouched(model, before)


# ---------------------------------------------------------------- threads


class Everything(nn.Module):
    """Batch norm, dropout, an LSTM, attention, and an output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(7, 6), nn.LSTM(6, 6, batch_first=True)
        self.attention, self.norm = nn.MultiheadAttention(6, 2, batch_first=True), nn.BatchNorm1d(6)
        self.drop, self.middle, self.out = nn.Dropout(0.3), nn.Linear(6, 6), nn.Linear(6, 7)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(self.drop(self.embed(x)))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.out(self.drop(self.middle(self.norm(h.mean(1))).relu()))


def everything(path, kind: Callable[..., optim.Optimizer]) -> tuple[nn.Module, dualform.Memory]:
    torch.manual_seed(0)
    model = Everything().double()
    optimizer = kind(model.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(1)
    with dualform.record(model, optimizer, path, dtype="float64", progress=False) as tape:
        for _ in range(5):
            label = torch.randint(3, (4,), generator=random)
            tape.note(label=label)
            F.cross_entropy(model(torch.randint(7, (4, 3), generator=random)), label).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, dualform.open(path)


def question(memory: dualform.Memory, model: nn.Module, number: int) -> Tensor:
    """One of many questions, by its number."""
    x = torch.randint(7, (2, 3), generator=torch.Generator().manual_seed(number))
    layer = ("lstm", "attention.in_proj", "attention.out_proj", "middle", "out")[number % 5]
    step = number % 6
    if number % 4 == 0:
        return memory.at(step).predict(model, x)
    if number % 4 == 1:
        return memory.without(f"label = {number % 3}").predict(model, x)
    view = memory.at(max(1, step))
    if number % 8 == 2:
        return view.attend(model, x).output(layer)
    if number % 8 == 3:
        return view.attend(model, x).top(3, layer=layer, per="slot").contribution
    groups = view.attend(model, x).by("label", layer=layer)
    assert groups.total is not None
    return torch.cat([groups.values, groups.total.unsqueeze(1)], 1)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_questions_from_four_threads_are_answered_as_one_by_one(kind, count, tmp_path):
    """To the bit, and the model's bits stay as they are."""
    model, memory = everything(tmp_path, kind)
    before, numbers = bits(model), range(count)
    alone = [question(dualform.open(tmp_path) if n % 50 == 0 else memory, model, n) for n in numbers]
    answers: dict[int, Any] = {}

    def ask(thread: int, shared: dualform.Memory) -> None:
        for number in numbers[thread::4]:
            try:
                answers[number] = question(shared, model, number)
            except Exception as error:
                answers[number] = error

    shared = dualform.open(tmp_path)
    threads = [threading.Thread(target=ask, args=(i, shared)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, expected in zip(numbers, alone, strict=True):
        assert isinstance(answers[number], Tensor), answers[number]
        assert torch.equal(answers[number], expected), number
    assert_untouched(model, before)


# ---------------------------------------------------------------- while it is recorded


@pytest.mark.parametrize("name", ["linear", "attention", "lstm"])
def test_a_question_inside_the_with_is_not_recorded(name, tmp_path):
    kind = KINDS[name]

    def train(path, asked: dualform.Memory | None) -> dualform.Memory:
        model, random = kind.model(), torch.Generator().manual_seed(0)
        optimizer = sgd(model)
        with dualform.record(model, optimizer, path, dtype="float64", progress=False) as tape:
            for _ in range(3):
                x, label = kind.inputs(random), torch.randint(3, (kind.examples,), generator=random)
                tape.note(label=label)
                loss = F.cross_entropy(model(x), label)
                if asked:
                    asked.attend(model, x).top(2, layer=kind.layers[0], per="slot")
                    asked.at(1).predict(model, x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        memory = dualform.open(path)
        assert max(memory.check(model, full=True).values()) < 1e-12
        return memory

    bare = train(tmp_path / "bare", None)
    asked = train(tmp_path / "asked", bare)
    assert not asked.certificate.marks
    assert asked.visits.equals(bare.visits)
    for layer in kind.layers:
        assert asked.store.slots(asked.store.layer(layer)[0].name) == bare.store.slots(bare.store.layer(layer)[0].name)


# ---------------------------------------------------------------- what models hold


class Referring(nn.Module):
    """Everything that can refer to a layer beside the table of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers: list[Any] = [self.a, {"b": (self.b,)}]
        self.method = self.a.forward
        self.partly = functools.partial(self.b.__call__)
        self.closure = lambda x: self.a(x)
        self.weak: Callable[[], Any] = weakref.ref(self.b)
        self.proxies = (weakref.proxy(self.a),)
        self.hidden = [nn.Linear(4, 4).double()]
        self.own_helper = Helper(self)
        self.forward = types.MethodType(Referring.patched, self)
        self.b.register_forward_hook(self.doubled)
        self.seen: list[Tensor] = []

    def doubled(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return output + self.a.weight.sum()

    def patched(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        x = self.layers[1]["b"][0](self.layers[0](x).tanh())
        x = self.partly(self.method(x)).tanh()
        x = self.weak()(self.proxies[0](self.closure(x))).tanh()
        return self.hidden[0](self.own_helper.run(x))


class Helper:
    def __init__(self, model: "Referring") -> None:
        self.model = model

    def run(self, x: Tensor) -> Tensor:
        return self.model.b(x)


def test_whatever_refers_to_a_layer_leads_to_the_shadow():
    torch.manual_seed(0)
    model = Referring().double()
    other = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    x = torch.randn(3, 4, dtype=torch.float64)
    shadow = shadow_of(model, other)
    found = shadow(x)
    assert model.seen == []
    model.load_state_dict(other)
    assert torch.equal(found, model(x))


@pytest.mark.parametrize("around", ["average", "compiled", "data parallel", "norm", "pruned", "old norm", "lazy"])
def test_a_wrapped_model_answers_as_itself(around):
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(2, 4)
    if around == "average":
        model = optim.swa_utils.AveragedModel(model)
    elif around == "compiled":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    elif around == "data parallel":
        model = nn.DataParallel(model)
    elif around == "norm":
        nn.utils.parametrizations.weight_norm(model[0])
    elif around == "pruned":
        prune.l1_unstructured(model[0], "weight", 0.5)
    elif around == "old norm":
        nn.utils.parametrizations.spectral_norm(model[0])
    else:
        model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.Linear(5, 3))
        with pytest.raises(QueryError, match="Run one batch through the model"):
            shadow_of(model)
        model(x)
    model.eval()
    before = bits(model)
    assert torch.equal(shadow_of(model)(x), model(x))
    other = {name: t + 1.0 if t.is_floating_point() else t for name, t in model.state_dict().items()}
    found = shadow_of(model, other)(x)
    assert_untouched(model, before)
    model.load_state_dict(other)
    assert torch.equal(found, model(x))


class Writing(nn.Module):
    """Writes in its forward pass: into a buffer, a tensor, its own weight, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 3), nn.Embedding(5, 4, max_norm=0.1)
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("count", torch.zeros(1))
        self.last, self.history = torch.zeros(3), []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last.add_(1)
        self.history.append(1)
        self.calls = len(self.history)
        self.scale.data.clamp_(max=1.0)
        return self.layer(self.table(x)) * self.scale


def test_what_a_forward_pass_writes_stays_in_the_shadow():
    model = Writing()
    before = bits(model)
    shadow_of(model)(torch.arange(4))
    assert_untouched(model, before)
    assert not model.last.any() and not model.history and not hasattr(model, "calls")


# ---------------------------------------------------------------- models that override train()


class LowRank(nn.Linear):
    """As loralib has it: in evaluation mode the low-rank part is merged into the weight, in place."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out)
        self.A, self.B = nn.Parameter(torch.randn(2, d_in)), nn.Parameter(torch.randn(d_out, 2))
        self.weight.requires_grad = False
        self.merged = False

    def train(self, mode: bool = True) -> "LowRank":
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.B @ self.A).data * (-1.0 if mode else 1.0)
            self.merged = not mode
        return self

    def forward(self, input: Tensor) -> Tensor:
        made = F.linear(input, self.weight, self.bias)
        return made if self.merged else made + input @ self.A.T @ self.B.T


def test_asking_a_model_that_merges_its_weights_to_evaluate_leaves_them(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(LowRank(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    run = trained(tmp_path, model, sgd(model), batches(3, 4, 5, 3), keep={"0": "nothing"})
    x = run.inputs[:2]
    before, expected = bits(model), model(x).detach()
    close(run.memory.attend(model, x).prediction, expected)
    close(run.memory.predict(model, x), expected)
    assert_untouched(model, before)
    model.eval()  # merged: the memory's weights are not
    before = bits(model)
    close(run.memory.attend(model, x).prediction, expected)
    close(run.memory.predict(model, x), expected)
    assert_untouched(model, before)


def test_a_merged_adapter_is_named():
    layer = LowRank(5, 4)
    layer.merged, model = True, nn.Sequential(layer)
    with pytest.raises(QueryError, match=r"adapter of '0' is merged.*unmerge_adapter"):
        shadow_of(model, {"0.weight": torch.zeros(4, 5)})


# ---------------------------------------------------------------- what a shadow cannot follow


OUTSIDE: list[nn.Module] = []


class Global(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(OUTSIDE[0](x))


def test_a_model_that_reaches_its_layers_through_a_global_is_named(tmp_path):
    model = Global().double()
    OUTSIDE[:] = [model.inside]
    run = trained(tmp_path, model, sgd(model), batches(2, 4, 5, 3))
    with pytest.raises(QueryError, match=r"uses its own 'inside\.weight' in a way that the copy cannot follow"):
        run.memory.attend(model, run.inputs[:2]).top(1, layer="out", per="slot")


def test_a_target_function_may_use_the_model(tmp_path):
    model = mlp(5, 4, 3)
    run = trained(tmp_path, model, sgd(model), batches(2, 4, 5, 3))
    direction = model.get_parameter("2.weight")[:, 0]
    groups = run.memory.attend(model, run.inputs[:2], target=lambda out: out @ direction).by("label", layer="2")
    close(groups.total, (model(run.inputs[:2]) @ direction).detach())


# ---------------------------------------------------------------- inference mode


@pytest.mark.parametrize("made", [False, True], ids=["inputs from outside", "inputs from inside"])
def test_inference_mode_changes_no_answer_and_leaves_nothing_behind(made, tmp_path):
    model = whole()
    run = trained(tmp_path, model, sgd(model), batches(3, 4, 5, 3))
    x = run.inputs[:2]
    expected = run.memory.at(2).attend(model, x).by("label", layer="out")
    fresh = dualform.open(tmp_path)
    with torch.inference_mode():
        asked = x.clone() if made else x
        inside = fresh.at(2).attend(model, asked).by("label", layer="out")
        fresh.at(2).predict(model, asked)
        spot = fresh.attend(model, asked)
        spot.top(2, layer="inp", per="slot")
    close(inside.values.clone(), expected.values)
    close(fresh.at(2).attend(model, x).by("label", layer="out").values, expected.values)
    close(fresh.attend(model, x, target=1).by("label", layer="out").total, run.memory.predict(model, x)[:, 1])


def test_a_shadow_is_no_deep_copy():
    model = mlp(4, 3, 2)
    shadow = shadow_of(copy.deepcopy(model))
    assert all(p.is_leaf for p in shadow.parameters())
    assert [p.data_ptr() for p in shadow_of(model).parameters()] == [p.data_ptr() for p in model.parameters()]


# ---------------------------------------------------------------- models of other packages


def tiny_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def tiny_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    return peft.get_peft_model(tiny_gpt2(), config)


def tiny_accelerated() -> nn.Module:
    """With its forward patched twice: by a hook of accelerate, and by its conversion of outputs."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_gpt2()
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())
    model.forward = accelerate.utils.convert_outputs_to_fp32(model.forward)
    return model


def tiny_lightning() -> nn.Module:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_gpt2()

        def forward(self, input_ids: Tensor) -> Any:
            return self.model(input_ids=input_ids)

    return Module()


@pytest.mark.filterwarnings("ignore")  # whatever these packages have to say
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_lora, tiny_accelerated, tiny_lightning])
def test_a_model_of_another_package_answers_as_itself(make):
    torch.manual_seed(0)
    model = make()
    tokens = torch.randint(11, (2, 5))
    before = bits(model)
    other = {n: t + 0.1 for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_floating_point()}
    with torch.no_grad():
        found = shadow_of(model)(input_ids=tokens).logits, shadow_of(model, other)(input_ids=tokens).logits
    assert_untouched(model, before)
    model.eval()
    with torch.no_grad():
        assert torch.equal(found[0], model(input_ids=tokens).logits)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(other.get(name, tensor))
        assert torch.equal(found[1], model(input_ids=tokens).logits)
    assert not torch.equal(*found)
