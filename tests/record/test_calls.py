"""The slots of a layer are its inputs and errors, however it is called."""

from collections.abc import Callable

import pytest
import torch
from helpers import Tokens, Whole, assert_clean, assert_rebuilt, assert_whole, close, mlp, seeds, sgd
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.errors import DualformError, QueryError


class Called(nn.Module):
    """A network given as a function of its layers a, b, c (widths 5 → 4 → 4 → 3)."""

    def __init__(self, forward: Callable[["Called", Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4, bias), nn.Linear(4, 4, bias), nn.Linear(4, 3, bias)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def plain(m, x):
    return m.c(m.b(m.a(x).relu()).relu())


def in_place(m, x):
    return m.c(m.b(m.a(x).relu_()).relu_()).mul_(2)


def in_place_modules(m, x):
    relu = nn.ReLU(inplace=True)
    return m.c(relu(m.b(relu(m.a(x)))))


def in_place_input(m, x):
    return m.c(m.b(x.clone().add_(1)[..., :4].contiguous().relu_()).add_(m.a(x)))


def called_twice(m, x):
    return m.c(m.b(m.b(m.a(x).relu()).tanh()))


def called_in_a_loop(m, x):
    h = m.a(x)
    for _ in range(4):
        h = h + m.b(h).tanh()
    return m.c(h)


def one_call_unused(m, x):
    m.b(m.a(x))  # nothing comes of it
    return m.c(m.a(x).relu())


def part_of_an_output(m, x):
    return m.c(m.b(m.a(x).relu())[..., :1].expand(*x.shape[:-1], 4))


def by_keyword(m, x):
    return m.c(input=m.b(input=m.a(input=x).relu()).relu())


def transposed(m, x):
    return m.c(m.b(m.a(x.mT.contiguous().mT).mT.contiguous().mT.relu()))


def expanded(m, x):
    return plain(m, x[..., :1].expand(x.shape))


def strided(m, x):
    return m.c(m.b(m.a(x.repeat_interleave(2, -1)[..., ::2]).relu().repeat_interleave(2, -1)[..., ::2]))


def detached(m, x):
    return m.c(m.b(m.a(x).detach().relu()))


def input_wants_a_gradient(m, x):
    return plain(m, x.clone().requires_grad_())


def checkpointed(m, x):
    return m.c(checkpoint(lambda h: m.b(m.a(h).relu()).relu(), x, use_reentrant=False))


def checkpointed_again(m, x):
    return m.c(checkpoint(lambda h: m.b(m.a(h).relu()).relu(), x.clone().requires_grad_(), use_reentrant=True))


def checkpointed_twice(m, x):
    h = checkpoint(m.a, x, use_reentrant=False)
    h = checkpoint(lambda h: m.b(h).tanh(), h, use_reentrant=False)
    return m.c(checkpoint(lambda h: m.b(h).relu(), h, use_reentrant=False))


def added_to_itself(m, x):
    h = m.a(x)
    return m.c(h + m.b(h) + m.b(h))


def views_of_an_output(m, x):
    h = m.a(x)
    return m.c(m.b(h.view(-1, 4)).view(h.shape).relu_())


def slices_written_to(m, x):
    h = m.b(m.a(x).relu()) * 1
    h[..., 0].mul_(2)
    h[..., 1:].tanh_()
    return m.c(h)


FORWARDS = [
    plain,
    in_place,
    in_place_modules,
    in_place_input,
    called_twice,
    called_in_a_loop,
    one_call_unused,
    part_of_an_output,
    by_keyword,
    transposed,
    expanded,
    strided,
    detached,
    input_wants_a_gradient,
    checkpointed,
    checkpointed_again,
    checkpointed_twice,
    added_to_itself,
    slices_written_to,
]
SHAPES = {"2-D": (3,), "3-D": (3, 2)}  # others below


def record_squares(path, model: nn.Module, shape: tuple[int, ...], steps: int = 3, **options) -> dualform.Memory:
    """Train towards zero on random inputs of one shape."""
    random = torch.Generator().manual_seed(1)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, **{"dtype": "float64", "progress": False, **options}):
        for _ in range(steps):
            model(torch.randn(shape, generator=random, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_calls_of_every_kind_are_recorded(forward, shape, bias, tmp_path):
    torch.manual_seed(0)
    model = Called(forward, bias).double()
    memory = record_squares(tmp_path, model, (*SHAPES[shape], 5))
    assert_clean(memory)
    assert_rebuilt(memory, model)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("forward", [plain, in_place, called_twice, by_keyword], ids=lambda f: f.__name__)
def test_a_single_row_without_a_batch_is_recorded(forward, bias, tmp_path):
    torch.manual_seed(0)
    model = Called(forward, bias).double()
    memory = record_squares(tmp_path, model, (5,))
    assert_clean(memory)
    assert_rebuilt(memory, model)
    assert memory.visits["row"].to_pylist() == [0] * 3


@given(leading=st.lists(st.integers(1, 4), max_size=4), bias=st.booleans(), inplace=st.booleans(), seed=seeds)
def test_inputs_may_have_any_leading_shape(leading, bias, inplace, seed, tmp_path_factory):
    model = mlp(3, 4, 2, bias=bias, inplace=inplace, seed=seed)
    memory = record_squares(tmp_path_factory.mktemp("memory"), model, (*leading, 3))
    assert_clean(memory)
    assert_rebuilt(memory, model)


def test_views_of_outputs_are_recorded_and_their_rows_followed(tmp_path):
    """Rows (b·n, d) where the batch has b examples."""
    model = Called(views_of_an_output).double()
    memory = record_squares(tmp_path, model, (3, 2, 5))
    assert_clean(memory)
    assert_rebuilt(memory, model)
    calls = memory.store.calls("b")
    assert (calls.batch == 3).all() and (calls.stride == 2).all() and (calls.visit >= 0).all()


# ---------------------------------------------------------------- shared and tied layers


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = self.a
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.b(self.a(x).relu()).tanh())


class Tied(nn.Module):
    """Two modules with one weight; biases of their own, one bias, or only one of them has a bias."""

    def __init__(self, biases: str) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(5, 5), nn.Linear(5, 5, bias=biases != "one of them"), nn.Linear(5, 3)
        self.b.weight = self.a.weight
        if biases == "shared":
            self.b.bias = self.a.bias

    def forward(self, x):
        return self.out(self.b(self.a(x).relu()).tanh() + self.a(x))


class TiedBias(nn.Module):
    """Two weights with one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.bias = self.a.bias

    def forward(self, x):
        return self.out(self.b(self.a(x).relu()).tanh())


SHARING = {
    "a module under two names": Shared,
    "tied weights, separate biases": lambda: Tied("separate"),
    "tied weights, one bias": lambda: Tied("shared"),
    "tied weights, a bias on one side": lambda: Tied("one of them"),
    "one bias for two weights": TiedBias,
    "a whole model": Whole,
}


@pytest.mark.parametrize("name", SHARING)
def test_shared_and_tied_layers_are_recorded(name, tmp_path):
    torch.manual_seed(0)
    model = SHARING[name]().double()
    memory = record_squares(tmp_path, model, (4, 5), steps=4)
    assert_clean(memory)
    assert_rebuilt(memory, model)
    x = torch.randn(2, 5, dtype=torch.float64)
    model.eval()
    spot = memory.attend(model, x)
    close(spot.output("out"), model(x))
    for layer in memory.layers:
        assert_whole(spot.by("step", layer=layer, target=0))


def test_layers_that_share_a_weight_are_one_memory_under_all_their_names(tmp_path):
    torch.manual_seed(0)
    model = Tied("separate").double()
    memory = record_squares(tmp_path, model, (4, 5), steps=2)
    assert memory.layers == ("a", "b", "out")
    assert memory.store.slots("a") == 2 * 3 * 4  # two steps, three calls, four examples
    spot = memory.attend(model, torch.randn(1, 5, dtype=torch.float64))
    assert len(list(spot.top(100, layer="b", per="slot"))) == 24


# ---------------------------------------------------------------- which layers


@pytest.mark.parametrize("layers", [["a"], ["c", "a"], "b", ("b",)], ids=str)
def test_only_the_named_layers_are_recorded_and_the_rest_is_kept(layers, tmp_path):
    torch.manual_seed(0)
    model = Called(plain).double()
    memory = record_squares(tmp_path, model, (3, 5), layers=layers)
    assert_clean(memory)
    assert_rebuilt(memory, model)
    assert set(memory.layers) == set(layers)
    assert set(memory.certificate) == {f"{name}.{kind}" for name in layers for kind in ("weight", "bias")}


def test_naming_one_of_two_tied_layers_records_both(tmp_path):
    torch.manual_seed(0)
    model = Tied("separate").double()
    memory = record_squares(tmp_path, model, (3, 5), layers=["b"])
    assert_clean(memory)
    assert_rebuilt(memory, model)
    assert memory.layers == ("a", "b")


def test_a_layer_of_which_nothing_is_kept_is_part_of_the_rest(tmp_path):
    torch.manual_seed(0)
    model = Called(plain).double()
    memory = record_squares(tmp_path, model, (3, 5), keep={"b": "nothing"})
    assert memory.layers == ("a", "c")
    assert "b.weight" in memory.certificate.rest
    assert_rebuilt(memory, model)


def test_a_layer_of_which_keys_are_kept_is_asked_for_weights_only(tmp_path):
    torch.manual_seed(0)
    model = Called(plain).double()
    memory = record_squares(tmp_path, model, (3, 5), keep={"b": "keys"})
    assert memory.layers == ("a", "b", "c")
    assert {"b.weight", "b.bias"} <= set(memory.certificate.rest)
    assert_clean(memory)
    assert_rebuilt(memory, model)
    spot = memory.attend(model, torch.randn(2, 5, dtype=torch.float64))
    assert spot.top(2, layer="b", score="abs", per="slot").contribution.isnan().all()
    assert spot.top(2, layer="c", per="slot").contribution.isfinite().all()
    with pytest.raises(QueryError, match="keep='slots'"):
        spot.top(2, layer="b", per="slot")


def test_keys_alone_may_be_kept_of_all_layers(tmp_path):
    torch.manual_seed(0)
    model = Called(plain).double()
    memory = record_squares(tmp_path, model, (3, 5), keep="keys")
    weights = memory.weights()
    for name, tensor in model.named_parameters():
        assert torch.equal(weights[name], tensor)
    spot = memory.attend(model, torch.randn(2, 5, dtype=torch.float64))
    assert spot.top(2, layer="b", score="weight", per="slot").weight.isfinite().all()


# ---------------------------------------------------------------- empty calls


class Experts(nn.Module):
    """A row goes to one of two experts; often one of them gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        to_left = x[:, 0] > 0
        out = x.new_zeros(len(x), 3)
        out[to_left], out[~to_left] = self.left(x[to_left]), self.right(x[~to_left])
        return out


@pytest.mark.parametrize("shape", [(1, 5), (4, 5)], ids=str)
@pytest.mark.filterwarnings("ignore::dualform.errors.DualformWarning")  # whose visits these are, nobody knows
def test_an_expert_may_get_no_rows(shape, tmp_path):
    torch.manual_seed(0)
    model = Experts().double()
    memory = record_squares(tmp_path, model, shape, steps=8)
    assert_rebuilt(memory, model)
    assert {mark.kind for mark in memory.certificate.marks} <= {"unknown-visits"}


def test_a_batch_may_be_empty(tmp_path):
    torch.manual_seed(0)
    model = mlp(5, 3)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        for size in (3, 0, 2):
            tape.note(index=torch.arange(size))
            model(torch.randn(size, 5, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert_clean(memory)
    assert_rebuilt(memory, model)
    assert len(memory.visits) == 5


def test_the_stored_keys_are_the_inputs_at_the_time_of_the_call(tmp_path):
    torch.manual_seed(0)
    model = mlp(5, 3)
    model[0].weight.requires_grad_(False)
    optimizer = sgd(model)
    seen = []
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
        for _ in range(3):
            x = torch.randn(2, 5, dtype=torch.float64)
            seen.append(x.clone())
            z = model(x)
            x.zero_()
            z.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert_rebuilt(memory, model)
    keys = torch.cat([block.keys for block in memory.store.blocks("0", errors=False)])
    assert torch.equal(keys, torch.cat(seen))


def test_a_model_may_be_a_layer_itself(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    memory = record_squares(tmp_path, model, (4, 5))
    assert_clean(memory)
    assert_rebuilt(memory, model)
    assert memory.layers == ("",)
    x = torch.randn(2, 5, dtype=torch.float64)
    close(memory.attend(model, x).output(""), model(x))


def test_an_error_names_a_parameter_that_is_replaced_while_recording(tmp_path):
    model = mlp(5, 3)
    with (
        pytest.raises(DualformError, match=r"0\.weight"),
        dualform.record(model, sgd(model), tmp_path, dtype="float64", progress=False),
    ):
        model[0].weight = nn.Parameter(torch.ones(3, 5, dtype=torch.float64))
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()


def test_a_weight_may_lie_transposed_in_memory(tmp_path):
    torch.manual_seed(0)
    model = mlp(5, 4, 3)
    model[0].weight = nn.Parameter(torch.randn(5, 4, dtype=torch.float64).T)
    assert not model[0].weight.is_contiguous()
    memory = record_squares(tmp_path, model, (4, 5))
    assert_clean(memory)
    assert_rebuilt(memory, model)


def test_names_of_layers_may_contain_any_character(tmp_path):
    torch.manual_seed(0)
    names = ("a@3", "a#buffer", "ä/ö", "keys")
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(5, 5))
    model = model.double()
    memory = record_squares(tmp_path, model, (4, 5), layers=names[1:])  # the first one is a part of the rest
    assert_clean(memory)
    assert_rebuilt(memory, model)
    assert memory.layers == names[1:]
    assert torch.equal(memory.at(3).weights()["a@3.weight"], model.get_parameter("a@3.weight"))


def test_tokens_are_recorded_under_several_lengths(tmp_path):
    torch.manual_seed(0)
    model = Tokens().double()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        for n in (1, 4, 2):
            tape.note(length=n)
            model(torch.randn(3, n, 5, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert_clean(memory)
    assert_rebuilt(memory, model)
    assert memory.store.slots("each") == 3 * 7
    assert memory.visits["length"].to_pylist() == [1] * 3 + [4] * 3 + [2] * 3
