"""A page of passages: what the language models recall after a prompt."""

from typing import Any

from experiments.results import table

from .results import seeds
from .settings import EXPERIMENTS, ON_REQUEST

PASSAGES = """# What prompts recall

The places of the training text that language models attend to most after a prompt, in each layer: the single slots with
the largest |α| (repeats of one place in a row are counted), the places with the largest Σ|α| over all epochs, and the
slots that add most to the logit of the network's answer, exactly, under Adam. The token at the place is bold. Where the
output layer keeps a ledger there are no contributions of slots. Settings and numbers: [the dual form of neural
networks, reproduced](dual-form.md)."""


def passages() -> str:
    """A page of what prompts recall."""
    parts = []
    for experiment in ON_REQUEST:
        for variant in EXPERIMENTS[experiment] | ON_REQUEST[experiment]:
            for run in seeds(experiment, variant, "prompts")[:1]:
                parts.append(f"## {experiment}, {variant}")
                for number, each in enumerate(run["prompts"]["prompts"], start=1):
                    parts.append(_prompt(number, each))
    return "\n\n".join(parts)


def _prompt(number: int, each: dict[str, Any]) -> str:
    lines = [
        f"### {number}. From the {each['part']} text",
        f"> {_plain(each['prompt'])}",
        f"Next comes {_quoted(each['next'])}, the network says {_quoted(each['said'])}.",
    ]
    for layer, rankings in each["layers"].items():
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
