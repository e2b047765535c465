"""What several tests use: small networks and their training, and a memory that is read the slow way."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.explain import Groups

EXACT = 1e-12
"""The bar for a network that is trained and remembered in float64."""


@contextmanager
def unchecked() -> Iterator[None]:
    """Without the types that tests check: as it is in use."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


# ---------------------------------------------------------------- networks


def mlp(*widths: int, bias: bool | Sequence[bool] = True, inplace: bool = False, seed: int = 0) -> nn.Sequential:
    """Linear layers with ReLU between them, in float64; the linear layers are "0", "2", "4", …"""
    torch.manual_seed(seed)
    biases = [bias] * len(widths) if isinstance(bias, bool) else bias
    parts: list[nn.Module] = []
    for d_in, d_out, has_bias in zip(widths, widths[1:], biases, strict=False):
        parts += [nn.Linear(d_in, d_out, bias=has_bias), nn.ReLU(inplace)]
    return nn.Sequential(*parts[:-1]).double()


class Whole(nn.Module):
    """Normalisation, dropout, a layer that is called twice, and two layers with one weight and a bias each."""

    def __init__(self, d_in: int = 5, width: int = 6, classes: int = 3, dropout: float = 0.2) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(d_in, width), nn.LayerNorm(width)
        self.batch, self.drop = nn.BatchNorm1d(width), nn.Dropout(dropout)
        self.twice = nn.Linear(width, width)
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.right.weight = self.left.weight
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.batch(self.norm(self.inp(x)).relu())
        h = h + self.twice(self.drop(h)).relu()
        h = h + self.twice(h).tanh()
        return self.out(h + self.right(self.left(h).tanh()))


def whole(seed: int = 0, dropout: float = 0.2) -> Whole:
    torch.manual_seed(seed)
    return Whole(dropout=dropout).double()


class Tokens(nn.Module):
    """Tokens (b n d), or (n b d) where ``time_first``: a layer for each token, their mean, a layer for the example."""

    def __init__(self, d_in: int = 5, width: int = 4, classes: int = 3, time_first: bool = False) -> None:
        super().__init__()
        self.each, self.out = nn.Linear(d_in, width), nn.Linear(width, classes)
        self.time = 0 if time_first else 1

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.each(x).relu().mean(self.time))


def tokens(seed: int = 0, time_first: bool = False) -> Tokens:
    torch.manual_seed(seed)
    return Tokens(time_first=time_first).double()


# ---------------------------------------------------------------- training

Batch = tuple[Tensor, Tensor]


def batches(
    steps: int, size: int | Sequence[int], d_in: int, classes: int, *, middle: Sequence[int] = (), seed: int = 0
) -> list[Batch]:
    """Random inputs (size, *middle, d_in) and labels, without touching the global generator."""
    random = torch.Generator().manual_seed(seed)
    sizes = [size] * steps if isinstance(size, int) else size
    return [
        (
            torch.randn(n, *middle, d_in, generator=random, dtype=torch.float64),
            torch.randint(classes, (n,), generator=random),
        )
        for n in sizes
    ]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@dataclass
class Run:
    """A recorded training: ``states[s]`` is the model after step s."""

    path: Path
    model: nn.Module
    optimizer: optim.Optimizer
    data: Sequence[Batch]
    states: list[dict[str, Tensor]] = field(default_factory=list)

    @cached_property
    def memory(self) -> dualform.Memory:
        return dualform.open(self.path)

    @property
    def inputs(self) -> Tensor:
        """The inputs of all visits, one below the other."""
        return torch.cat([x for x, _ in self.data])


def trained(
    path: Path,
    model: nn.Module,
    optimizer: optim.Optimizer,
    data: Sequence[Batch],
    *,
    before_step: Callable[[int], Any] = lambda step: None,
    after_step: Callable[[int], Any] = lambda step: None,
    **options: Any,
) -> Run:
    """Train with cross entropy, one step a batch, and record it: columns index (0, 1, 2, …), label, source."""
    run = Run(path, model, optimizer, data, [state_of(model)])
    options = {"dtype": "float64", "progress": False, **options}
    count = 0
    with dualform.record(model, optimizer, path, **options) as tape:
        for step, (x, y) in enumerate(data, start=1):
            tape.note(index=torch.arange(len(y)) + count, label=y, source="odd" if step % 2 else "even")
            count += len(y)
            F.cross_entropy(model(x), y).backward()
            before_step(step)
            optimizer.step()
            optimizer.zero_grad()
            run.states.append(state_of(model))
            after_step(step)
    return run


def sgd(model: nn.Module, **settings: Any) -> optim.SGD:
    """An optimiser that uses all of its settings, unless told otherwise."""
    return optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, **settings})


def clip(model: nn.Module, norm: float = 0.5) -> Callable[[int], Any]:
    """To be called before each step."""
    return lambda step: nn.utils.clip_grad_norm_(model.parameters(), norm)


# ---------------------------------------------------------------- for hypothesis

seeds = st.integers(0, 2**31 - 1)


@st.composite
def sgd_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Settings that ``torch.optim.SGD`` takes."""
    momentum = draw(st.sampled_from([0.0, 0.5, 0.9, 0.95]) | st.floats(0.01, 0.99))
    nesterov = draw(st.booleans()) if momentum else False
    return {
        "lr": draw(st.floats(1e-3, 0.3)),
        "momentum": momentum,
        "dampening": 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3, 0.9])),
        "weight_decay": draw(st.sampled_from([0.0, 1e-4, 1e-2, 0.3])),
        "nesterov": nesterov,
        "maximize": draw(st.booleans()),
    }


@dataclass(frozen=True)
class Setup:
    """A random network, how it is trained, and on what."""

    widths: tuple[int, ...]
    bias: tuple[bool, ...]
    inplace: bool
    settings: dict[str, Any]
    sizes: tuple[int, ...]
    clip: float | None
    seed: int

    def run(self, path: Path, **options: Any) -> Run:
        model = mlp(*self.widths, bias=self.bias, inplace=self.inplace, seed=self.seed)
        data = batches(len(self.sizes), self.sizes, self.widths[0], self.widths[-1], seed=self.seed)
        before = clip(model, self.clip) if self.clip else lambda step: None
        return trained(path, model, optim.SGD(model.parameters(), **self.settings), data, before_step=before, **options)

    def queries(self, count: int = 3) -> Tensor:
        random = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(count, self.widths[0], generator=random, dtype=torch.float64)


@st.composite
def setups(draw: st.DrawFn, min_classes: int = 2) -> Setup:
    """Any small network with any SGD."""
    hidden = draw(st.lists(st.integers(1, 7), max_size=2))
    widths = (draw(st.integers(1, 12)), *hidden, draw(st.integers(min_classes, 4)))
    return Setup(
        widths,
        tuple(draw(st.booleans()) for _ in widths[1:]),
        draw(st.booleans()),
        draw(sgd_settings()),
        tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=7))),
        draw(st.sampled_from([None, 0.05, 0.5])),
        draw(seeds),
    )


# ---------------------------------------------------------------- assertions


def assert_rebuilt(memory: dualform.Memory, model: nn.Module, bar: float = EXACT) -> None:
    """The slots make up the weights of the model.

    A parameter that hardly moved is only known to the rounding of its own values: there the floor of training counts.
    """
    for certificate in (memory.check(model, full=True), memory.certificate):  # now, and as written while recording
        assert len(certificate), "nothing was explained"
        for name, error in certificate.items():
            assert error <= max(bar, 30 * certificate.floor[name]), f"{name}: {error:.1e}\n{certificate}"
    weights = memory.weights()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            off = (weights[name] - tensor.detach()).double().norm()
            assert off <= bar * max(1e-3, tensor.detach().double().norm().item()), f"{name}: {off:.1e}"
        else:
            assert torch.equal(weights[name], tensor), name


def assert_clean(memory: dualform.Memory) -> None:
    """Nothing was noticed that the memory does not explain."""
    assert memory.certificate.marks == ()


def close(found: Tensor | None, expected: Tensor, bar: float = EXACT) -> None:
    """Equal up to rounding, relative to the largest entry."""
    assert found is not None
    assert found.shape == expected.shape, (found.shape, expected.shape)
    size = max(1.0, expected.detach().abs().max().item()) if expected.numel() else 1.0
    off = (found.detach().double() - expected.detach().double()).abs()
    assert not off.numel() or off.max() <= bar * size, f"off by {off.max():.1e} of {size:.1e}"


def assert_whole(groups: Groups, bar: float = EXACT) -> None:
    """The parts of a contribution sum to the layer's own part of the target."""
    assert groups.residual is not None and groups.total is not None
    size = max(1.0, groups.total.abs().max().item())
    assert groups.residual.abs().max() <= bar * size, f"a residual of {groups.residual.abs().max():.1e}"


# ---------------------------------------------------------------- a memory read the slow way


@dataclass(frozen=True)
class NaiveSlots:
    """All slots of a layer, one row each."""

    keys: Tensor
    errors: Tensor | None
    module: list[str]
    step: np.ndarray
    visit: np.ndarray
    position: np.ndarray
    factor: np.ndarray


class Naive:
    """A memory read from its files alone, as ``store/format/manifest.py`` describes them, without the library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
        self.first = load_file(path / "init.safetensors")
        self.calls = self._table("calls")
        self.steps = self._table("steps")
        self.visits = self._table("visits")

    def _table(self, kind: str) -> list[dict[str, Any]]:
        out = []
        for shard in self.manifest["shards"]:
            file = self.path / kind / f"{shard['number']:06d}.parquet"
            if file.exists():
                out += [line for line in pq.read_table(file).to_pylist() if line["step"] <= shard["last"]]
        return out

    def tensors(self, name: str) -> list[Tensor]:
        """A tensor of every shard that has it."""
        files = sorted((self.path / "shards").glob("*.safetensors"))
        return [tensors[name] for tensors in map(load_file, files) if name in tensors]

    def slots(self, layer: str) -> NaiveSlots:
        out: dict[str, list[Any]] = {name: [] for name in ("module", "step", "visit", "position", "factor")}
        for call in (call for call in self.calls if call["layer"] == layer):
            stride, batch = call["stride"], call["batch"]
            for r in range(call["rows"]):
                out["module"].append(call["module"])
                out["step"].append(call["step"])
                out["visit"].append(-1 if call["visit"] < 0 else call["visit"] + r // stride % batch)
                out["position"].append(r // (stride * batch) * stride + r % stride)
                out["factor"].append(call["factor"])
        arrays = {name: np.array(values) for name, values in out.items() if name != "module"}
        return NaiveSlots(self._rows(f"{layer}.key"), self._rows(f"{layer}.error"), out["module"], **arrays)  # type: ignore[arg-type]

    def _rows(self, name: str) -> Any:
        values = [v.double() for v in self.tensors(f"{name}s")]
        if not values:
            return None
        exponents = self.tensors(f"{name}_exponents")
        if exponents:
            values = [v * torch.exp2(e.double()).unsqueeze(1) for v, e in zip(values, exponents, strict=True)]
        return torch.cat(values)

    def transitions(self, parameter: str) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """(step, the 2×2 matrix A, the vector b times the gradient's scale) for each step of a parameter."""
        return [
            (
                line["step"],
                np.array([[line["ww"], line["wm"]], [line["mw"], line["mm"]]]),
                np.array([line["wg"], line["mg"]]) * line["scale"],
            )
            for line in self.steps
            if line["parameter"] == parameter
        ]

    def coefficients(self, parameter: str, horizon: int) -> tuple[np.ndarray, float, float]:
        """c of every step, ρ and γ: each one an impulse that is carried forward by itself."""
        moves = [move for move in self.transitions(parameter) if move[0] <= horizon]
        c = np.zeros(self.manifest["steps"] + 1)
        for i, (step, _, b) in enumerate(moves):
            state = b
            for _, a, _ in moves[i + 1 :]:
                state = a @ state
            c[step] += state[0]
        beginning = np.eye(2)
        for _, a, _ in moves:
            beginning = a @ beginning
        return c, float(beginning[0, 0]), float(beginning[0, 1])

    def values(self, layer: str, parameter: str, horizon: int, visible: np.ndarray | None = None) -> np.ndarray:
        """What each slot of a layer counts for in a parameter."""
        slots = self.slots(layer)
        c, _, _ = self.coefficients(parameter, horizon)
        info = next(info for info in self.manifest["layers"] if info["name"] == layer)
        users = [m["name"] for m in info["modules"] if parameter in (weight_of(info), *m["biases"])]
        value = c[slots.step] * slots.factor * (slots.step <= horizon) * np.isin(slots.module, users)
        return value if visible is None else value * np.append(visible, True)[slots.visit]

    def initial(self, parameter: str, horizon: int) -> Tensor:
        """ρ W₀ + γ M₀."""
        _, rho, gamma = self.coefficients(parameter, horizon)
        start = rho * self.first[parameter].double()
        buffer = self.first.get(f"{parameter}#buffer")
        return start if buffer is None else start + gamma * buffer.double()

    def parameter(self, name: str, horizon: int | None = None, visible: np.ndarray | None = None) -> Tensor:
        """A weight or bias: every slot added by itself."""
        upto: int = self.manifest["steps"] if horizon is None else horizon
        total = self.initial(name, upto)
        for info in self.manifest["layers"]:
            if name != weight_of(info) and all(name not in m["biases"] for m in info["modules"]):
                continue
            slots, values = self.slots(info["name"]), self.values(info["name"], name, upto, visible)
            assert slots.errors is not None
            for key, error, value in zip(slots.keys, slots.errors, values.tolist(), strict=True):
                total = total + value * (torch.outer(error, key) if name == weight_of(info) else error)
        return total


def weight_of(info: Mapping[str, Any]) -> str:
    """The weight of a linear layer in the manifest."""
    (piece,) = info["pieces"]
    return piece["parameter"]


def watched(
    model: nn.Module, x: Tensor, target: Callable[[Tensor], Tensor] | None = None
) -> dict[str, tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """For each linear layer its inputs, its outputs and the gradients of the target at these, call by call."""
    target = target or (lambda z: z.max(1).values)
    found: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found[name] = ([], [])

            def hook(m: nn.Module, args: tuple, z: Tensor, kept: tuple[list, list] = found[name]) -> Tensor:
                kept[0].append(args[0].detach().clone())
                kept[1].append(z)
                return z.clone()

            handles.append(module.register_forward_hook(hook))
    training = model.training
    model.eval()
    value = target(model(x))
    model.train(training)
    for handle in handles:
        handle.remove()
    outputs = [z for _, zs in found.values() for z in zs]
    grads = iter(torch.autograd.grad(value.sum(), outputs))
    return {name: (xs, [z.detach() for z in zs], [next(grads) for _ in zs]) for name, (xs, zs) in found.items()}


def rows_of(tensors: Iterable[Tensor], examples: int, batch_dim: int = 0) -> Tensor:
    """(example, row, d): all rows that an example sends through a layer, call by call."""
    return torch.cat([t.movedim(batch_dim, 0).reshape(examples, -1, t.shape[-1]) for t in tensors], 1)


def naive_scores(
    naive: Naive,
    layer: str,
    weight: str,
    rows: Tensor,
    directions: Tensor,
    horizon: int,
    visible: np.ndarray | None = None,
) -> Mapping[str, Tensor]:
    """The full (example, slot) matrix of every score; NaN for slots that the view does not show."""
    slots = naive.slots(layer)
    alpha = torch.einsum("nrd,md->nrm", rows, slots.keys)
    shown = slots.step <= horizon
    if visible is not None:
        shown = shown & np.append(visible, True)[slots.visit]
    hidden = torch.from_numpy(~shown)
    scores = {"weight": alpha.sum(1), "abs": alpha.abs().sum(1)}
    if slots.errors is not None:
        value = torch.from_numpy(naive.coefficients(weight, horizon)[0][slots.step] * slots.factor)
        pull = torch.einsum("nrd,md->nrm", directions, slots.errors)
        scores["contribution"] = (alpha * pull).sum(1) * value
    return {name: score.masked_fill(hidden, torch.nan) for name, score in scores.items()}
