"""In the folder of a memory only files of dualform are ever removed or overwritten."""

import shutil
from pathlib import Path

import pytest
from helpers import batches, mlp, sgd, trained

import dualform
from dualform.errors import CorruptMemory, DualformError, NotAMemory
from dualform.store import INIT, load_manifest, remove_memory, remove_unlisted, require_own_folder

OURS = ["shards/000000.safetensors", "calls/000012.parquet", "visits/1234567.parquet", "steps/000003.parquet.partial"]
FOREIGN = ["shards/keep.txt", "calls/12.parquet", "snapshots/000001.pt", "steps/000001.csv", "000001.parquet", "a.txt"]


def record(path: Path, **options):
    model = mlp(5, 4, 3)
    trained(path, model, sgd(model), batches(2, 3, 5, 3), **options)


def put(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("weeks of work")


def there(folder: Path, names: list[str]) -> list[str]:
    return [name for name in names if (folder / name).exists()]


def test_removing_a_memory_leaves_the_files_of_others(tmp_path):
    record(tmp_path)
    put(tmp_path, FOREIGN)
    put(tmp_path, OURS)
    remove_memory(tmp_path)
    left = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert left - {".lock"} == set(FOREIGN)


def test_a_file_of_dualform_that_the_manifest_does_not_list_is_removed(tmp_path):
    record(tmp_path)
    put(tmp_path, FOREIGN)
    put(tmp_path, OURS[1:])
    remove_unlisted(tmp_path, load_manifest(tmp_path))
    assert there(tmp_path, FOREIGN) == FOREIGN and not there(tmp_path, OURS[1:])
    assert dualform.open(tmp_path).step == 2


@pytest.mark.parametrize("name", [INIT, *OURS])
@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_with_names_of_dualform_are_not_overwritten(name, overwrite, tmp_path):
    """Somebody may number his own snapshots with six digits, or call his first weights by our name."""
    put(tmp_path, [name])
    with pytest.raises(NotAMemory, match=f"{name}.*another path"):
        record(tmp_path, overwrite=overwrite)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [tmp_path / name]
    assert (tmp_path / name).read_text() == "weeks of work"


def test_foreign_files_with_other_names_are_no_hindrance(tmp_path):
    put(tmp_path, FOREIGN)
    record(tmp_path)
    record(tmp_path, overwrite=True)
    assert dualform.open(tmp_path).step == 2 and there(tmp_path, FOREIGN) == FOREIGN


def test_what_a_kill_left_of_a_memory_is_recognised_by_its_first_file(tmp_path):
    """The manifest is written last and removed first; with the first file it is the other way round."""
    record(tmp_path)
    (tmp_path / "manifest.json").unlink()
    require_own_folder(tmp_path)
    (tmp_path / INIT).unlink()
    with pytest.raises(NotAMemory, match="not a dualform memory"):
        require_own_folder(tmp_path)


def test_a_broken_manifest_of_dualform_may_be_overwritten(tmp_path):
    record(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    shutil.copytree(tmp_path, other := tmp_path.with_name("other"))
    (other / INIT).unlink()
    record(tmp_path, overwrite=True)
    assert dualform.open(tmp_path).step == 2
    with pytest.raises(CorruptMemory):
        record(other, overwrite=True)
    assert (other / "manifest.json").read_text() == "{"


@pytest.mark.parametrize("resume", [None, 0, 3])
def test_a_refused_recording_makes_no_file(resume, tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "app"}')
    with pytest.raises(DualformError):
        record(tmp_path, resume=resume)
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]
