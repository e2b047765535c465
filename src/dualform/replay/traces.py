"""From a memory to the steps that can be run again: which examples each step saw, and with which settings.

A memory that was recorded to be run again (``record(…, replay=…)``) has a log of this. Every other memory with a noted
``index`` holds most of it too: the examples of each step, the settings of the optimiser and the scale of its gradients,
the first weights, and a few entries of every weight after each step. What it lacks are the states of the generator.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn, optim

from dualform.errors import QueryError, UnsupportedOptimizer
from dualform.rules import OTHERS, RULES, Rule, path_of
from dualform.store import (
    NO_GRADIENT,
    SETTING,
    Modes,
    ParameterSteps,
    RunLog,
    Store,
    WeightsChecksum,
    entry_sample,
    sampled_entries,
)

from .rerun import PassTrace, StepTrace

MakeOptimizer = Callable[[list[Any]], optim.Optimizer]
"""Makes an optimiser of a list of parameters, or of parameter groups where there were several."""


@dataclass(frozen=True)
class Difference:
    """What is not as it was recorded after a step: parameters, as far as known, and the largest difference seen."""

    step: int
    parameters: tuple[str, ...] = ()
    largest: float | None = None


# ---------------------------------------------------------------------------------------------------- steps


def step_traces(store: Store, index: str = "index") -> list[StepTrace]:
    """All steps of a memory, with the settings of each parameter group of :func:`rebuild_optimizers`."""
    log = store.manifest.run_log
    if log is None:
        return _traces_without_log(store, index)
    if log.broken:
        raise QueryError(f"the run in {store.path} cannot be run again: {log.broken}.")
    return _logged_traces(store, log, index)


def _logged_traces(store: Store, log: RunLog, index: str) -> list[StepTrace]:
    passes, generators = _passes(store, index), store.generators()
    table = store.run_log
    numbers = {name: table[name].to_numpy() for name in table.column_names}
    settings = {name.removeprefix(SETTING): values for name, values in numbers.items() if name.startswith(SETTING)}
    places = [(number, place) for number, info in enumerate(log.optimizers) for place in range(len(info.groups))]
    starts = np.searchsorted(numbers["step"], np.arange(1, store.steps + 2))
    traces = []
    for step in range(1, store.steps + 1):
        lines = {
            (int(numbers["optimizer"][line]), int(numbers["group"][line])): line
            for line in range(starts[step - 1], starts[step])
        }
        stepped = {number: numbers["gradient"][line] for (number, _), line in lines.items()}
        groups = tuple(
            {name: float(v[lines[key]]) for name, v in settings.items() if not np.isnan(v[lines[key]])}
            if key in lines
            else {}
            for key in places
        )
        traces.append(
            StepTrace(
                tuple(replace(one_pass, generator=generators.get(one_pass.first)) for one_pass in passes[step - 1]),
                groups,
                gradient_norm=math.hypot(*(norm for norm in stepped.values() if norm != NO_GRADIENT)),
                optimizers=tuple(stepped),
                modes=_modes_at(log, step),
                has_zero_gradients=not passes[step - 1] and set(stepped.values()) == {0.0},
            )
        )
    return traces


def _modes_at(log: RunLog, step: int) -> Modes:
    earlier = [modes for modes in log.modes if modes.step <= step]
    return earlier[-1] if earlier else EVERYTHING_TRAINS


EVERYTHING_TRAINS = Modes(0, (), ())


def _traces_without_log(store: Store, index: str) -> list[StepTrace]:
    names = ordered_names(store)
    passes = _passes(store, index)
    own = {name: store.schedule(name) for name in names}
    # a parameter of the rest has no line of its own: what its optimiser did to others holds for it too
    lines = {name: steps if len(steps.steps) else _of_same_rule(store, name, own) for name, steps in own.items()}
    if not any(len(steps.steps) for steps in lines.values()):
        raise QueryError(
            f"the memory at {store.path} does not hold the settings of the optimiser at each step (only a ledger was "
            "kept), so it cannot be run again. Record with keep='slots' or 'keys', at least for one layer."
        )
    traces = []
    for step in range(1, store.steps + 1):
        places = {name: lines[name].find(step) for name in names}
        settings = tuple({} if place is None else lines[name].settings_at(place) for name, place in places.items())
        scales = [lines[name].scale[place] for name, place in places.items() if place is not None]
        scale = float(np.median(scales)) if scales and passes[step - 1] else 1.0
        traces.append(StepTrace(passes[step - 1], settings, scale=scale, has_zero_gradients=not passes[step - 1]))
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


def parameters_with_guessed_settings(store: Store) -> list[str]:
    """The parameters whose settings at each step are those of another one with the same rule, as nothing else is known.

    Without a log of the run a memory holds the settings of those parameters that slots explain.
    """
    if store.manifest.run_log is not None:
        return []
    return [name for name in ordered_names(store) if not len(store.schedule(name).steps)]


def _of_same_rule(store: Store, name: str, lines: Mapping[str, ParameterSteps]) -> ParameterSteps:
    rule = store.parameters[name].rule
    for other, steps in lines.items():
        if store.parameters[other].rule == rule and len(steps.steps):
            return steps
    return lines[name]


# ----------------------------------------------------------------------------------------------- optimisers


def rebuild_optimizers(store: Store, model: nn.Module, make: MakeOptimizer | None = None) -> list[optim.Optimizer]:
    """The optimisers of a recorded run on the parameters of a copy of the model.

    ``make`` builds an optimiser that a taught rule explains; those of torch are known by their names. Without a log of
    the run each parameter is a group of its own.
    """
    parameters, log = dict(model.named_parameters()), store.manifest.run_log
    if log is not None:
        optimizers = []
        for info in log.optimizers:
            kind = make or _class_at(info.kind)
            if kind is None:
                raise UnsupportedOptimizer(_unknown_optimizer(store, info.kind))
            groups = [[parameters[name] for name in names] for names in info.groups]
            optimizers.append(kind(groups[0] if len(groups) == 1 else [{"params": group} for group in groups]))
        return optimizers
    classes: dict[str, Any] = {rule.name: kind for kind, rule in RULES.items()}
    optimizers, names = [], ordered_names(store)
    for rule in dict.fromkeys(store.parameters[name].rule for name in names):
        assert rule is not None
        kind = make or classes.get(rule)
        if kind is None:
            raise UnsupportedOptimizer(_unknown_optimizer(store, rule))
        own = [parameters[name] for name in names if store.parameters[name].rule == rule]
        optimizer = kind(own)
        (group,) = optimizer.param_groups
        optimizer.param_groups[:] = [{**group, "params": [parameter]} for parameter in own]
        optimizers.append(optimizer)
    return optimizers


def taught_rules(store: Store, optimizers: Sequence[optim.Optimizer], model: nn.Module) -> dict[type, Rule]:
    """The rules with which the memory was recorded, for optimisers that the library has none for."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taught: dict[type, Rule] = {}
    for optimizer in optimizers:
        kind, held = type(optimizer), [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        rules = [store.rule(name) for name in held if name in store.parameters]
        if kind not in RULES and path_of(kind) not in OTHERS and rules and rules[0] is not None:
            taught[kind] = rules[0]
    return taught


def _class_at(path: str) -> Any:
    """The class of an optimiser that the library has a rule for; nothing else is imported."""
    for kind in RULES:
        if path_of(kind) == path:
            return kind
    if path in OTHERS:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)
    return None


def _unknown_optimizer(store: Store, name: str) -> str:
    return (
        f"the memory at {store.path} was recorded with the optimiser '{name}', and nothing says which class that is. "
        "Pass it: memory.replay(…, optimizer=lambda parameters: MyOptimizer(parameters, …))."
    )


def ordered_names(store: Store) -> list[str]:
    """The parameters that optimisers hold, in the order of the groups of rebuilt optimisers: rule by rule."""
    rules = {parameter.name: parameter.rule for parameter in store.manifest.parameters if parameter.rule is not None}
    return [name for rule in dict.fromkeys(rules.values()) for name, its_rule in rules.items() if its_rule == rule]


# --------------------------------------------------------------------------------------------------- states


def load_first_weights(store: Store, model: nn.Module) -> None:
    """Put a copy of the model where the recorded training began."""
    if not has_state(store, 0) and store.manifest.shards and any(map(store.initial_states, _explained(store))):
        raise QueryError(
            f"the memory at {store.path} begins with state in its optimiser (a loaded momentum), and was not recorded "
            "to be run again from there. Record with replay=True."
        )
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in store.parameters and name not in store.manifest.frozen:
                tensor.copy_(store.initial(name))


def kept_steps(store: Store) -> list[int]:
    """The steps after which whole states were kept."""
    log = store.manifest.run_log
    return [] if log is None else [state.step for state in log.states]


def has_state(store: Store, step: int) -> bool:
    """Whether the whole state after a step was kept."""
    return step in kept_steps(store)


def difference(store: Store, model: nn.Module, step: int) -> Difference | None:
    """What of a model is not, bit for bit, as it was recorded after a step, as far as the memory can tell."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if store.manifest.run_log is None:
        return _difference_of_samples(store, tensors, step)
    names = {name for info in store.manifest.run_log.optimizers for group in info.groups for name in group}
    trained = [tensors[p.name].detach() for p in store.manifest.parameters if p.name in names]
    log = store.run_log
    line = int(np.searchsorted(log["step"].to_numpy(), step, "right")) - 1  # after all optimisers of the step
    if has_state(store, step):
        kept = {name: tensor for name, tensor in store.state(step).items() if name in tensors}
        return _difference_of(step, {name: (tensors[name].detach(), tensor) for name, tensor in kept.items()})
    if log["weights_checksum"][line].as_py() != WeightsChecksum(trained).after(step):
        return Difference(step)
    ended = {name: store.kept_at(name, step) for name in names} if step == store.steps else {}
    pairs = {name: (tensors[name].detach(), last) for name, last in ended.items() if last is not None}
    return _difference_of(step, pairs)


def _difference_of_samples(store: Store, tensors: Mapping[str, Tensor], step: int) -> Difference | None:
    pairs = {}
    for name in _explained(store):
        stored, tensor = store.sample(name, step), tensors[name].detach()
        if stored is not None and stored[0] != entry_sample([tensor]):
            places = sampled_entries(tensor).index
            recorded = torch.frombuffer(bytearray(stored[0]), dtype=tensor.dtype)
            pairs[name] = tensor.reshape(-1)[places], recorded
    return _difference_of(step, pairs)


def _difference_of(step: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> Difference | None:
    distances = {
        name: float((now.double() - recorded.double()).abs().max())
        for name, (now, recorded) in pairs.items()
        if not torch.equal(now, recorded)
    }
    if not distances:
        return None
    return Difference(step, tuple(sorted(distances, key=lambda name: -distances[name])), max(distances.values()))


def _explained(store: Store) -> list[str]:
    return [parameter.name for parameter in store.manifest.parameters if parameter.by_slots]
