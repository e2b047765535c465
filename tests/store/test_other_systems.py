"""Recording and asking work without POSIX, on systems that lock open files, and on terminals without UTF-8."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import pytest
import windows_rules
from helpers import batches, mlp, sgd, trained

import dualform
from dualform.errors import WriteError
from dualform.store import load_manifest, rank_folder
from dualform.store.io import atomic_file, direct_io

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists the files that a process has mapped")
def test_without_posix_the_memory_is_the_same_bit_for_bit(tmp_path, monkeypatch):
    """Import, record, ask, write over, resume and ledger, under the rules of Windows."""
    for folder in ("windows", "posix"):
        (tmp_path / folder).mkdir()
    command = [sys.executable, "-W", "error::DeprecationWarning", windows_rules.__file__, str(tmp_path / "windows")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    answers = json.loads(process.stdout)
    monkeypatch.setattr(direct_io, "DIRECT_FROM", windows_rules.DIRECT_FROM)
    expected = json.loads(json.dumps(windows_rules.run(tmp_path / "posix")))
    refusal = answers.pop("refused")
    assert "shards" in refusal and "del memory" in refusal, "a memory that is open is not written over on Windows"
    assert expected.pop("refused") == "", "a memory that is open may be written over on POSIX"
    assert answers == expected


class SharingViolation(PermissionError):
    """How Windows refuses to replace a file that somebody reads."""

    winerror = 32


def test_a_manifest_that_somebody_reads_is_replaced_as_soon_as_it_is_closed(tmp_path, monkeypatch):
    replace, refusals = os.replace, [SharingViolation(13, "in use")] * 3

    def replace_when_closed(source, target):
        if refusals:
            raise refusals.pop()
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_when_closed)
    atomic_file.write_bytes(tmp_path / "manifest.json", b"{}\n")
    assert (tmp_path / "manifest.json").read_bytes() == b"{}\n" and not refusals


def test_a_file_that_stays_open_is_an_error_that_names_the_cause(tmp_path, monkeypatch):
    def refuse(source, target):
        raise SharingViolation(13, "in use")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(atomic_file, "RETRIES", (0.0,))
    with pytest.raises(WriteError, match="open here or in another program"):
        atomic_file.write_bytes(tmp_path / "manifest.json", b"{}")
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_syncs_no_folders_can_be_written_to(tmp_path, monkeypatch):
    def only_files(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}") or os.path.isdir(f"/dev/fd/{handle}"):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", only_files)
    atomic_file.write_bytes(tmp_path / "manifest.json", b"{}")
    assert (tmp_path / "manifest.json").read_bytes() == b"{}"


@pytest.mark.parametrize("keep", ["slots", "ledger"])
def test_names_in_the_manifest_have_forward_slashes_on_every_system(keep, tmp_path):
    model = mlp(5, 4, 3)
    options: dict[str, Any] = {} if keep == "slots" else {"keep": "ledger", "by": "label"}
    trained(tmp_path, model, sgd(model), batches(2, 3, 5, 3), **options)
    manifest = load_manifest(tmp_path)
    names = [*manifest.files, *(entry.name for entry in manifest.ledgers)]
    assert names and all("\\" not in name and PurePosixPath(name).parts[0] in os.listdir(tmp_path) for name in names)
    assert dualform.open(tmp_path).step == 2


def test_the_folder_of_a_process_is_found_under_a_path_of_windows():
    folder = rank_folder(PureWindowsPath("C:/runs/memory"), 3)  # type: ignore[arg-type] # a pure path is enough here
    assert folder == PureWindowsPath("C:/runs/memory/ranks/0003")
