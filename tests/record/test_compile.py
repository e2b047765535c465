"""``torch.compile`` inside the with-block: recorded as without it, or rejected with an error that says why."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import batches, mlp
from kinds import KINDS
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import UnsupportedLayer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # whatever the compiler has to say
    pytest.mark.skipif(not hasattr(torch, "compile"), reason="this torch does not compile"),
]


def compiled_training(name: str, path) -> torch.nn.Module:
    kind, random = KINDS[name], torch.Generator().manual_seed(0)
    model = kind.model()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    torch._dynamo.reset()
    with dualform.record(model, optimizer, path, dtype="float64", progress=False) as tape:
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(4):
            label = torch.randint(3, (kind.examples,), generator=random)
            tape.note(label=label)
            F.cross_entropy(compiled(kind.inputs(random)), label).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", ["linear", "conv2d", "embedding, tied", "lstm"])
def test_a_model_compiled_inside_the_with_block_is_recorded(name, tmp_path):
    model = compiled_training(name, tmp_path)
    memory = dualform.open(tmp_path)
    assert not memory.certificate.marks
    assert max(memory.check(model, full=True, progress=False).values()) < 1e-10


def test_a_compiled_layer_with_its_own_forward_is_left_to_the_rest(tmp_path):
    """In compiled code the functional call inside the layer cannot be seen."""

    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = Scaled(11, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(x).mean(1))

    torch.manual_seed(0)
    model = Words().double()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    torch._dynamo.reset()
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            F.cross_entropy(compiled(torch.randint(11, (4, 6))), torch.tensor([0, 1, 2, 0])).backward()
            optimizer.step()
            optimizer.zero_grad()
    certificate = dualform.open(tmp_path).certificate
    assert certificate.rest == ("embed.weight",) and "torch.compile" in certificate.reasons["embed.weight"]
    assert certificate.worst < 1e-12


def test_compiled_attention_is_rejected(tmp_path):
    with pytest.raises(UnsupportedLayer, match=r"MultiheadAttention inside torch\.compile"):
        compiled_training("attention", tmp_path)


def whole_step(model: nn.Module, optimizer: optim.Optimizer, backend: str) -> Callable:
    def step(x, y):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return torch.compile(step, backend=backend)


def optimiser_step(model: nn.Module, optimizer: optim.Optimizer, backend: str) -> Callable:
    compiled = torch.compile(optimizer.step, backend=backend)

    def step(x, y):
        F.cross_entropy(model(x), y).backward()
        compiled()
        optimizer.zero_grad()

    return step


def loss(model: nn.Module, optimizer: optim.Optimizer, backend: str) -> Callable:
    compiled = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend=backend)

    def step(x, y):
        compiled(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def network(model: nn.Module, optimizer: optim.Optimizer, backend: str) -> Callable:
    model.compile(backend=backend)
    return loss(model, optimizer, "eager")


OPTIMISERS = {"SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9), "AdamW": lambda p: optim.AdamW(p, lr=1e-2)}


def trained(compiled: Callable, optimiser: str, backend: str, path=None) -> nn.Module:
    """A network after six compiled steps, bare or recorded."""
    model = nn.Sequential(mlp(5, 64, 32), nn.LayerNorm(32, dtype=torch.float64), nn.GELU(), mlp(32, 3))
    optimizer = OPTIMISERS[optimiser](model.parameters())
    torch._dynamo.reset()

    def loop() -> None:
        step = compiled(model, optimizer, backend)
        for x, y in batches(6, 4, 5, 3):
            step(x, y)

    if path is None:
        loop()
    else:
        with dualform.record(model, optimizer, path, dtype="float64", progress=False):
            loop()
    return model


PARTS = [
    pytest.param(compiled, optimiser, id=f"{compiled.__name__}-{optimiser}")
    for compiled in (whole_step, optimiser_step, loss, network)
    for optimiser in OPTIMISERS
    if (compiled, optimiser) != (whole_step, "AdamW")  # below, in a process of its own
]


@pytest.mark.parametrize(("compiled", "optimiser"), PARTS)
def test_any_part_of_the_training_step_may_be_compiled(compiled, optimiser, tmp_path):
    bare, model = trained(compiled, optimiser, "aot_eager"), trained(compiled, optimiser, "aot_eager", tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), model.parameters(), strict=True))
    memory = dualform.open(tmp_path)
    assert memory.step == 6 and not memory.certificate.marks
    # a compiled Adam computes 1 − β^s in float32
    bar = 1e-7 if optimiser == "AdamW" and compiled is optimiser_step else 1e-12
    assert memory.check(model, full=True, progress=False).worst < bar
    assert memory.certificate.worst < bar


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(("compiled", "optimiser"), [(whole_step, "SGD"), (network, "AdamW")])
def test_a_recorded_step_compiled_by_inductor_differs_by_rounding_alone(compiled, optimiser, tmp_path):
    bare, model = trained(compiled, optimiser, "inductor"), trained(compiled, optimiser, "inductor", tmp_path)
    apart = max(
        float((a - b).detach().norm() / b.detach().norm())
        for a, b in zip(model.parameters(), bare.parameters(), strict=True)
    )
    print(f"{compiled.__name__}, {optimiser}: recorded and bare weights are {apart:.1e} apart")
    assert apart < 1e-13
    memory = dualform.open(tmp_path)
    assert memory.step == 6 and not memory.certificate.marks
    assert memory.check(model, full=True, progress=False).worst < 1e-7


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_whole_step_of_adam_is_compiled_and_followed_as_it_rounds(backend, tmp_path):
    """As it is in use: the checks of types in these tests break the graph before a hook can see that there is one."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    tests = Path(__file__).parents[1]
    script = f"""if True:
        import sys
        sys.path[:0] = [{str(tests)!r}, {str(tests / "record")!r}]
        import torch
        from test_compile import dualform, trained, whole_step
        bare = trained(whole_step, "AdamW", {backend!r})
        model = trained(whole_step, "AdamW", {backend!r}, {str(tmp_path)!r})
        pairs = list(zip(model.parameters(), bare.parameters(), strict=True))
        assert max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs) < 1e-13
        memory = dualform.open({str(tmp_path)!r})
        assert memory.step == 6 and not memory.certificate.marks
        assert max(memory.check(model, full=True, progress=False).worst, memory.certificate.worst) < 1e-7
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
