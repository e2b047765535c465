"""From a memory to the steps that can be run again: which examples each step saw, and with which settings.

Every memory with a noted ``index`` holds what this needs: the examples of each step, the optimiser's settings and the
scale of its gradients, the first weights, and a few entries of every weight after each step, by which a step that was
run again is compared with the recorded one bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn, optim

from dualform.errors import QueryError, UnsupportedOptimizer
from dualform.rules import RULES
from dualform.store import ParameterSteps, Store, entry_sample

from .rerun import PassTrace, StepTrace

MakeOptimizer = Callable[[list[nn.Parameter]], optim.Optimizer]


def step_traces(store: Store, names: Sequence[str], index: str = "index") -> list[StepTrace]:
    """All steps of a memory. The settings of each step are listed parameter by parameter, in the order of ``names``."""
    passes = _passes(store, index)
    own = {name: store.schedule(name) for name in names}
    # a parameter of the rest has no line of its own: what its optimiser did to others holds for it too
    lines = {name: steps if len(steps.steps) else _of_same_rule(store, name, own) for name, steps in own.items()}
    traces = []
    for step in range(1, store.steps + 1):
        places = {name: lines[name].find(step) for name in names}
        settings = tuple({} if place is None else lines[name].settings_at(place) for name, place in places.items())
        scales = [lines[name].scale[place] for name, place in places.items() if place is not None]
        traces.append(StepTrace(passes[step - 1], settings, scale=float(np.median(scales)) if scales else 1.0))
    return traces


def _passes(store: Store, index: str) -> list[tuple[PassTrace, ...]]:
    """The backward passes of each step. A batch begins where the place of an example in it is 0."""
    visits = store.visits
    if index not in visits.column_names:
        raise QueryError(
            f"the memory at {store.path} has no column {index!r} (it has {visits.column_names}), so nothing says which "
            "examples a step saw. Note it while recording: tape.note(index=…)."
        )
    if not pa.types.is_integer(visits[index].type):
        raise QueryError(f"the column {index!r} holds {visits[index].type}; examples are run again by whole numbers.")
    if store.manifest.ranks > 1:
        raise QueryError(
            f"the memory at {store.path} was recorded by {store.manifest.ranks} processes; only a run of one process "
            "can be run again yet."
        )
    if "copy" in visits.column_names:
        raise QueryError(
            f"the memory at {store.path} was recorded with copies=, several rows for each example; it cannot be run "
            "again yet."
        )
    steps, rows = visits["step"].to_numpy(), visits["row"].to_numpy()
    values = torch.from_numpy(visits[index].to_numpy().astype(np.int64))
    begins = np.flatnonzero(rows == 0)
    passes: list[list[PassTrace]] = [[] for _ in range(store.steps)]
    for begin, end in zip(begins, [*begins[1:], len(rows)], strict=True):
        passes[steps[begin] - 1].append(PassTrace(values[begin:end], first=int(begin)))
    return [_together(of_step) for of_step in passes]


def _together(passes: Sequence[PassTrace]) -> tuple[PassTrace, ...]:
    """The passes of a step, each with the examples of all."""
    if len(passes) == 1:
        return tuple(passes)
    indices = tuple(one_pass.index for one_pass in passes)
    return tuple(replace(one_pass, step=indices, place=place) for place, one_pass in enumerate(passes))


def _of_same_rule(store: Store, name: str, lines: Mapping[str, ParameterSteps]) -> ParameterSteps:
    rule = store.parameters[name].rule
    for other, steps in lines.items():
        if store.parameters[other].rule == rule and len(steps.steps):
            return steps
    return lines[name]


def rebuild_optimizers(store: Store, model: nn.Module, make: MakeOptimizer | None = None) -> list[optim.Optimizer]:
    """The optimisers of a recorded run on the parameters of a copy of the model, one parameter a group.

    ``make`` builds an optimiser that a taught rule explains; those of torch are known by the name of their rule.
    """
    classes: dict[str, Any] = {rule.name: kind for kind, rule in RULES.items()}
    parameters = dict(model.named_parameters())
    optimizers, names = [], ordered_names(store)
    for rule in dict.fromkeys(store.parameters[name].rule for name in names):
        assert rule is not None
        kind = make or classes.get(rule)
        if kind is None:
            raise UnsupportedOptimizer(
                f"the memory at {store.path} was recorded with the rule '{rule}', and nothing says which optimiser "
                "that is. Pass it: memory.replay(…, optimizer=lambda parameters: MyOptimizer(parameters, …))."
            )
        own = [parameters[name] for name in names if store.parameters[name].rule == rule]
        optimizer = kind(own)
        (group,) = optimizer.param_groups
        optimizer.param_groups[:] = [{**group, "params": [parameter]} for parameter in own]
        optimizers.append(optimizer)
    return optimizers


def ordered_names(store: Store) -> list[str]:
    """The parameters that optimisers hold, in the order of the groups of rebuilt optimisers: rule by rule."""
    rules = {parameter.name: parameter.rule for parameter in store.manifest.parameters if parameter.rule is not None}
    return [name for rule in dict.fromkeys(rules.values()) for name, its_rule in rules.items() if its_rule == rule]


def load_first_weights(store: Store, model: nn.Module) -> None:
    """Put a copy of the model where the recorded training began."""
    if store.manifest.shards and any(store.initial_states(name) for name in _explained(store)):
        raise QueryError(
            f"the memory at {store.path} begins with state in its optimiser (a loaded momentum); it cannot be run "
            "again from there yet."
        )
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in store.parameters and name not in store.manifest.frozen:
                tensor.copy_(store.initial(name))


def differing(store: Store, model: nn.Module, step: int) -> list[str]:
    """The parameters whose sampled entries are not, bit for bit, those that were stored after a step."""
    parameters = dict(model.named_parameters())
    unlike = []
    for name in _explained(store):
        stored = store.sample(name, step)
        if stored is not None and stored[0] != entry_sample([parameters[name].detach()]):
            unlike.append(name)
    return unlike


def _explained(store: Store) -> list[str]:
    return [parameter.name for parameter in store.manifest.parameters if parameter.by_slots]
