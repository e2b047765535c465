"""Layers with their own forward pass: recorded by the linear map inside it, or left to the rest with a reason."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import EXACT, state_of
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.errors import DualformWarning, NothingToRecord

TOKENS, EXAMPLES = 11, 4


class Pair(nn.Linear):
    """Returns a tuple, as layers do that leave the bias to others."""

    def forward(self, input: Tensor):  # type: ignore[override]
        return super().forward(input), None


class Scaled(nn.Linear):
    """Applies dropout to its input and scales it, and scales its output."""

    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * super().forward(F.dropout(input, 0.3, self.training) * 3)


class Transposed(nn.Linear):
    """Falcon's linear layer: the transposed weight on the right, the bias added afterwards."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias


class ScaledWords(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embedding_dim**0.5


class Positions(nn.Embedding):
    """BART's positions: their index is computed inside, with an offset."""

    def forward(self, input: Tensor) -> Tensor:
        positions = torch.arange(input.shape[1]).expand(input.shape[0], -1)
        return super().forward(positions + 2)


class Slice(nn.Embedding):
    """Whisper's positions: a slice of the table."""

    def forward(self, input: Tensor) -> Tensor:
        return self.weight[1 : 1 + input.shape[1]]


class SamePadding(nn.Conv2d):
    """Pads by itself, with other numbers than its class would."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(F.pad(input, (0, 2, 1, 1), value=1.0), self.weight, self.bias, self.stride, groups=self.groups)


class Standardised(nn.Conv2d):
    """A convolution with its weight standardised, as in BiT and NFNet."""

    def forward(self, input: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) / self.weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(input, weight, self.bias)


class BiasElsewhere(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 3 * F.linear(input, self.weight) + self.bias


class Around(nn.Module):
    """A layer, and a linear layer behind it."""

    def __init__(self, body: nn.Module, width: int, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.read = body, nn.Linear(width, 3), read

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self.body, x).tanh())


def words(body: nn.Module, x: Tensor) -> Tensor:
    return body(x).mean(-2).expand(len(x), -1)


def patched() -> nn.Module:
    """An instance whose forward was replaced, as offloading and tracing tools do."""
    body = nn.Linear(4, 5)
    forward = body.forward
    body.forward = lambda input: 2 * forward(input)
    return body


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    width: int
    shape: tuple[int, ...]
    read: Callable[[nn.Module, Tensor], Tensor] = lambda body, x: body(x)

    def model(self) -> Around:
        torch.manual_seed(0)
        return Around(self.make(), self.width, self.read).double()

    def inputs(self, random: torch.Generator) -> Tensor:
        if isinstance(self.make(), nn.Embedding):
            return torch.randint(TOKENS, (EXAMPLES, *self.shape), generator=random)
        return torch.randn(EXAMPLES, *self.shape, generator=random, dtype=torch.float64)


def image(body: nn.Module, x: Tensor) -> Tensor:
    return body(x).flatten(1)


RECORDED = {
    "a tuple is returned": Case(lambda: Pair(4, 5), 5, (4,), lambda body, x: body(x)[0]),
    "input and output are scaled": Case(lambda: Scaled(4, 5), 5, (4,)),
    "the weight is transposed": Case(lambda: Transposed(4, 5), 5, (4,)),
    "the instance is patched": Case(patched, 5, (4,)),
    "words are scaled": Case(lambda: ScaledWords(TOKENS, 5, padding_idx=1), 5, (6,), words),
    "positions have an offset": Case(lambda: Positions(TOKENS, 5), 5, (6,), words),
    "positions are a slice": Case(lambda: Slice(TOKENS, 5), 5, (6,), words),
    "padding is its own": Case(lambda: SamePadding(2, 4, 3, groups=2), 64, (2, 4, 4), image),
}


def functional(body: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(body, nn.Linear)
    return F.linear(x, body.weight, body.bias)


def qat() -> nn.Module:
    from torch.ao.nn.qat import Linear
    from torch.ao.quantization.qconfig import default_qat_qconfig

    return Linear(4, 5, qconfig=default_qat_qconfig)


LEFT = {
    "a fake-quantised weight": Case(qat, 5, (4,)),
    "a standardised weight": Case(lambda: Standardised(2, 4, 3), 16, (2, 4, 4), image),
    "functional use of the weight": Case(lambda: nn.Linear(4, 5), 5, (4,), functional),
}


def train(case: Case, path: Path | None, model: Around | None = None, steps: int = 6, **options):
    model = case.model() if model is None else model
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    random, states = torch.Generator().manual_seed(1), [state_of(model)]
    torch.manual_seed(2)  # of dropout

    def step(tape=None) -> None:
        x, label = case.inputs(random), torch.randint(3, (EXAMPLES,), generator=random)
        if tape is not None:
            tape.note(label=label)
        F.cross_entropy(model(x), label).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(state_of(model))

    if path is None:
        for _ in range(steps):
            step()
    else:
        with dualform.record(model, optimizer, path, dtype="float64", progress=False, **options) as tape:
            for _ in range(steps):
                step(tape)
    return model, states, case.inputs(random)


@pytest.mark.parametrize("name", RECORDED)
def test_a_layer_with_its_own_forward_is_explained_by_the_map_inside_it(name, tmp_path):
    model, states, _ = train(RECORDED[name], tmp_path)
    memory = dualform.open(tmp_path)
    assert not memory.certificate.marks and not memory.certificate.rest
    assert max(memory.check(model, full=True, progress=False).values()) < EXACT
    assert memory.certificate.worst < EXACT
    for step, state in enumerate(states):
        torch.testing.assert_close(memory.at(step).weights(), state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", RECORDED)
def test_the_dual_output_is_that_of_the_map_inside(name, tmp_path):
    model, _, x = train(RECORDED[name], tmp_path)
    model.eval()
    products: list[Tensor] = []

    class Outputs(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            uses = [arg for arg in args if arg is model.body.weight or getattr(arg, "_base", None) is model.body.weight]
            if isinstance(output, Tensor) and uses and getattr(func, "__name__", "") != "__get__":
                products.append(output)
            return output

    with Outputs():
        model(x)
    bias = model.body.bias if isinstance(model.body, Transposed) else 0.0
    expected = products[0] + bias
    output = dualform.open(tmp_path).attend(model, x).output("body")
    torch.testing.assert_close(output.reshape(expected.shape), expected.detach(), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::dualform.errors.DualformWarning")
@pytest.mark.parametrize("name", RECORDED | LEFT)
def test_recorded_training_is_bare_training_bit_for_bit(name, tmp_path):
    case = (RECORDED | LEFT)[name]
    _, bare, _ = train(case, None)
    _, recorded, _ = train(case, tmp_path)
    for before, after in zip(bare, recorded, strict=True):
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", LEFT)
def test_a_layer_that_is_another_map_is_left_to_the_rest_with_a_mark_and_a_reason(name, tmp_path):
    with pytest.warns(DualformWarning, match="kept as snapshots, unattributed"):
        _, states, _ = train(LEFT[name], tmp_path)
    memory = dualform.open(tmp_path)
    certificate = memory.certificate
    assert {"body.weight", "body.bias"} <= set(certificate.rest) and set(certificate) == {"head.weight", "head.bias"}
    assert {mark.kind for mark in certificate.marks} <= {"not-this-map", "without-slots"}
    assert all(certificate.reasons[name] for name in certificate.rest)
    assert certificate.worst < EXACT and memory.layers == ("head",)
    for step, state in enumerate(states):
        rebuilt = memory.at(step).weights()
        assert all(torch.equal(rebuilt[key], state[key]) for key in rebuilt if key.startswith("body"))
        torch.testing.assert_close(rebuilt, state, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::dualform.errors.DualformWarning")
@pytest.mark.parametrize("name", LEFT)
def test_what_was_left_to_the_rest_stays_there_when_recording_goes_on(name, tmp_path):
    case = LEFT[name]
    model = case.model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(0)
    for resume in (None, 3):
        with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False, resume=resume):
            for _ in range(3):
                F.cross_entropy(model(case.inputs(random)), torch.tensor([0, 1, 2, 0])).backward()
                optimizer.step()
                optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert memory.step == 6 and {"body.weight", "body.bias"} <= set(memory.certificate.rest)
    torch.testing.assert_close(memory.weights(), state_of(model), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::dualform.errors.DualformWarning")
def test_large_layers_left_to_the_rest_are_kept_as_rarely_as_a_large_rest_is(tmp_path):
    """A weight of two megabytes and its bias: every third step is looked at, unless the user says otherwise."""
    case = Case(lambda: nn.Linear(512, 512), 512, (512,), functional)
    for snapshot_every, every in ((None, 3), (1, 1)):
        _, states, _ = train(case, tmp_path, steps=4, snapshot_every=snapshot_every, overwrite=True)
        memory = dualform.open(tmp_path)
        assert memory.store.manifest.snapshot_every == every
        assert torch.equal(memory.at(every).weights()["body.weight"], states[every]["body.weight"])


def test_a_bias_added_elsewhere_is_left_to_the_rest_without_its_weight(tmp_path):
    case = Case(lambda: BiasElsewhere(4, 5), 5, (4,))
    with pytest.warns(DualformWarning, match="adds the bias elsewhere"):
        train(case, tmp_path)
    memory = dualform.open(tmp_path)
    assert memory.certificate.rest == ("body.bias",) and "body.weight" in memory.certificate
    assert memory.certificate.worst < EXACT


def test_a_layer_that_becomes_another_map_after_it_was_trained_is_marked(tmp_path):
    class Late(nn.Linear):
        computed = False

        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight * 2 if self.computed else self.weight, self.bias)

    late = Late(4, 5)
    model = Around(late, 5, lambda body, x: body(x)).double()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(), dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
        warnings.simplefilter("ignore", DualformWarning)
        for step in range(6):
            late.computed = step > 2
            F.cross_entropy(model(torch.randn(4, 4, dtype=torch.float64)), torch.tensor([0, 1, 2, 0])).backward()
            optimizer.step()
            optimizer.zero_grad()
    marks = {(mark.kind, mark.name): mark.first_step for mark in dualform.open(tmp_path).certificate.marks}
    assert marks["not-this-map", "body.weight"] == 4


def test_a_tied_weight_is_left_to_the_rest_if_one_of_its_layers_is_another_map(tmp_path):
    class Rounded(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return F.embedding(input, self.weight * 1.5)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = Rounded(TOKENS, 5), nn.Linear(5, TOKENS)
            self.middle, self.out.weight = nn.Linear(5, 5), self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.middle(self.words(x)).tanh()).mean(1)

    torch.manual_seed(0)
    model = Tied().double()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    with (
        pytest.warns(DualformWarning, match="no functional call takes the weight itself"),
        dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False),
    ):
        for _ in range(4):
            F.cross_entropy(model(torch.randint(TOKENS, (4, 6))), torch.tensor([0, 1, 2, 0])).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert set(memory.certificate.rest) == {"words.weight", "out.bias"} and memory.layers == ("middle",)
    assert memory.certificate.worst < EXACT
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(memory.weights(), parameters, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_with_their_own_forward_are_explained_and_no_mode_is_left(reentrant, tmp_path):
    """A recomputed forward pass may be stopped in its middle, by an error that torch raises and catches."""

    def read(body: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(body, x.requires_grad_(), use_reentrant=reentrant)  # type: ignore[return-value]

    case = Case(lambda: nn.Sequential(Transposed(4, 5), nn.Tanh(), Scaled(5, 5)), 5, (4,), read)
    model, _, _ = train(case, tmp_path)
    memory = dualform.open(tmp_path)
    assert not memory.certificate.marks and not memory.certificate.rest
    assert max(memory.check(model, full=True, progress=False).values()) < EXACT
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_copy_made_while_its_layer_is_recorded_is_a_plain_model(tmp_path):
    model = RECORDED["words are scaled"].model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path, progress=False):
        twin = copy.deepcopy(model.body)
        words = torch.tensor([[1, 2, 3]])
        assert torch.equal(twin(words), model.body(words))
        model.body(words).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(twin(words), model.body(words))


@pytest.mark.filterwarnings("ignore::dualform.errors.DualformWarning")
def test_observers_of_quantisation_may_resize_their_buffers(tmp_path):
    from torch.ao.nn.qat import Linear
    from torch.ao.quantization.qconfig import get_default_qat_qconfig

    model = nn.Sequential(Linear(4, 5, qconfig=get_default_qat_qconfig("fbgemm")), nn.ReLU(), nn.Linear(5, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x, label = torch.randn(EXAMPLES, 4), torch.tensor([0, 1, 2, 0])
    with dualform.record(model, optimizer, tmp_path, dtype="float32", progress=False):
        for _ in range(3):
            F.cross_entropy(model(x), label).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory, state = dualform.open(tmp_path), state_of(model)
    assert state["0.weight_fake_quant.scale"].shape == (5,) and memory.layers == ("2",)
    torch.testing.assert_close(memory.weights(), state, rtol=0, atol=1e-6)


def test_a_model_without_a_layer_of_a_known_kind_is_refused_with_the_classes_it_has():
    class GraphLinear(nn.Module):
        """A linear layer that is no ``nn.Linear``, as in graph libraries."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

    model = nn.Sequential(GraphLinear())
    with pytest.raises(NothingToRecord, match=r"no layer that can be recorded: .*GraphLinear.* nn\.Linear"):
        dualform.record(model, optim.SGD(model.parameters(), lr=0.1), "nowhere")
