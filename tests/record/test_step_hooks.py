"""However a training loop arrives at its steps, what each step used is what is remembered of it."""

import pytest
import torch
from helpers import (
    EXACT,
    Naive,
    assert_clean,
    assert_rebuilt,
    batches,
    close,
    mlp,
    seeds,
    setups,
    sgd,
    state_of,
    trained,
    whole,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import NoSteps
from dualform.types import DType

CLASSES, D_IN = 3, 5


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y)


def norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)


# ---------------------------------------------------------------- loops: each yields after every step


def plain(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def clipped(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)
        loss_of(model, x, y).backward()
        norm(model)
        optimizer.step()
        optimizer.zero_grad()
        yield


def clipped_twice(model, optimizer, tape, data):
    for x, y in data:
        loss_of(model, x, y).backward()
        norm(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        yield


def clipped_layer_by_layer(model, optimizer, tape, data):
    for x, y in data:
        loss_of(model, x, y).backward()
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_([parameter], 0.05)
        optimizer.step()
        optimizer.zero_grad()
        yield


def scaled_by_hand(model, optimizer, tape, data):
    for i, (x, y) in enumerate(data):
        (128 * loss_of(model, x, y)).backward()
        for parameter in model.parameters():
            parameter.grad /= -128.0 if i % 2 else 128.0
        optimizer.step()
        optimizer.zero_grad()
        yield


def replaced(model, optimizer, tape, data):
    """Gradients that are new tensors before the step, and between the passes."""
    for x, y in data:
        tape.note(label=y)
        for part in (x, 2 * x):
            loss_of(model, part, y).backward()
            for parameter in model.parameters():
                parameter.grad = parameter.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()
        yield


def accumulated(model, optimizer, tape, data):
    for i, (x, y) in enumerate(data):
        tape.note(label=y)
        loss_of(model, x, y).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            yield


def accumulated_without_notes(model, optimizer, tape, data):
    for i, (x, y) in enumerate(data):
        (loss_of(model, x, y) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            yield


def accumulated_with_clips_between(model, optimizer, tape, data):
    for i, (x, y) in enumerate(data):
        tape.note(label=y)
        loss_of(model, x, y).backward()
        norm(model)
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            yield


def accumulated_over_a_flush(model, optimizer, tape, data):
    for i, (x, y) in enumerate(data):
        tape.note(label=y)
        loss_of(model, x, y).backward()
        tape.flush()
        if i % 2:
            norm(model)
            optimizer.step()
            optimizer.zero_grad()
            yield


def two_losses_of_one_forward(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)
        z = model(x)
        F.cross_entropy(z, y).backward(retain_graph=True)
        z.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def twice_backward(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)
        loss = loss_of(model, x, y)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def two_forwards_one_backward(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)
        (loss_of(model, x, y) + loss_of(model, -x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def evaluated(model, optimizer, tape, data):
    for x, y in data:
        with torch.no_grad():
            model(x)
        tape.note(label=y)
        loss = loss_of(model, x, y)
        with torch.inference_mode():
            model(x[:2])
        loss.backward()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        optimizer.step()
        with torch.no_grad():
            model(x)
        optimizer.zero_grad()
        yield


def evaluated_with_a_graph(model, optimizer, tape, data):
    for x, y in data:
        model(x[:2])  # gradients are on, nobody uses them
        tape.note(label=y)
        kept = loss_of(model, torch.cat([x, x]), torch.cat([y, y]))
        loss_of(model, x, y).backward()
        optimizer.step()
        model(x).sum()
        optimizer.zero_grad()
        yield
        del kept


def adversarial(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(model, x, y), x)
        loss_of(model, (x + 0.1 * grad.sign()).detach(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def adversarial_in_between(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)
        loss_of(model, x, y).backward()
        other = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(model, other, y), other)
        loss_of(model, (other + 0.1 * grad.sign()).detach(), y).backward()
        torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        yield


def adversarial_by_backward(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)
        other = x.clone().requires_grad_()
        loss_of(model, other, y).backward()
        optimizer.zero_grad()
        assert other.grad is not None
        loss_of(model, (other + 0.1 * other.grad.sign()).detach(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def gradients_of_some_inputs_only(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)
        loss_of(model, x, y).backward(inputs=[model[0].weight, model[2].bias])
        optimizer.step()
        optimizer.zero_grad()
        yield


def without_a_step(set_to_none):
    def loop(model, optimizer, tape, data):
        for i, (x, y) in enumerate(data):
            tape.note(label=y)
            loss_of(model, x, y).backward()
            if i % 3 != 1:
                norm(model)
                optimizer.step()
                yield
            optimizer.zero_grad(set_to_none=set_to_none)

    loop.__name__ = f"without_a_step_set_to_none_{set_to_none}"
    return loop


def zeroed_first(model, optimizer, tape, data):
    for x, y in data:
        optimizer.zero_grad()
        tape.note(label=y)
        loss_of(model, x, y).backward()
        optimizer.step()
        yield


def zeroed_by_hand(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)
        loss_of(model, x, y).backward()
        optimizer.step()
        yield
        for parameter in model.parameters():
            parameter.grad.zero_()


def closure(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)

        def closed(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        assert torch.is_tensor(optimizer.step(closed))
        yield


def closure_by_keyword(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)

        def closed(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            norm(model)
            return loss

        optimizer.step(closure=closed)
        yield


def steps_without_gradients(model, optimizer, tape, data):
    for i, (x, y) in enumerate(data):
        if i % 2:
            tape.note(label=y)
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def steps_with_zero_gradients(model, optimizer, tape, data):
    for i, (x, y) in enumerate(data):
        if i % 2:
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield


def zero_loss(model, optimizer, tape, data):
    for i, (x, y) in enumerate(data):
        (loss_of(model, x, y) * (i % 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def sometimes_only_the_last_layer(model, optimizer, tape, data):
    for i, (x, y) in enumerate(data):
        tape.note(label=y)
        if i % 2:
            with torch.no_grad():
                h = model[:2](x)
            F.cross_entropy(model[2:](h), y).backward()
        else:
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def one_buffer(model, optimizer, tape, data):
    buffer, labels = torch.empty_like(data[0][0]), torch.empty_like(data[0][1])
    for x, y in data:
        x, y = buffer.copy_(x), labels.copy_(y)
        tape.note(label=y)
        loss_of(model, x, y).backward()
        buffer.fill_(torch.nan)
        labels.fill_(-1)
        optimizer.step()
        optimizer.zero_grad()
        yield


def smaller_and_smaller(model, optimizer, tape, data):
    for i, (x, y) in enumerate(data):
        size = max(2, len(y) - i)  # batch normalisation needs two
        tape.note(label=y[:size])
        loss_of(model, x[:size], y[:size]).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def flushed(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        tape.flush()
        tape.flush()
        yield


def sum_of_all_batches(model, optimizer, tape, data):
    torch.stack([loss_of(model, x, y) for x, y in data]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    yield


def graph_of_a_gradient(model, optimizer, tape, data):
    for x, y in data:
        tape.note(label=y)
        loss = loss_of(model, x, y)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        assert all(g.requires_grad for g in grads)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


LOOPS = [
    plain,
    clipped,
    clipped_twice,
    clipped_layer_by_layer,
    scaled_by_hand,
    replaced,
    accumulated,
    accumulated_without_notes,
    accumulated_with_clips_between,
    accumulated_over_a_flush,
    two_losses_of_one_forward,
    twice_backward,
    two_forwards_one_backward,
    evaluated,
    evaluated_with_a_graph,
    adversarial,
    adversarial_in_between,
    adversarial_by_backward,
    gradients_of_some_inputs_only,
    without_a_step(True),
    without_a_step(False),
    zeroed_first,
    zeroed_by_hand,
    closure,
    closure_by_keyword,
    steps_without_gradients,
    steps_with_zero_gradients,
    zero_loss,
    sometimes_only_the_last_layer,
    one_buffer,
    smaller_and_smaller,
    flushed,
    sum_of_all_batches,
    graph_of_a_gradient,
]
ONLY_SEQUENTIAL = {"gradients_of_some_inputs_only", "sometimes_only_the_last_layer"}


def run_loop(path, loop, model, optimizer, data, dtype: DType = "float64"):
    """Record a loop; returns the memory and the state after every step."""
    states = [state_of(model)]
    with dualform.record(model, optimizer, path, dtype=dtype, progress=False) as tape:
        for _ in loop(model, optimizer, tape, data):
            states.append(state_of(model))
    return dualform.open(path), states


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_every_step_of_a_loop_is_rebuilt(loop, tmp_path):
    model = mlp(D_IN, 4, CLASSES)
    memory, states = run_loop(tmp_path, loop, model, sgd(model), batches(6, 3, D_IN, CLASSES))
    assert_clean(memory)
    assert_rebuilt(memory, model)
    assert memory.step == len(states) - 1
    for step, state in enumerate(states):
        for name, tensor in memory.at(step).weights().items():
            close(tensor, state[name])


@pytest.mark.parametrize(
    "loop", [loop for loop in LOOPS if loop.__name__ not in ONLY_SEQUENTIAL], ids=lambda loop: loop.__name__
)
def test_every_step_of_a_loop_over_a_whole_model_is_rebuilt(loop, tmp_path):
    model = whole()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    memory, states = run_loop(tmp_path, loop, model, optimizer, batches(6, 4, D_IN, CLASSES))
    assert_clean(memory)
    assert_rebuilt(memory, model)
    for step, state in enumerate(states):
        for name, tensor in memory.at(step).weights().items():
            if "running" not in name and "tracked" not in name:  # some loops run the model after its step
                close(tensor, state[name])


@given(setup=setups(), counts=st.lists(st.integers(0, 3), min_size=1, max_size=4), between=st.booleans())
def test_any_accumulation_is_rebuilt(setup, counts, between, tmp_path_factory):
    """Each number is how many batches a step takes; none is a step without gradients."""
    model = mlp(*setup.widths, bias=setup.bias, seed=setup.seed)
    optimizer = optim.SGD(model.parameters(), **setup.settings)
    data = iter(batches(sum(counts), 3, setup.widths[0], setup.widths[-1], seed=setup.seed))

    def loop(model, optimizer, tape, data):
        for count in counts:
            for i in range(count):
                x, y = next(data)
                tape.note(label=y)
                loss_of(model, x, y).backward()
                if setup.clip and (between or i == count - 1):
                    nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
            optimizer.step()
            optimizer.zero_grad()
            yield

    memory, _ = run_loop(tmp_path_factory.mktemp("memory"), loop, model, optimizer, data)
    assert memory.step == len(counts)
    assert_clean(memory)
    assert_rebuilt(memory, model)
    if setup.bias[-1]:  # else a batch may move nothing at all, and a clip of nothing looks like zero_grad
        assert memory.visits["step"].to_pylist() == [s for s, count in enumerate(counts, 1) for _ in range(3 * count)]


@given(stepped=st.lists(st.booleans(), min_size=1, max_size=8), set_to_none=st.booleans(), seed=seeds)
def test_slots_of_a_step_that_never_came_are_forgotten(stepped, set_to_none, seed, tmp_path_factory):
    model = mlp(D_IN, 4, CLASSES, seed=seed)
    optimizer = sgd(model)

    def loop(model, optimizer, tape, data):
        for (x, y), wanted in zip(data, stepped, strict=True):
            tape.note(index=wanted, label=y)
            loss_of(model, x, y).backward()
            if wanted:
                optimizer.step()
                yield
            optimizer.zero_grad(set_to_none=set_to_none)

    data = batches(len(stepped), 3, D_IN, CLASSES, seed=seed)
    memory, _ = run_loop(tmp_path_factory.mktemp("memory"), loop, model, optimizer, data)
    assert memory.step == sum(stepped)
    assert len(memory.visits) == 3 * sum(stepped)
    if memory.step:
        assert_clean(memory)
        assert_rebuilt(memory, model)
        assert memory.store.slots("0") == 3 * sum(stepped)
        assert all(memory.visits["index"].to_pylist())


def test_steps_and_settings_are_written_down_for_each_parameter(tmp_path):
    model = mlp(D_IN, 4, CLASSES)
    optimizer = sgd(model)

    def change(step):
        optimizer.param_groups[0]["lr"] = 0.1 / step
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    run = trained(tmp_path, model, optimizer, batches(3, 3, D_IN, CLASSES), before_step=change)
    lines = Naive(run.path).steps
    assert len(lines) == 3 * 4
    for line in lines:
        assert line["opt_lr"] == 0.1 / line["step"] and line["opt_momentum"] == 0.9 and line["opt_weight_decay"] == 1e-2
        assert 0 < line["scale"] < 1
    for step in (1, 2, 3):
        scales = [line["scale"] for line in lines if line["step"] == step]
        assert max(scales) - min(scales) < 1e-12  # one clip for all parameters


def test_a_run_of_no_steps_opens_and_says_so(tmp_path):
    model = mlp(D_IN, 4, CLASSES)
    memory, _ = run_loop(tmp_path, lambda *_: iter(()), model, sgd(model), [])
    assert memory.step == 0
    assert len(memory.visits) == 0
    with pytest.raises(NoSteps):
        memory.attend(model, torch.zeros(1, D_IN, dtype=torch.float64))
    for name, tensor in memory.weights().items():
        assert torch.equal(tensor, model.state_dict()[name])


# ---------------------------------------------------------------- gradients that are mostly zero


def one_hot(rows, width):
    return F.one_hot(torch.tensor(rows), width).double()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_clip_is_found_where_the_gradient_is_not_zero(bias, tmp_path):
    """Words that a batch does not hold leave zeros in the gradient; so do units that are off."""
    model = mlp(40, 5, bias=bias)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def loop(model, optimizer, tape, data):
        for step in range(6):
            model(one_hot([3 * step, 3 * step + 1, 3 * step + 2], 40)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            yield

    memory, _ = run_loop(tmp_path, loop, model, optimizer, None)
    assert_rebuilt(memory, model)


@given(seed=seeds, bias=st.booleans(), depth=st.integers(1, 3), each=st.booleans())
def test_clips_are_found_on_sparse_inputs(seed, bias, depth, each, tmp_path_factory):
    """``each``: every parameter has a clip of its own."""
    widths = (60, *[8] * (depth - 1), 3)
    model = mlp(*widths, bias=bias, seed=seed)
    random = torch.Generator().manual_seed(seed)

    def loop(model, optimizer, tape, data):
        for _ in range(5):
            rows = torch.randint(60, (2,), generator=random).tolist()
            model(one_hot(rows, 60)).square().sum().backward()
            for parameters in [[p] for p in model.parameters()] if each else [list(model.parameters())]:
                nn.utils.clip_grad_norm_(parameters, 0.01)
            optimizer.step()
            optimizer.zero_grad()
            yield

    memory, _ = run_loop(tmp_path_factory.mktemp("memory"), loop, model, sgd(model), None)
    assert_rebuilt(memory, model)


def test_zeroed_gradients_are_forgotten_though_the_watched_entries_were_zero_already(tmp_path):
    model = mlp(8, 8, bias=False)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def loop(model, optimizer, tape, data):
        for word, wanted in ((0, True), (1, False), (0, True)):
            model(one_hot([word], 8)).square().sum().backward()
            if wanted:
                optimizer.step()
                yield
            optimizer.zero_grad(set_to_none=False)

    memory, _ = run_loop(tmp_path, loop, model, optimizer, None)
    assert_rebuilt(memory, model)


def test_clips_between_passes_may_leave_out_the_bias(tmp_path):
    model = mlp(4, 3)

    def loop(model, optimizer, tape, data):
        for x, y in data:
            loss_of(model, x, y).backward()
            nn.utils.clip_grad_norm_([model[0].weight], 0.05)
            loss_of(model, -x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield

    memory, _ = run_loop(tmp_path, loop, model, sgd(model), batches(4, 3, 4, 3))
    assert memory.check(model, full=True).worst <= EXACT


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_backward_with_a_graph_of_its_own_accumulates(tmp_path):
    model = mlp(D_IN, 4, CLASSES)

    def loop(model, optimizer, tape, data):
        for x, y in data:
            for part in (x, -x, 2 * x):
                loss_of(model, part, y).backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            yield

    memory, _ = run_loop(tmp_path, loop, model, sgd(model), batches(4, 3, D_IN, CLASSES))
    assert_clean(memory)
    assert_rebuilt(memory, model)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_long_run_of_many_rows_is_certified_as_it_goes(dtype, tmp_path):
    """More rows than are held back at a time, in calls of very different sizes; flushed in the middle."""
    model = mlp(200, 60, 10)
    optimizer = sgd(model, momentum=0.5)
    with dualform.record(model, optimizer, tmp_path, dtype=dtype, progress=False) as tape:
        for i, (x, y) in enumerate(batches(16, [400, 1, 2500, 300] * 4, 200, 10)):
            tape.note(label=y)
            loss_of(model, x, y).backward()
            norm(model)
            optimizer.step()
            optimizer.zero_grad()
            if i == 9:
                tape.flush()
                assert dualform.open(tmp_path).certificate.worst <= {"float64": EXACT, "float16": 1e-2}[dtype]
    memory = dualform.open(tmp_path)
    assert_clean(memory)
    assert memory.certificate.worst <= {"float64": EXACT, "float16": 1e-2}[dtype]
    full = memory.check(model, full=True)
    for name, error in memory.certificate.items():  # random projections see what there is to see
        assert error == pytest.approx(full[name], rel=0.9, abs=1e-13)


def test_a_step_that_a_raising_loop_did_not_take_is_not_remembered(tmp_path):
    model = mlp(D_IN, 4, CLASSES)
    optimizer = sgd(model)
    data = batches(3, 3, D_IN, CLASSES)
    with (
        pytest.raises(KeyboardInterrupt),
        dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape,
    ):
        for i, (x, y) in enumerate(data):
            tape.note(label=y)
            loss_of(model, x, y).backward()
            if i == 2:
                raise KeyboardInterrupt
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert memory.step == 2
    assert_rebuilt(memory, model)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_many_small_steps_of_one_shard_are_all_remembered(dtype, tmp_path):
    """Far more steps than are looked through at a time, far more rows than lie together, and one flush at the end."""
    model = mlp(D_IN, 8, CLASSES)

    data = batches(300, 16, D_IN, CLASSES)
    memory, _ = run_loop(tmp_path, plain, model, sgd(model), data, dtype=dtype)
    assert len(memory.store.manifest.shards) == 1 and memory.store.slots("0") == 300 * 16
    bar = {"float64": EXACT, "float16": 1e-2}[dtype]
    assert memory.check(model, full=True).worst <= bar and memory.certificate.worst <= bar
