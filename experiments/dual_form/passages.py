"""Write docs/results/dual-form-passages.md: the training passages that language models attend to after a prompt."""

from typing import Any

from experiments.results import table

from .results import seeds
from .settings import EXPERIMENTS, ON_REQUEST

PASSAGES = """# Training passages recalled by prompts

For each prompt and each layer, these tables list the places of the training text that the language model attends to
most: the single slots with the largest |α| (with a count of consecutive slots at the same place), the places with the
largest Σ|α| over all epochs, and the slots that add most to the logit of the predicted token, computed exactly under
Adam. The token at the place is bold. Output layers that keep only a ledger have no contributions per slot. Settings and
numbers: [the dual form of neural networks, reproduced](dual-form.md)."""


def passages() -> str:
    """Tables of recalled passages for all prompts of all language models."""
    parts = []
    for experiment in ON_REQUEST:
        for variant in EXPERIMENTS[experiment] | ON_REQUEST[experiment]:
            for run in seeds(experiment, variant, "prompts")[:1]:
                parts.append(f"## {experiment}, {variant}")
                for number, prompt in enumerate(run["prompts"]["prompts"], start=1):
                    parts.append(_prompt(number, prompt))
    return "\n\n".join(parts)


def _prompt(number: int, prompt: dict[str, Any]) -> str:
    lines = [
        f"### {number}. From the {prompt['part']} text",
        f"> {_plain(prompt['prompt'])}",
        f"The text continues with {_quoted(prompt['next'])}; the network predicts {_quoted(prompt['said'])}.",
    ]
    for layer, rankings in prompt["layers"].items():
        rows = [
            [ranking, place + 1, _passage(hit), _numbers(hit)]
            for ranking, hits in rankings.items()
            for place, hit in enumerate(hits)
        ]
        lines.append(f"**{layer}**\n\n{table(['ranking', '', 'passage', ''], rows)}")
    return "\n\n".join(lines)


def _passage(hit: dict[str, Any]) -> str:
    article = f"*{_plain(hit['article'])}*: " if "article" in hit else ""
    return f"{article}… {_plain(hit['before'])}**{_plain(hit['token']) or '␣'}**{_plain(hit['after'])} …"


def _numbers(hit: dict[str, Any]) -> str:
    if "adds" in hit:
        return f"adds {hit['adds']:+.3g}, step {hit['step']:,}"
    return (
        f"Σ\\|α\\| = {hit['total']:.4g}"
        if "total" in hit
        else f"\\|α\\| = {hit['weight']:.4g}, {hit['times']} in a row"
    )


def _quoted(token: str) -> str:
    return f"“{_plain(token) or '␣'}”"


def _plain(text: str) -> str:
    for mark, written in (("\\", "\\\\"), ("|", "\\|"), ("*", "\\*"), ("_", "\\_"), ("<", "&lt;"), ("\n", " ⏎ ")):
        text = text.replace(mark, written)
    return text
