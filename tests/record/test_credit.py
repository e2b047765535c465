"""The law of credit: an example is credited with its own gradient, or the layer is marked."""

import random
from collections.abc import Callable, Collection
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers import Naive, assert_rebuilt, close, seeds, unchecked
from hypothesis import given
from hypothesis import strategies as st
from kinds import KINDS
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import DualformWarning, QueryError

BAR = 1e-9


def one_step(path, model: nn.Module, loss: Callable[[], Tensor], examples: int, **options) -> dualform.Memory:
    """Record one step of plain descent with rate 1, so that parts of the weights are minus gradients."""
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    with dualform.record(model, optimizer, path, **{"dtype": "float64", "progress": False, **options}) as tape:
        tape.note(index=torch.arange(examples))
        loss().backward()
        optimizer.step()
    return dualform.open(path)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, grads, strict=True)}


def assert_credited(memory: dualform.Memory, alone: list[dict[str, Tensor]], unknown: Collection[str] = ()) -> None:
    """Each example has its own gradient in all layers but the ``unknown`` ones, where no example has anything."""
    ledger = memory.ledger("index")
    layers = {layer.name: layer for layer in memory.store.manifest.layers}
    shared = {name for layer in unknown for name in layers[layer].parameters}
    for layer in layers.values():
        for name in layer.parameters:
            for i, own in enumerate(alone):
                part = ledger[i][name] if i in ledger else torch.zeros_like(own[name])
                close(part, torch.zeros_like(own[name]) if name in shared else -own[name], BAR)


def marked(memory: dualform.Memory) -> set[str]:
    assert {mark.kind for mark in memory.certificate.marks} <= {"unknown-visits"}
    return {mark.name for mark in memory.certificate.marks}


# ---------------------------------------------------------------- every kind of layer, five ways to arrange its rows


def batch_first(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.stack([net(x[:, i].contiguous()) for i in range(x.shape[1])], 1)


def time_first(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return net(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


def flattened(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return net(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def selected(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Rows in the order of their values, as experts get them."""
    rows = x.flatten(0, 1)
    order = rows.double().flatten(1).cos().sum(1).argsort()
    return net(rows[order])[order.argsort()].unflatten(0, x.shape[:2])


def repeated(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    rows = x.repeat_interleave(3, 0).flatten(0, 1)
    return net(rows).unflatten(0, (x.shape[0], 3, x.shape[1])).mean(1)


ARRANGEMENTS = {f.__name__: f for f in (batch_first, time_first, flattened, selected, repeated)}
OWN_GRADIENTS = [name for name in KINDS if name != "embedding, padded"]  # its errors depend on how often a token occurs


class Arranged(nn.Module):
    """A network on (example, item, …): some items an example, all rows arranged in some way."""

    def __init__(self, kind: str, arrangement: str, seed: int) -> None:
        super().__init__()
        self.kind, self.arrange = KINDS[kind], ARRANGEMENTS[arrangement]
        self.net = self.kind.model(seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.arrange(lambda rows: self.net(rows.movedim(0, self.kind.batch_dim)), x).sum(1)

    def inputs(self, examples: int, items: int, seed: int) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        rows = [self.kind.inputs(random).movedim(self.kind.batch_dim, 0) for _ in range(examples * items)]
        return torch.stack([row[0] for row in rows]).unflatten(0, (examples, items))


def assert_law_of_credit(path, kind: str, arrangement: str, examples: int, items: int, seed: int) -> None:
    model = Arranged(kind, arrangement, seed)
    x, y = model.inputs(examples, items, seed), torch.arange(examples) % 3
    alone = [gradients(model, F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])) for i in range(examples)]
    memory = one_step(path, model, lambda: F.cross_entropy(model(x), y, reduction="sum"), examples)
    assert_rebuilt(memory, model)
    layers = {layer.name for layer in memory.store.manifest.layers}
    unknown = marked(memory)
    assert_credited(memory, alone, unknown)
    if arrangement != "selected":
        assert not unknown
    elif examples * items > 4:  # else the order of a few rows may be that of the examples
        assert unknown <= layers


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("kind", OWN_GRADIENTS)
@pytest.mark.filterwarnings("ignore::dualform.errors.DualformWarning")
def test_an_example_is_credited_with_its_own_gradient_or_the_layer_is_marked(kind, arrangement, tmp_path):
    assert_law_of_credit(tmp_path, kind, arrangement, 3, 3, seed=0)


@given(
    kind=st.sampled_from(OWN_GRADIENTS),
    arrangement=st.sampled_from(list(ARRANGEMENTS)),
    examples=st.integers(1, 5),
    items=st.integers(1, 4),
    seed=seeds,
)
@pytest.mark.filterwarnings("ignore::dualform.errors.DualformWarning")
def test_the_law_of_credit_holds_for_all_sizes(kind, arrangement, examples, items, seed, tmp_path_factory):
    assert_law_of_credit(tmp_path_factory.mktemp("memory"), kind, arrangement, examples, items, seed)


# ---------------------------------------------------------------- rows that have the number of the examples by chance

B = T = 4
"""As many tokens as examples."""


class GPT(nn.Module):
    """Tokens and positions; ``out`` says what it returns, as language models do: logits, their loss, or both."""

    def __init__(self, out: str = "logits", head: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, self.tokens, self.positions = out, nn.Embedding(11, 6), nn.Embedding(8, 6)
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 11, bias=False)
        self.double()

    def forward(self, x, y=None):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        logits = self.head(self.block(h, src_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1])))
        if y is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        return {"logits": logits, "both": (logits, loss), "loss": loss}[self.out]


def words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(seed))


def language_loss(model, x, y):
    out = model(x, y)
    if model.out == "logits":
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum")
    return out[1] if model.out == "both" else out


@pytest.mark.parametrize("out", ["logits", "both", "loss"])
def test_a_table_of_positions_belongs_to_no_example_where_there_are_as_many_examples_as_tokens(out, tmp_path):
    model, x, y = GPT(out), words(B, T), words(B, T, seed=1)
    alone = [gradients(model, language_loss(model, x[i : i + 1], y[i : i + 1])) for i in range(B)]
    memory = one_step(tmp_path, model, lambda: language_loss(model, x, y), B)
    assert not marked(memory)  # nothing is unknown: it belongs to all of them
    assert_credited(memory, alone, {"positions"})
    close(
        memory.ledger("index")[None]["positions.weight"],
        -torch.stack([gradients["positions.weight"] for gradients in alone]).sum(0),
    )


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "not noted"])
@pytest.mark.parametrize("length", [B, 6], ids=["as many tokens as examples", "more tokens than examples"])
def test_a_transformer_with_time_first_is_credited_along_its_second_axis(length, noted, tmp_path):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(length, B, 6, dtype=torch.float64)
    alone = [gradients(model, model(x[:, i : i + 1]).sin().sum()) for i in range(B)]
    if noted:
        memory = one_step(tmp_path, model, lambda: model(x).sin().sum(), B)
    else:
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
            model(x).sin().sum().backward()
            optimizer.step()
        memory = dualform.open(tmp_path)
    assert not marked(memory)
    ledger = memory.ledger("row")
    for name in memory.certificate:
        for i, own in enumerate(alone):
            close(ledger[i][name], -own[name], BAR)


class Experts(nn.Module):
    """Each expert takes the tokens that it likes best, always as many as there are examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(5, 2), nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.double()

    def forward(self, x):
        rows, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        chosen = self.router(rows).softmax(-1)
        for i, expert in enumerate(self.experts):
            weight, best = chosen[:, i].topk(len(x))
            out = out.index_add(0, best, expert(rows[best]) * weight.unsqueeze(1))
        return out.reshape(x.shape)


def test_experts_that_get_as_many_rows_as_there_are_examples_are_marked(tmp_path):
    model, x = Experts(), torch.randn(B, T, 5, dtype=torch.float64)
    alone = [gradients(model, model(x)[i].sin().sum()) for i in range(B)]
    with pytest.warns(DualformWarning, match="selected"):
        memory = one_step(tmp_path, model, lambda: model(x).sin().sum(), B)
    assert marked(memory) == {"experts.0", "experts.1"}
    assert_rebuilt(memory, model)
    assert_credited(memory, alone, marked(memory))


def test_an_expert_that_gets_all_rows_at_first_is_marked_once_it_gets_others(tmp_path):
    """One token an example goes to each expert at first: its rows lie as if nothing had been selected."""

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            rows = x.flatten(0, 1)
            to_left = rows[:, 0] > 0
            out = rows.new_zeros(len(rows), 3)
            out[to_left], out[~to_left] = self.left(rows[to_left]), self.right(rows[~to_left])
            return out.reshape(len(x), -1, 3)

    torch.manual_seed(0)
    model = Halves().double()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(DualformWarning, match="selected"), dualform.record(
        model, optimizer, tmp_path, dtype="float64", progress=False
    ) as tape:  # fmt: skip
        for step in range(8):
            x = torch.randn(2, 2, 5, dtype=torch.float64)
            if not step:
                x[:, 0, 0], x[:, 1, 0] = 1, -1
            tape.note(index=torch.arange(2))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert marked(dualform.open(tmp_path)) == {"left", "right"}


# ---------------------------------------------------------------- several blocks of rows for each note


def pairs(seed: int = 0) -> Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def preference(model: nn.Module, chosen: Tensor, rejected: Tensor) -> Tensor:
    """As in preference optimisation: one forward pass of both, and a loss a pair."""
    score = model(torch.cat([chosen, rejected])).squeeze(1)
    return -F.logsigmoid(score[: len(chosen)] - score[len(chosen) :]).sum()


def scores(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def test_copies_credit_each_block_of_rows_to_its_example(tmp_path):
    model, (chosen, rejected) = scores(), pairs()
    alone = [gradients(model, preference(model, chosen[i : i + 1], rejected[i : i + 1])) for i in range(3)]
    memory = one_step(tmp_path, model, lambda: preference(model, chosen, rejected), 3, copies=2)
    assert not marked(memory)
    assert_credited(memory, alone)
    assert memory.visits["index"].to_pylist() == [0, 1, 2, 0, 1, 2]
    assert memory.visits["copy"].to_pylist() == [0, 0, 0, 1, 1, 1]
    parts = memory.ledger("copy")
    close(parts[0]["0.weight"] + parts[1]["0.weight"], -torch.stack([grads["0.weight"] for grads in alone]).sum(0))


def test_more_rows_than_notes_are_marked_and_the_mark_names_copies(tmp_path):
    model, (chosen, rejected) = scores(), pairs()
    with pytest.warns(DualformWarning, match="copies=2"):
        memory = one_step(tmp_path, model, lambda: preference(model, chosen, rejected), 3)
    assert marked(memory) == {"0", "2"}
    assert_rebuilt(memory, model)


@pytest.mark.parametrize("copies", [0, -1])
def test_fewer_than_one_copy_is_refused(copies, tmp_path):
    model = scores()
    with pytest.raises(QueryError, match="copies"):
        dualform.record(model, optim.SGD(model.parameters()), tmp_path, copies=copies)


# ---------------------------------------------------------------- over many batches


class Flat(nn.Module):
    """Tokens of all examples one below the other, example by example or time by time."""

    def __init__(self, time_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time_first, self.each, self.out = (
            time_first,
            nn.Linear(5, 4, dtype=torch.float64),
            nn.Linear(4, 3).double(),
        )

    def forward(self, x):
        b, n, _ = x.shape
        h = self.each((x.transpose(0, 1) if self.time_first else x).flatten(0, 1)).tanh()
        h = h.unflatten(0, (n, b)).mean(0) if self.time_first else h.unflatten(0, (b, n)).mean(1)
        return self.out(h)


@pytest.mark.parametrize("time_first", [False, True], ids=["example by example", "time by time"])
@given(sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=8), seed=seeds)
@pytest.mark.filterwarnings("ignore::dualform.errors.DualformWarning")
def test_flat_rows_are_followed_through_batches_of_all_sizes(time_first, sizes, seed, tmp_path_factory):
    """A batch whose rows lie otherwise than all those before it is credited rightly, or marked."""
    model, path = Flat(time_first), tmp_path_factory.mktemp("memory")
    optimizer, generator = optim.SGD(model.parameters(), lr=0.01), torch.Generator().manual_seed(seed)
    inputs, count = [], 0
    with dualform.record(model, optimizer, path, dtype="float64", progress=False) as tape:
        for b, n in sizes:
            x = torch.randn(b, n, 5, generator=generator, dtype=torch.float64)
            inputs += list(x)
            tape.note(index=torch.arange(b) + count)
            count += b
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(path)
    slots = Naive(path).slots("each")
    for key, visit, position in zip(slots.keys, slots.visit, slots.position, strict=True):
        assert visit < 0 or torch.equal(key, inputs[visit][position])
    assert (slots.visit >= 0).all() or marked(memory) == {"each"}


def test_flat_rows_of_growing_length_and_a_smaller_last_batch_need_no_further_probe(tmp_path):
    model = Flat(time_first=True)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        probes = []
        for b, n in ((4, 3), (4, 5), (4, 4), (4, 1), (3, 6)):
            tape.note(index=torch.arange(b))
            model(torch.randn(b, n, 5, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            probes.append(tape._recorder.backward_hooks.credit.probes)
    assert probes == [1] * 5
    memory = dualform.open(tmp_path)
    assert not marked(memory)
    assert (memory.store.calls("each").visit >= 0).all()


def test_modules_that_the_loop_calls_itself_are_credited(tmp_path):
    """No call of the whole model: an encoder, then a head."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(5, 4), nn.Tanh()), "head": nn.Linear(4, 3)}).double()
    x = torch.randn(3, 5, dtype=torch.float64)

    def loss(x):
        return model["head"](model["encoder"](x)).sin().sum()

    alone = [gradients(model, loss(x[i : i + 1])) for i in range(3)]
    memory = one_step(tmp_path, model, lambda: loss(x), 3)
    assert not marked(memory)
    assert_credited(memory, alone)


def test_a_table_of_positions_that_the_loop_calls_itself_is_marked(tmp_path):
    """As in the training step of a Lightning module: nothing but its input tells that it has no examples."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"tokens": nn.Embedding(11, 6), "positions": nn.Embedding(8, 6)}).double()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(DualformWarning, match="'positions' .*the same in every batch"), dualform.record(
        model, optimizer, tmp_path, dtype="float64", progress=False
    ) as tape:  # fmt: skip
        for step in range(3):
            tape.note(index=torch.arange(B))
            (model["tokens"](words(B, T, seed=step)) + model["positions"](torch.arange(T))).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert marked(memory) == {"positions"}
    assert (memory.store.calls("positions").visit < 0).all() and (memory.store.calls("tokens").visit >= 0).all()


def test_what_is_stated_is_believed(tmp_path):
    """``batch_dim`` counts, whatever a probe would find: here the axis of time is said to count examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3)).double()
    x = torch.randn(3, 3, 5, dtype=torch.float64)
    alone = [gradients(model, model(x[:, i]).sin().sum()) for i in range(3)]
    memory = one_step(tmp_path, model, lambda: model(x).sin().sum(), 3, batch_dim=1)
    assert_credited(memory, alone)


# ---------------------------------------------------------------- a probe leaves no trace


class Noisy(nn.Module):
    """Random numbers of three kinds, a buffer, a counter, a list and statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.out = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.losses = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        h = F.dropout(self.norm(self.layer(x)).relu(), 0.3)
        h = h * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))
        self.losses.append(float(h.detach().sum()))
        return self.out(h)


def noisy_training(path=None) -> tuple[Noisy, list[float]]:
    model = Noisy().double()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    recording = dualform.record(model, optimizer, path, progress=False) if path else nullcontext()
    with recording:
        for _ in range(3):
            model(torch.randn(4, 5, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, [torch.rand(()).item(), random.random(), float(np.random.rand())]


def test_a_probe_leaves_no_trace_in_the_model_or_in_random_numbers(tmp_path):
    with unchecked():  # the check of types draws random numbers itself
        (bare, numbers), (model, same) = noisy_training(), noisy_training(tmp_path)
    assert numbers == same
    assert (model.calls, model.losses) == (bare.calls, bare.losses)
    for name, tensor in bare.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert not marked(dualform.open(tmp_path))


def test_a_model_that_cannot_be_run_apart_is_credited_by_its_own_axes_or_marked(tmp_path):
    """It refuses to run a second time; layers with the axes of its input are known, others are not."""

    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.each, self.flat, self.left = nn.Linear(5, 4), nn.Linear(4, 3), [1]

        def forward(self, x, budget):
            budget.spend()
            return self.flat(self.each(x).flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)

    class Budget:
        left = 1

        def spend(self):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("only once")

    torch.manual_seed(0)
    model, x = Once().double(), torch.randn(3, 4, 5, dtype=torch.float64)
    alone = [gradients(model, model(x[i : i + 1], Budget()).sin().sum()) for i in range(3)]
    with pytest.warns(DualformWarning, match="could not be run separately"):
        memory = one_step(tmp_path, model, lambda: model(x, Budget()).sin().sum(), 3)
    assert marked(memory) == {"flat"}
    assert_credited(memory, alone, {"flat"})


class Counted(nn.Sequential):
    """Counts its calls where a shadow counts, too."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.counter = Counter

    def forward(self, input):
        self.counter.calls += 1
        return super().forward(input)


class Counter:
    calls = 0


@pytest.mark.parametrize("options", [{"batch_dim": 0}, {}], ids=["stated", "not stated"])
def test_a_statement_for_all_layers_needs_no_probe(options, tmp_path):
    torch.manual_seed(0)
    model = Counted(nn.Linear(5, 4), nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2)).double()
    Counter.calls = 0
    memory = one_step(tmp_path, model, lambda: model(torch.randn(3, 5, dtype=torch.float64)).sin().sum(), 3, **options)
    assert (Counter.calls == 1) == ("batch_dim" in options)
    assert not marked(memory)
    assert all((memory.store.calls(name).visit == 0).all() for name in ("0", "2"))
