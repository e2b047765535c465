"""Reproduce "The Dual Form of Neural Networks Revisited" (Irie, Csordás, Schmidhuber 2022), an experiment at a time:
``dualform reproduce dual-form/single``.
"""

from functools import partial

from experiments.runs import Options, Run, each_run

from . import language
from .masks import explain_forgetting, keep_some, mask_classes, mask_phases
from .pictures import draw
from .settings import EXPERIMENTS, NETWORKS, ON_REQUEST, LanguageSettings, Settings, tiny
from .training import train
from .votes import count_votes


def work(experiment: str, run: Run, settings: Settings) -> None:
    """The stages of an experiment. Figures are drawn for the first network only."""
    if isinstance(settings, LanguageSettings):
        stages = {"training": partial(language.train, run, settings), "prompts": partial(language.ask, run, settings)}
        run.stages(stages)
        return
    stages = {"training": partial(train, run, settings)}
    if experiment == "kept":
        stages |= {"classes": partial(mask_classes, run, settings), "kept": partial(keep_some, run, settings)}
    elif len(settings.sets) == 1:
        stages["votes"] = partial(count_votes, run, settings)
    if experiment != "kept" and settings.seed == 0:
        stages["figures"] = partial(draw, experiment, run, settings)
    if len(settings.phases) > 1:
        stages |= {
            "masks": partial(mask_phases, run, settings),
            "forgetting": partial(explain_forgetting, run, settings),
        }
    run.stages(stages)


def reproduce(experiment: str, options: Options) -> None:
    """Run an experiment: stages that already have a result are skipped."""
    variants, networks = EXPERIMENTS[experiment] | ON_REQUEST.get(experiment, {}), NETWORKS.get(experiment, 1)
    for run, settings in each_run("dual-form", experiment, options, variants, networks, tiny):
        work(experiment, run, settings)
