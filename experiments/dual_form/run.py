"""Reproduce "The Dual Form of Neural Networks Revisited" (Irie, Csordás, Schmidhuber 2022), an experiment at a time.

dualform reproduce dual-form/single --seeds 5
python -m experiments.dual_form.run single --variant 3000-clipped --seeds 5 --out runs/dual-form
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from experiments.runs import Run, begin, console

from .masks import explain_forgetting, keep_some, mask_classes, mask_phases
from .pictures import draw
from .settings import EXPERIMENTS, ImageSettings, tiny
from .training import train
from .votes import count_votes


def work(experiment: str, run: Run, settings: ImageSettings) -> None:
    """The stages of an experiment. Figures are drawn of the first network alone."""
    stages = {"training": partial(train, run, settings)}
    one = len(settings.sets) == 1
    if one:
        stages["votes"] = partial(count_votes, run, settings)
    if settings.seed == 0:
        stages["figures"] = partial(draw, experiment, run, settings)
    if one and settings.seed == 0:
        stages |= {"classes": partial(mask_classes, run, settings), "kept": partial(keep_some, run, settings)}
    if len(settings.phases) > 1:
        stages |= {
            "masks": partial(mask_phases, run, settings),
            "forgetting": partial(explain_forgetting, run, settings),
        }
    run.stages(stages)


def main(
    experiment: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}.")],
    variant: Annotated[
        list[str] | None, typer.Option(help="Of the settings that the sources leave open; all if none.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many networks to train.", min=1)] = 1,
    out: Annotated[Path, typer.Option(help="The folder of the runs.")] = Path("runs/dual-form"),
    quick: Annotated[bool, typer.Option(help="A few steps of small networks, to see that all of it runs.")] = False,
    threads: Annotated[int, typer.Option(help="Of torch; by default as many as torch takes.", min=0)] = 0,
    keep: Annotated[bool, typer.Option(help="Keep the memories: 3 to 10 GB each.")] = False,
) -> None:
    """Run an experiment: every stage that has its result already is passed over."""
    if threads:
        torch.set_num_threads(threads)
    variants = EXPERIMENTS[experiment]
    for seed in range(seeds):
        for name in variant or variants:
            settings = replace(tiny(variants[name]) if quick else variants[name], seed=seed)
            run = begin(out / experiment / name / f"seed-{seed}", f"dual-form/{experiment}", settings)
            work(experiment, run, settings)
            if not keep:
                run.forget_memory()
            console.print(f"{run.folder}: done")


if __name__ == "__main__":
    typer.run(main)
