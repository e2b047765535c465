"""How architectures of transformers are recorded: a small one of each, trained bare and recorded.

python benchmarks/architectures.py [--only bert gpt2]
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers
from architectures import ARCHITECTURES, EXAMPLES, LENGTH, QUICK
from paper_run import machine, save
from sweep import AGREE, STEPS, Verdict, examine

COLUMNS = (
    "architecture", "family", "same bits", "parameters explained", "certificate, worst", "every entry, worst",
    "parts of single examples", "rest, beside normalisation and buffers",
)  # fmt: skip

EXPECTED = ("Norm", "LayerScale", "it is a buffer")
"""What the reason for the rest holds where it is no news."""


def share(verdict: Verdict, model: torch.nn.Module) -> str:
    """How many of the numbers that are trained the slots explain."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return f"{sum(sizes[name] for name in verdict.full) / sum(sizes.values()):.0%}"


def parts(verdict: Verdict) -> str:
    """How exact the parts of single examples are, and in how many layers these are not known."""
    unknown = sum(credit.error is None for credit in verdict.credits)
    known = len(verdict.credits) - unknown
    error = f"{verdict.worst_credit:.0e}" if verdict.worst_credit else "0"
    told = f"{error} in {known}" if known else "none known"
    return told + (f", {unknown} marked" if unknown else "")


def rest(verdict: Verdict) -> str:
    """Why parameters are in the rest, each reason with how many it holds for."""
    reasons: dict[str, int] = {}
    for reason in verdict.full.reasons.values():
        if not any(word in reason for word in EXPECTED):
            short = reason.partition(" (")[0].partition(", in which")[0].partition(" is no layer")[0]
            reasons[short] = reasons.get(short, 0) + 1
    return "; ".join(f"{count} × {reason}" for reason, count in reasons.items()) or "–"


def line(name: str, verdict: Verdict) -> str:
    """One row of the table."""
    architecture = ARCHITECTURES[name]
    agrees = "" if not verdict.disagreeing else f" **({len(verdict.disagreeing)} disagree)**"
    return (
        f"| {name} | {architecture.family} | {'yes' if verdict.same_bits else '**no**'} | "
        f"{share(verdict, architecture.make())} | {verdict.certificate.worst:.0e}{agrees} | {verdict.full.worst:.0e} | "
        f"{parts(verdict)} | {rest(verdict)} |"
    )


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--only", nargs="+", default=list(ARCHITECTURES), metavar="NAME")
    names = options.parse_args().only
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(line(name, examine(ARCHITECTURES[name], Path(folder))))
        print(rows[-1], flush=True)
    text = f"""# Architectures

{len(rows)} architectures of transformers {transformers.__version__}, made small from their configurations,
{STEPS} steps of AdamW with {EXAMPLES} examples of {LENGTH} tokens (or an image, or a sound) each, in
float32 with a float32 memory.

- *same bits*: all weights and buffers after recorded training are those after training without recording.
- *parameters explained*: the share of the numbers that the slots rebuild; all others are kept as snapshots, each with a
  reason in `memory.certificate.reasons`. The last column counts the reasons.
- *certificate*: as it was written while training ran; *every entry*: `memory.check(model, full=True)`. The two agree
  for each parameter within {AGREE:.0f} ×, or both lie within that of the rounding floor.
- *parts of single examples*: in three layers, after one step of gradient descent in float64, what each example put into
  the weights beside minus the gradient of its own loss, the largest relative difference. Layers that mix examples in
  their rows before any note can tell them apart are marked `unknown-visits`.

| {" | ".join(COLUMNS)} |
|{"---|" * len(COLUMNS)}
"""
    save("architectures", text + "\n".join(rows) + f"\n\nMachine: {machine()}.")
    print(f"the quick tests run {', '.join(QUICK)}")


if __name__ == "__main__":
    main()
