"""Record language models trained with Adam, as in the paper's code, and query them."""

import math
from bisect import bisect_right
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

import dualform
from dualform.explain import SlotHits
from dualform.models import LSTMLanguageModel
from experiments.runs import Run, console

from .settings import LanguageSettings
from .texts import batches, read, titles

BEST, SHOWN, WINDOW = 500, 3, 50
PARTS = 8
"""Number of stretches of the training text that the output layer's ledger distinguishes."""


def make_model(settings: LanguageSettings) -> LSTMLanguageModel:
    """An untrained network, determined by the seed of the settings."""
    torch.manual_seed(settings.seed)
    tokens = len(read(settings.text).tokens)
    return LSTMLanguageModel(tokens, settings.hidden, embedding=settings.embedding, dropout=settings.dropout)


def train(run: Run, settings: LanguageSettings) -> dict[str, Any]:
    """Train with a recorder, resuming from the last checkpoint if there is one."""
    model, text = make_model(settings), read(settings.text)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, weight_decay=settings.decay)
    saved, state, done = run.folder / "checkpoint.pt", None, 0
    if saved.exists() and run.memory.exists():
        kept = torch.load(saved, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["random"])
        state, done = tuple(kept["state"]), kept["step"]
    wide = settings.text == "wikitext-2"  # 33,278 numbers per error: too many to store
    options: dict[str, Any] = {"keep": {"output": "keys+ledger"}, "by": "part"} if wide else {}
    options |= {"resume": done} if done else {"overwrite": True}
    losses = []
    with dualform.record(model, optimizer, run.memory, dtype=settings.dtype, progress=False, **options) as tape:
        left = settings.updates - done
        for start, x, y, forgotten in track(batches(settings, done), "training", left, console=console, transient=True):
            state = None if forgotten else state
            tape.note(start=start, part=(start * PARTS // len(text.train)))
            logits, state = model(x, state)
            state = tuple(each.detach() for each in state)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if tape.step % settings.saved_every == 0:
                tape.flush()
                about = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": tape.step}
                torch.save({**about, "state": list(state), "random": torch.get_rng_state()}, saved)
    certificate = dualform.open(run.memory).certificate
    loss = test_loss(model, settings)
    return {
        "test_loss": loss, "perplexity": math.exp(loss), "bits": loss / math.log(2),
        "train_loss": sum(losses[-50:]) / max(1, len(losses[-50:])),
        "certificate": dict(certificate), "worst": certificate.worst, "tokens": settings.batch * settings.unroll,
        "vocabulary": len(text.tokens),
    }  # fmt: skip


@torch.no_grad()
def test_loss(model: LSTMLanguageModel, settings: LanguageSettings) -> float:
    """Mean loss per test token; the state is carried through the whole text."""
    model.eval()
    ids, state, total, count = read(settings.text).test[: settings.test_tokens + 1], None, 0.0, 0
    for begin in range(0, len(ids) - 1, 1000):
        x, y = ids[begin : begin + 1000][: len(ids) - 1 - begin], ids[begin + 1 : begin + 1001]
        logits, state = model(x.unsqueeze(0), state)
        total += float(nn.functional.cross_entropy(logits[0], y, reduction="sum"))
        count += len(y)
    model.train()
    return total / count


def ask(run: Run, settings: LanguageSettings) -> dict[str, Any]:
    """The top places of the training text for each prompt and layer: by slot, by place and by contribution."""
    memory, model, text = dualform.open(run.memory), make_model(settings), read(settings.text)
    memory.load_into(model, progress=False)
    prompts = [(part, begin) for part in ("test", "train") for begin in places(settings, part)]
    rows = torch.stack([getattr(text, part)[begin : begin + settings.prompt] for part, begin in prompts])
    spot = memory.attend(model, rows)
    said = spot.prediction[0][:, -1].argmax(1)
    answers: list[dict[str, Any]] = []
    for (part, begin), row, answer in zip(prompts, rows, said.tolist(), strict=True):
        true = int(getattr(text, part)[begin + settings.prompt])
        about = {"part": part, "prompt": text.words(row), "next": text.tokens[true], "said": text.tokens[answer]}
        answers.append({**about, "layers": {}})
    articles = titles() if settings.text == "wikitext-2" else []
    for layer in (name for name in memory.layers if name != "embedding"):
        slots = spot.top(BEST, layer=layer, score="abs", position=-1, progress=False, per="slot")
        sums = spot.by("start", layer=layer, score="abs", position=-1, places=True, progress=False)
        best = sums.values.topk(SHOWN, dim=1)
        booked = memory.store.layer(layer)[0].in_ledger
        pulls = None if booked else spot.top(SHOWN, layer=layer, position=-1, progress=False, per="slot")
        for i, each in enumerate(answers):
            slot = [passage(text, place, articles) | {"times": n, "weight": w} for place, n, w in merged(slots[i])]
            where = zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True)
            place = [passage(text, sum(sums.names[j]), articles) | {"total": total} for j, total in where]
            pull = [
                passage(text, hit.start + hit.position, articles) | {"adds": hit.contribution, "step": hit.step}
                for hit in (pulls[i] if pulls is not None else ())
            ]
            each["layers"][layer] = {"by slot": slot, "by place": place, "by contribution": pull}
    return {"prompts": answers}


def places(settings: LanguageSettings, part: str) -> list[int]:
    """Start positions of the prompts, evenly spaced over the text."""
    length = len(getattr(read(settings.text), part)) - settings.prompt - 1
    return torch.linspace(length * 0.05, length * 0.95, settings.prompts).long().tolist()


def merged(hits: SlotHits) -> list[tuple[int, int, float]]:
    """The first places among the top slots, each with its count of consecutive slots and its largest weight."""
    top_places: list[tuple[int, int, float]] = []
    for hit in hits:
        place = hit.start + hit.position
        if top_places and top_places[-1][0] == place:
            top_places[-1] = place, top_places[-1][1] + 1, top_places[-1][2]
        else:
            top_places.append((place, 1, abs(hit.weight)))
        if len(top_places) > SHOWN:
            break
    return top_places[:SHOWN]


def passage(text: Any, place: int, articles: list[tuple[int, str]]) -> dict[str, Any]:
    """The words around a place of the training text."""
    ids: Tensor = text.train
    before, after = text.words(ids[max(0, place - WINDOW) : place]), text.words(ids[place + 1 : place + WINDOW])
    about = {"place": place, "before": before, "token": text.tokens[int(ids[place])], "after": after}
    if articles:
        about["article"] = articles[max(0, bisect_right([at for at, _ in articles], place) - 1)][1]
    return about
