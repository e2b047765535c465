"""A recorded network with each attention and one explained prediction: support tokens and training examples."""

from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dualform
from dualform import data
from dualform.attention import Heads
from dualform.svm import prove, support_vectors
from experiments.runs import Run, console

from .examples import make_model, task
from .settings import Settings
from .training import accuracy, batches, make_optimizer, number_of_updates, update

SHOWN, LAST = 6, "blocks.1.attn"
"""Number of training examples in a row of a figure, and the layer whose support tokens are shown."""
FIELDS = ("index", "label", "step", "position", "contribution")


def train_recorded(run: Run, settings: Settings) -> dict[str, Any]:
    """Train as usual, recorded in float32."""
    given, model = task(settings), make_model(settings)
    optimizer = make_optimizer(settings, model)
    updates = number_of_updates(settings, given)
    with dualform.record(model, optimizer, run.memory, dtype="float32", overwrite=True, progress=False) as tape:
        for index in track(batches(settings, given, updates), "training", updates, console=console, transient=True):
            tape.note(index=index, label=given.train.y[index])
            update(settings, model, optimizer, given.train[index])
    save_file(model.state_dict(), run.folder / "model.safetensors")
    memory = dualform.open(run.memory)
    model.eval()
    return {
        "accuracy": accuracy(model, given.test),
        "updates": updates,
        "certificate": dict(memory.certificate),
        "worst": memory.certificate.worst,
        "marks": len(memory.certificate.marks),
        "memory_megabytes": round(sum(f.stat().st_size for f in run.memory.rglob("*") if f.is_file()) / 1e6),
    }


def ask(run: Run, settings: Settings) -> dict[str, Any]:
    """Explain one test digit: support tokens of the last attention, training digits of the logit, and a proof."""
    given, model = task(settings), make_model(settings)
    model.load_state_dict(load_file(run.folder / "model.safetensors"))
    model.eval()
    memory = dualform.open(run.memory)
    said = torch.cat([model(given.test[i : i + 100].x).argmax(1).detach() for i in range(0, len(given.test), 100)])
    number = int(((said == given.test.y) & (given.test.y == 5)).nonzero()[0]) if bool((said == 5).any()) else 0
    x = given.test.x[number : number + 1]
    layer, tokens = attention_inputs(model, x)
    spot = memory.attend(model, x)
    inside = [name for name in memory.layers if name.startswith(f"{LAST}.value")]
    answers = {name: spot.top(SHOWN, layer=name, progress=False, per="slot") for name in ("head", inside[0])}
    support = support_vectors(layer, tokens)
    proof = prove(layer, tokens, head=0)
    found = {
        "test_image": number,
        "label": int(given.test.y[number]),
        "says": int(said[number]),
        "support": [[str(line) for line in support.of(head=head).top(3)] for head in range(layer.heads)],
        "training": {
            name: [{field: getattr(hit, field) for field in FIELDS} for hit in hits]
            for name, hits in answers.items()
        },
        "proof": {"holds": proof.holds, "gap": proof.gap, "value_error": proof.value_error,
                  "output_error": proof.output_error, "condition": proof.condition},
    }  # fmt: skip
    mass = layer.weights(tokens).mean(2)[0]  # H m
    draw(run, settings, mass.detach(), found)
    return found


@torch.no_grad()
def attention_inputs(model: nn.Module, x: Tensor) -> tuple[Heads, Tensor]:
    """The last attention layer and its input tokens."""
    layer, seen = model.get_submodule(LAST), []
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(x)
    handle.remove()
    assert isinstance(layer, Heads)
    return layer, seen[0]


def draw(run: Run, settings: Settings, mass: Tensor, found: dict[str, Any]) -> None:
    """Draw the digit, the attention of each head, and the training digits that contribute most to the logit."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    pictures = data.small_digits().images.numpy()
    given = task(settings)
    heads, rows = len(mass), found["training"]
    drawn, axes = plt.subplots(
        len(rows), 1 + heads + SHOWN, figsize=(1.15 * (1 + heads + SHOWN), 3.2), layout="constrained"
    )
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.set_frame_on(False)
    digit = (
        pictures[len(given.train) + found["test_image"]] if not settings.most else pictures[1437 + found["test_image"]]
    )
    axes[0, 0].imshow(digit, cmap="gray_r")
    axes[0, 0].set_title(f"a {found['label']},\nit says {found['says']}", fontsize=8)
    for head in range(heads):
        axes[0, 1 + head].imshow(digit, cmap="gray_r", alpha=0.25)
        axes[0, 1 + head].imshow(mass[head].reshape(8, 8).numpy(), cmap="viridis", alpha=0.75)
        axes[0, 1 + head].set_title(f"support,\nhead {head}", fontsize=8)
    for line, (name, hits) in enumerate(rows.items()):
        for place, hit in enumerate(hits):
            axis = axes[line, 1 + heads + place]
            axis.imshow(pictures[hit["index"]], cmap="gray_r")
            where = "" if name == "head" else f"\npixel {hit['position']}"
            axis.set_title(f"{hit['contribution']:+.2g}, a {hit['label']}{where}", fontsize=7)
            if name != "head":
                row, column = divmod(hit["position"], 8)
                axis.plot(column, row, "s", mfc="none", mec="crimson", ms=7)
        axes[line, 1 + heads].set_ylabel(name, fontsize=7)
    drawn.suptitle(
        f"{settings.attention}: tokens that carry its last attention, and training digits that carry the answer",
        fontsize=9,
    )
    drawn.savefig(run.figures / "support.png", dpi=110)
    plt.close(drawn)
