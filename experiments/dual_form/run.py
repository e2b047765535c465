"""Reproduce "The Dual Form of Neural Networks Revisited" (Irie, Csordás, Schmidhuber 2022), an experiment at a time.

dualform reproduce dual-form/single --seeds 5
python experiments/dual_form/run.py single --variant 3000-clipped --seeds 5 --out runs/dual-form
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from settings import EXPERIMENTS, ImageSettings, tiny
from training import train
from votes import count_votes

from runs import Run, begin, console


def single(run: Run, settings: ImageSettings) -> None:
    """One task: Table 1."""
    run.stage("training", lambda: train(run, settings))
    run.stage("votes", lambda: count_votes(run, settings))


WORK = {"single": single}


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
            WORK[experiment](run, settings)
            if not keep:
                run.forget_memory()
            console.print(f"{run.folder}: done")


if __name__ == "__main__":
    typer.run(main)
