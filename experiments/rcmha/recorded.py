"""Record one network per attention, and find the training passages behind one predicted character."""

from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor

import dualform
from experiments.runs import Run, console

from .settings import Settings
from .texts import Text, read, segments
from .training import Trainer, make_model, training_ids, training_segments, validated

SHOWN, AROUND = 4, 30
"""Passages shown per layer, and characters on either side of each."""
LAYERS = ("head", "blocks.0.attn.value")


def train_recorded(run: Run, settings: Settings) -> dict[str, Any]:
    """Train with a float32 recorder. Columns of a visit: the start of its segment and the length of its memory."""
    trainer = Trainer(settings)
    work = training_segments(settings, settings.updates)
    with dualform.record(
        trainer.model, trainer.optimizer, run.memory, dtype="float32", overwrite=True, progress=False
    ) as tape:
        for segment in track(work, "training", settings.updates, console=console, transient=True):
            known = 0 if segment.again or trainer.state is None else trainer.state[0].shape[1]
            tape.note(start=segment.start, remembered=torch.full_like(segment.start, known))
            trainer.update(segment)
    save_file(trainer.model.state_dict(), run.folder / "model.safetensors")
    memory = dualform.open(run.memory)
    return {
        "valid": validated(trainer.model, settings),
        "certificate": dict(memory.certificate),
        "worst": memory.certificate.worst,
        "marks": len(memory.certificate.marks),
        "memory_megabytes": round(sum(f.stat().st_size for f in run.memory.rglob("*") if f.is_file()) / 1e6),
    }


def ask(run: Run, settings: Settings) -> dict[str, Any]:
    """The training passages that contribute most to one predicted character of the validation text."""
    model, text, memory = make_model(settings), read(settings.text), dualform.open(run.memory)
    model.load_state_dict(load_file(run.folder / "model.safetensors"))
    model.eval()
    *first, last = segments(text.valid, 1, settings.segment, 1 + -(-settings.memory // settings.segment))
    state = None
    with torch.no_grad():
        for segment in first:
            _, state = model(segment.x, state)
    spot = memory.attend(model, last.x if state is None else (last.x, state))
    said = int(spot.prediction[0][0, -1].argmax())
    passages, ids = {}, training_ids(settings)
    for layer in LAYERS:
        whole = layer != "head"  # what is said comes of the last token; of values, through those of all tokens
        hits = spot.top(SHOWN, layer=layer, position=None if whole else -1, progress=False, per="slot")
        passages[layer] = [
            {
                **passage(text, ids, hit.start + hit.position - whole * hit.remembered),  # values are of the memory too
                **{"adds": hit.contribution, "step": hit.step},
            }
            for hit in hits
        ]
    return {
        "prompt": text.written(last.x[0]), "next": text.symbols[int(last.y[0, -1])], "said": text.symbols[said],
        "layers": passages,
    }  # fmt: skip


def passage(text: Text, ids: Tensor, place: int) -> dict[str, Any]:
    """The characters around a place of the training text."""
    return {
        "place": place, "before": text.written(ids[max(0, place - AROUND) : place]),
        "symbol": text.symbols[int(ids[place])], "after": text.written(ids[place + 1 : place + AROUND]),
    }  # fmt: skip
