"""Pictures: how many, which, in which scale; the splits of the paper's code beside the ordinary ones."""

import io
import tarfile

import numpy as np
import pytest
import torch

from dualform.data import Images, cifar10, fashion_mnist, mnist, reference_images, reference_scale
from dualform.data.reference import KEPT
from dualform.errors import DataNotFound


def at_hand(read, *args, **kwargs) -> Images:
    try:
        return read(*args, **kwargs)
    except DataNotFound as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("read", "mean", "deviation"), [(mnist, 33.275, 78.518), (fashion_mnist, 72.978, 90.076)], ids=["mnist", "fashion"]
)
def test_the_paper_trains_on_40053_images(read, mean, deviation):
    everything, test = at_hand(read, "train"), at_hand(read, "test")
    assert (len(everything.labels), len(test.labels)) == (60_000, 10_000)
    train, valid = read("train", split="reference"), read("valid", split="reference")
    assert (len(train.labels), len(valid.labels)) == (40_053, 2_008)
    assert torch.equal(read("test", split="reference").images, test.images)
    scale = reference_scale(everything)
    assert float(scale.mean) == pytest.approx(mean, abs=5e-4)
    assert float(scale.deviation) == pytest.approx(deviation, abs=5e-4)
    scaled = scale(test.images[:7])
    assert scaled.shape == (7, 28, 28)
    torch.testing.assert_close(scaled * scale.deviation + scale.mean, test.images[:7].float())


@pytest.mark.parametrize("count", [300, KEPT, 60_000])
def test_the_parts_of_the_paper_do_not_overlap(count):
    train, valid = (set(reference_images(count, part).tolist()) for part in ("train", "valid"))
    assert not train & valid
    assert (train | valid) <= set(range(count))
    assert (len(train | valid) == count) == (count <= KEPT)


def test_without_a_reference_split_there_is_no_validation():
    with pytest.raises(DataNotFound, match="no part 'valid'"):
        mnist("valid")


def test_a_part_of_cifar_is_at_hand():
    train, test = at_hand(cifar10, "train", small=True), at_hand(cifar10, "test", small=True)
    assert train.images.shape == (10_000, 32, 32, 3) and test.images.shape == (2_000, 32, 32, 3)
    assert set(train.labels.tolist()) == set(range(10))
    scale = reference_scale(train)
    assert scale(train.images).mean((0, 1, 2)).abs().max() < 1e-3
    assert scale.mean.shape == (3,)


def test_cifar_is_read_from_its_authors_archive(tmp_path, monkeypatch):
    monkeypatch.setenv("DUALFORM_DATA", str(tmp_path))
    random = np.random.default_rng(0)
    rows = {name: random.integers(0, 256, (4, 3073), np.uint8) for name in ("1", "2", "3", "4", "5", "test")}
    (tmp_path / "cifar10").mkdir()
    with tarfile.open(tmp_path / "cifar10" / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for name, some in rows.items():
            own = "test_batch" if name == "test" else f"data_batch_{name}"
            file = tarfile.TarInfo(f"cifar-10-batches-bin/{own}.bin")
            file.size = some.nbytes
            tar.addfile(file, io.BytesIO(some.tobytes()))
    train, test = cifar10("train"), cifar10("test")
    assert train.images.shape == (20, 32, 32, 3) and test.images.shape == (4, 32, 32, 3)
    assert train.labels.tolist() == [int(row[0]) for name in "12345" for row in rows[name]]
    red = torch.from_numpy(rows["test"][2, 1:1025].reshape(32, 32).copy())
    assert torch.equal(test.images[2, :, :, 0], red)


def test_where_only_a_part_of_cifar_is_at_hand_it_is_said(monkeypatch, tmp_path):
    at_hand(cifar10, "test", small=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataNotFound, match="small=True"):
        cifar10("train")
