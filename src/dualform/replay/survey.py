"""One pass over the training set of a network that is trained already: slots without steps.

The recorder takes the slots, around a loop of our own whose optimiser leaves the weights where they are. Each batch of
the pass counts as one of its steps.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn, optim

from dualform.errors import QueryError, warn
from dualform.progress import Progress, bar
from dualform.record import record
from dualform.store import SurveyPass, load_manifest, outside_inference_mode, remove_memory
from dualform.types import DType

from .model_copy import copied
from .rerun import Data, Losses

Checkpoint = tuple[Mapping[str, Tensor] | str | os.PathLike, float]
"""The weights of a network (a ``state_dict``, or the file that ``torch.save`` wrote it to) and their learning rate."""

OWN_COLUMNS = ("index", "checkpoint")
WORTH_A_BAR = 1000
ALIKE = 1e-3
"""How far the loss of an example may depend on the batch it is in, relative to its size."""


class WithoutSteps(optim.Optimizer):
    """An optimiser that leaves every weight where it is."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        """Change nothing."""


def take_survey(
    model: nn.Module,
    losses: Losses,
    data: Data,
    path: str | os.PathLike,
    *,
    examples: int | Sequence[int] | Tensor,
    batch_size: int,
    checkpoints: Sequence[Checkpoint] | None,
    columns: Mapping[str, Any] | None,
    dtype: DType,
    layers: Iterable[str] | None,
    overwrite: bool,
    describe: Mapping[str, Any] | None,
    progress: Progress,
) -> None:
    """Write the slots of all examples at each checkpoint to ``path``. The model itself is not touched."""
    index = indices_of(examples)
    batches = torch.arange(len(index)).split(_positive("batch_size", batch_size))
    noted = _columns(columns or {}, len(index))
    passes = [(model.state_dict(), 1.0)] if checkpoints is None else list(checkpoints)
    if not passes:
        raise QueryError("checkpoints=[] holds none; leave it out to survey the model as it is.")
    surveyed = copied(model).eval()
    for parameter in surveyed.parameters():
        parameter.grad = None
    trained = [parameter for parameter in surveyed.parameters() if parameter.requires_grad]
    if not trained:
        raise QueryError("every parameter of this model is frozen (requires_grad=False), so no loss has a gradient.")
    optimizer = WithoutSteps(trained)
    with outside_inference_mode(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        surveyed.load_state_dict(_state_of(passes[0][0]))
        _warn_of_shares(surveyed, losses, data, index)
        tape = record(
            surveyed, optimizer, path, layers=layers, dtype=dtype, rules=None, overwrite=overwrite,
            snapshot_every=len(batches), describe=describe, progress=False,
        )  # fmt: skip
        with _whole_or_removed(Path(path)) as begun, tape, bar(
            "surveying", len(passes) * len(index), progress, WORTH_A_BAR
        ) as watch:  # fmt: skip
            begun.append(True)
            for number, (state, _) in enumerate(passes):
                if number:
                    surveyed.load_state_dict(_state_of(state))
                for batch in batches:
                    tape.note(index=index[batch], checkpoint=number, **{k: v[batch.numpy()] for k, v in noted.items()})
                    example_losses(surveyed, losses, data, index[batch]).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if watch:
                        watch(len(batch))
    survey = tuple(
        SurveyPass(float(rate), number * len(batches) + 1, (number + 1) * len(batches))
        for number, (_, rate) in enumerate(passes)
    )
    replace(load_manifest(Path(path)), survey=survey).save(Path(path))


@contextmanager
def _whole_or_removed(path: Path) -> Iterator[list[bool]]:
    """Remove what was written if the pass is broken off: a part of a survey answers nothing. The list that it gives is
    empty until there is something of ours to remove.
    """
    begun: list[bool] = []
    try:
        yield begun
    except BaseException:
        if begun:
            remove_memory(path)
        raise


def example_losses(model: nn.Module, losses: Losses, data: Data, index: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """The losses of a batch. Raise unless there is one for each example."""
    values = losses(model, data(index))
    if not isinstance(values, Tensor) or values.shape != index.shape:
        gave = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise QueryError(
            f"losses(model, batch) gave {gave} for a batch of {len(index)} examples: a survey needs each example's own "
            "loss, one number an example (reduction='none'; for a language model the sum over its tokens)."
        )
    return values


def _warn_of_shares(model: nn.Module, losses: Losses, data: Data, index: Int[Tensor, " n"]) -> None:
    """Warn if the loss of an example depends on the batch it is in, as its share of a mean does."""
    if len(index) < 2:
        return
    with torch.no_grad():
        state = torch.get_rng_state()
        alone = float(example_losses(model, losses, data, index[:1])[0])
        torch.set_rng_state(state)
        together = float(example_losses(model, losses, data, index[:2])[0])
    if abs(alone - together) > ALIKE * max(abs(alone), abs(together)):
        warn(
            f"the loss of example {int(index[0])} is {alone:.4g} alone and {together:.4g} in a batch of two. A survey "
            "needs each example's own loss, not its share of a mean over the batch (do not divide by the batch size); "
            "scores will depend on the batches."
        )


def indices_of(examples: int | Sequence[int] | Tensor) -> Int[Tensor, " n"]:
    """The indices of the examples: the first so many, or the given ones."""
    if isinstance(examples, int):
        return torch.arange(_positive("examples", examples))
    index = torch.as_tensor(examples)
    if index.ndim != 1 or not len(index) or index.is_floating_point() or len(index.unique()) < len(index):
        raise QueryError(
            "examples must be the number of examples, or the index of each, once: a list of different whole numbers."
        )
    return index.long().cpu()


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise QueryError(f"{name}={value} must be 1 or more.")
    return value


def _columns(columns: Mapping[str, Any], examples: int) -> dict[str, np.ndarray]:
    arrays = {}
    for name, values in columns.items():
        if name in OWN_COLUMNS:
            raise QueryError(f"a survey writes the column {name!r} itself; give yours another name.")
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
        if array.shape != (examples,):
            raise QueryError(
                f"column {name!r} has shape {array.shape}; give one value for each of the {examples} examples, in "
                "their order."
            )
        arrays[name] = array
    return arrays


def _state_of(state: Mapping[str, Tensor] | str | os.PathLike) -> Mapping[str, Tensor]:
    return state if isinstance(state, Mapping) else torch.load(state, map_location="cpu", weights_only=True)
