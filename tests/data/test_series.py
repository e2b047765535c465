"""Time series: how many, how long, of which classes; what is written is read; what cannot be read is said."""

import gzip
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.data import Series, series, standardised
from dualform.errors import DataNotFound

ARCHIVE = {
    "JapaneseVowels": (270, 370, 12, (7, 29), 9),
    "BasicMotions": (40, 40, 6, (100, 100), 4),
    "Handwriting": (150, 850, 3, (152, 152), 26),
    "UWaveGestureLibrary": (120, 320, 3, (315, 315), 8),
    "NATOPS": (180, 180, 24, (51, 51), 6),
    "ArticularyWordRecognition": (275, 300, 9, (144, 144), 25),
}
"""Series for training and for testing, channels, shortest and longest, classes."""

HEADER = "# a set\n@problemName Small\n\n@classLabel true up down\n@data\n"


@pytest.fixture(scope="module", params=ARCHIVE)
def parts(request) -> tuple[str, Series, Series]:
    try:
        return request.param, series(request.param, "train"), series(request.param, "test")
    except DataNotFound as error:
        pytest.skip(str(error))


def ends(part: Series) -> torch.Tensor:
    return (~part.padding).sum(1)


def test_the_sets_are_those_of_the_archive(parts):
    name, train, test = parts
    lengths = torch.cat([ends(train), ends(test)])
    found = len(train.values), len(test.values), train.values.shape[2], (int(lengths.min()), int(lengths.max()))
    assert (*found, len(train.classes)) == ARCHIVE[name]
    assert train.classes == test.classes
    for part in (train, test):
        assert set(part.labels.tolist()) == set(range(len(part.classes)))
        assert part.values.isfinite().all()


def test_padding_is_a_suffix_that_holds_zeros_and_the_longest_has_none(parts):
    for part in parts[1:]:
        assert torch.equal(part.padding, torch.arange(part.padding.shape[1]) >= ends(part).unsqueeze(1))
        assert not part.values[part.padding].any()
        assert ends(part).max() == part.values.shape[1]


def test_a_standardised_training_part_has_mean_0_and_deviation_1_and_both_are_scaled_alike(parts):
    _, train, test = parts
    new, other = standardised(train, test)
    seen = new.values[~new.padding].double()
    torch.testing.assert_close(seen.mean(0), torch.zeros_like(seen[0]), atol=1e-6, rtol=0)  # values are float32
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones_like(seen[0]), atol=1e-6, rtol=0)
    old = train.values[~train.padding].double()
    again = other.values * old.std(0, correction=0) + old.mean(0)
    torch.testing.assert_close(again[~test.padding], test.values[~test.padding].double(), atol=1e-5, rtol=1e-5)
    assert not new.values[new.padding].any() and not other.values[other.padding].any()
    assert torch.equal(other.padding, test.padding) and torch.equal(other.labels, test.labels)


def test_a_channel_that_never_changes_becomes_zero():
    values = torch.tensor([[[0.1, 1.0], [0.1, 3.0]]])
    part = Series(values, torch.zeros(1, 2, dtype=torch.bool), torch.tensor([0]), ("a",))
    assert standardised(part, part)[0].values.tolist() == [[[0, -1], [0, 1]]]


# ---------------------------------------------------------------- small files


def put(folder: Path, part: str, cases: str, header: str = HEADER, packed: bool = False) -> None:
    (folder / "uea").mkdir(exist_ok=True)
    file = folder / "uea" / f"Small_{part}.ts"
    if packed:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress((header + cases).encode()))
    else:
        file.write_text(header + cases, encoding="utf-8")


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("DUALFORM_DATA", str(tmp_path))
    return tmp_path


number = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(data=st.data(), channels=st.integers(1, 3), packed=st.booleans(), end=st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_what_is_written_is_read(data, channels, packed, end, tmp_path_factory):
    case = st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(number, min_size=n, max_size=n), min_size=channels, max_size=channels)
    )
    cases = data.draw(st.lists(st.tuples(case, st.sampled_from(["up", "down"])), min_size=1, max_size=4))
    text = [":".join([*(",".join(map(repr, channel)) for channel in case), label]) + end for case, label in cases]
    folder = tmp_path_factory.mktemp("data")
    put(folder, "TRAIN", "0:up\n")
    put(folder, "TEST", "".join(text), packed=packed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUALFORM_DATA", str(folder))
        found = series("Small", "test")
    assert [found.classes[label] for label in found.labels] == [label for _, label in cases]
    for values, padding, (case, _) in zip(found.values, found.padding, cases, strict=True):
        assert values[~padding].mT.tolist() == case


def test_a_name_that_is_not_there_is_said_with_those_that_are(folder):
    with pytest.raises(DataNotFound, match=r"cannot find uea/Other_TRAIN.ts.gz or .*Put it there.*Available are"):
        series("Other", "train")
    put(folder, "TRAIN", "0:up\n")
    with pytest.raises(DataNotFound, match=r"Available are \[.*'Small'"):
        series("Other", "train")
    with pytest.raises(DataNotFound, match=r"cannot find uea/Small_TEST"):
        series("Small", "test")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("1,2:3,4:left", r"its class 'left' is not among those of the training part, \['up', 'down'\]"),
        ("1,2:3,4", "its class '3,4' is not among"),
        ("1,?:3,4:up", "a value is missing"),
        ("1,nan:3,4:up", "NaN or infinity"),
        ("1,2:3:up", r"different lengths, \[2, 1\]"),
        ("1,2:up", "it has 1 channels, and the first series has 2"),
        ("1,two:3,4:up", "could not convert string to float: 'two'"),
        ("(0,1),(1,2):(0,3),(1,4):up", "could not convert"),
        ("up", "different lengths"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(folder, line, sentence):
    put(folder, "TRAIN", f"1,2:3,4:up\n{line}\n")
    with pytest.raises(DataNotFound, match=rf"cannot read line 7 of .*Small_TRAIN.ts: .*{sentence}"):
        series("Small", "train")


def test_a_file_that_was_cut_off_is_named(folder):
    put(folder, "TRAIN", "0:up\n", packed=True)
    file = folder / "uea" / "Small_TRAIN.ts.gz"
    file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(DataNotFound, match=r"cannot read .*Small_TRAIN.ts.gz: .*ended before.*Get it again"):
        series("Small", "train")


def test_a_file_without_classes_or_without_series_is_refused(folder):
    put(folder, "TRAIN", "1,2:0.5\n", header="@targetLabel true\n@data\n")
    with pytest.raises(DataNotFound, match="names no classes"):
        series("Small", "train")
    put(folder, "TRAIN", "")
    with pytest.raises(DataNotFound, match="holds no series"):
        series("Small", "train")
