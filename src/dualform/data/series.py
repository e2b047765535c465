"""Time series with classes: the data sets of the UEA multivariate archive (Bagnall et al. 2018, arXiv 1811.00075)."""

import gzip
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dualform.errors import DataNotFound

from .folder import data_file, data_folders


class Series(NamedTuple):
    """Time series and their classes."""

    values: Float[Tensor, "n length channels"]
    """Zero after the end of a series."""
    padding: Bool[Tensor, "n length"]
    """True after the end of a series."""
    labels: Int[Tensor, " n"]
    classes: tuple[str, ...]
    """The names of the classes, by label."""


def series(name: str, part: Literal["train", "test"]) -> Series:
    """Read a data set of the archive: ``uea/NAME_TRAIN.ts`` and ``uea/NAME_TEST.ts``, plain or gzipped.

    Shorter series are padded at the end to the length of the longest one of the part. For both parts, classes are in
    the order of the training part's header.
    """
    classes = _classes(_file(name, "train"))
    file = _file(name, part)
    numbers = {class_name: i for i, class_name in enumerate(classes)}
    cases, labels = [], []
    for place, line in _lines(file):
        if line.startswith(("@", "#")):
            continue
        try:
            case, label = _case(line, numbers)
            if len(case) != len(cases[0] if cases else case):
                raise ValueError(f"it has {len(case)} channels, and the first series has {len(cases[0])}")
        except ValueError as error:
            raise DataNotFound(f"cannot read line {place} of {file}: {error}.") from error
        cases.append(case)
        labels.append(label)
    if not cases:
        raise DataNotFound(f"{file} holds no series: its header ends the file. Get it again.")
    lengths = torch.tensor([case.shape[1] for case in cases])
    values = torch.zeros(len(cases), int(lengths.max()), len(cases[0]))
    for row, case in zip(values, cases, strict=True):
        row[: case.shape[1]] = torch.from_numpy(case).mT
    padding = torch.arange(values.shape[1]) >= lengths.unsqueeze(1)
    return Series(values, padding, torch.tensor(labels), classes)


def standardised(train: Series, test: Series) -> tuple[Series, Series]:
    """Scale both parts so that each channel of the training part has mean 0 and deviation 1; padding stays zero."""
    observed = train.values[~train.padding].double()
    mean, deviation = observed.mean(0), observed.std(0, correction=0)
    deviation[deviation == 0] = 1  # a channel that never changes becomes zero

    def scaled(part: Series) -> Series:
        values = ((part.values - mean) / deviation).float().masked_fill(part.padding.unsqueeze(2), 0)
        return part._replace(values=values)

    return scaled(train), scaled(test)


def _file(name: str, part: str) -> Path:
    stem = f"uea/{name}_{part.upper()}.ts"
    try:
        return data_file(f"{stem}.gz", stem)
    except DataNotFound as error:
        files = {file.name for folder in data_folders() for file in (folder / "uea").glob("*_TRAIN.ts*")}
        names = sorted({file.partition("_TRAIN.ts")[0] for file in files})
        raise DataNotFound(
            f"{error} Available are {names or 'no sets'}; all are at https://www.timeseriesclassification.com."
        ) from error


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers. Comments are not always UTF-8, so errors are replaced."""
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8", errors="replace") as text:
            for place, line in enumerate(text, 1):
                if line := line.strip():
                    yield place, line
    except (OSError, EOFError, zlib.error) as error:
        raise DataNotFound(f"cannot read {file}: {error}. Get it again.") from error


def _classes(file: Path) -> tuple[str, ...]:
    for _, line in _lines(file):
        if not line.startswith(("@", "#")):
            break
        first, *words = line.split()
        if first.lower() == "@classlabel" and [word.lower() for word in words[:1]] == ["true"]:
            return tuple(words[1:])
    raise DataNotFound(f"{file} names no classes: there is no '@classLabel true …' in its header. Take another set.")


def _case(line: str, numbers: Mapping[str, int]) -> tuple[Float[np.ndarray, "channels length"], int]:
    """A series and its class, from ``1.5,2.5:3.5,4.5:class``: channels between colons."""
    *channels, label = line.split(":")
    if label.strip() not in numbers:
        raise ValueError(f"its class '{label[:40]}' is not among those of the training part, {list(numbers)}")
    if "?" in line:
        raise ValueError(
            "a value is missing ('?'), and missing values are not filled in. Fill the gaps in the file first"
        )
    values = [channel.split(",") for channel in channels]
    if len({len(channel) for channel in values}) != 1:
        raise ValueError(f"its channels have different lengths, {[len(channel) for channel in values]}")
    case = np.array(values, np.float32)
    if not np.isfinite(case).all():
        raise ValueError("it holds NaN or infinity. Fill the gaps in the file first")
    return case, numbers[label.strip()]
