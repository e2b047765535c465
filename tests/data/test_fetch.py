"""Downloads: whole and with the right checksum, or not at all; begun ones go on. Against a real server."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dualform.data import fetch as fetching
from dualform.data import folder
from dualform.data.fetch import fetch
from dualform.data.folder import data_file, find_file
from dualform.data.sources import PACKAGES, SOURCES, Source
from dualform.errors import DataNotFound

CONTENT = bytes(range(256)) * 1000


class Server(ThreadingHTTPServer):
    """Serves one file; may break off in the middle, know nothing of ranges, or say that there is nothing."""

    stops_after: int | None = None
    ranges = True
    status: int | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server  # type: ignore[assignment]

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        if self.server.status is not None:
            self.send_error(self.server.status)
            return
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.ranges else 0
        body = CONTENT[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.stops_after])

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def source(*addresses: str, content: bytes = CONTENT) -> Source:
    return Source(addresses, len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")


def test_a_file_comes_whole(server, tmp_path):
    file = fetch(source(server.address), tmp_path / "folder" / "file.bin")
    assert file.read_bytes() == CONTENT
    assert [each.name for each in file.parent.glob("[!.]*")] == ["file.bin"]


def test_what_was_begun_goes_on_where_it_stopped(server, tmp_path):
    server.stops_after = 1000
    with pytest.raises(DataNotFound, match=r"ended after 1,000 of 256,000 bytes.*the download resumes"):
        fetch(source(server.address), tmp_path / "file.bin")
    server.stops_after = None
    assert fetch(source(server.address), tmp_path / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-"]


def test_a_server_without_ranges_begins_again(server, tmp_path):
    (tmp_path / "file.bin.partial").write_bytes(CONTENT[:500])
    server.ranges = False
    assert fetch(source(server.address), tmp_path / "file.bin").read_bytes() == CONTENT


def test_what_has_another_checksum_is_thrown_away(server, tmp_path):
    (tmp_path / "file.bin.partial").write_bytes(b"something else")
    with pytest.raises(DataNotFound, match="its sha256 is"):
        fetch(source(server.address), tmp_path / "file.bin")
    assert not list(tmp_path.glob("file.bin*"))
    assert fetch(source(server.address), tmp_path / "file.bin").read_bytes() == CONTENT


def test_the_second_address_is_tried(server, tmp_path):
    gone = "http://127.0.0.1:9/file.bin"
    assert fetch(source(gone, server.address), tmp_path / "file.bin").read_bytes() == CONTENT


def test_all_that_failed_is_named(server, tmp_path):
    server.status = 404
    with pytest.raises(DataNotFound, match=r"127.0.0.1:9/file.bin \(.*refused\); .*\(Not Found\)"):
        fetch(source("http://127.0.0.1:9/file.bin", server.address), tmp_path / "file.bin")


def test_a_folder_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataNotFound, match="cannot write to"):
        fetch(source(server.address), tmp_path / "file" / "file.bin")


def test_a_full_disk_is_named(server, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetching, "_copy", full)
    with pytest.raises(DataNotFound, match=r"No space left on device\. Free some space"):
        fetch(source(server.address), tmp_path / "file.bin")


# ---------------------------------------------------------------- where files are looked for


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """No data but what a test puts there."""
    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    monkeypatch.delenv("DUALFORM_OFFLINE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_named_folder_comes_before_the_cache(empty, monkeypatch):
    for name in ("named", "cache/dualform/data"):
        (empty / name / "set").mkdir(parents=True)
        (empty / name / "set" / "a.txt").write_text(name)
    assert data_file("set/a.txt").read_text() == "cache/dualform/data"
    monkeypatch.setenv("DUALFORM_DATA", str(empty / "named"))
    assert data_file("set/a.txt").read_text() == "named"


def test_a_package_of_the_system_is_found(empty, monkeypatch):
    (empty / "share").mkdir()
    (empty / "share" / "images.gz").write_text("images")
    monkeypatch.setitem(PACKAGES, "set", str(empty / "share"))
    assert data_file("set/images.gz").read_text() == "images"
    assert find_file("set/other.gz") is None


def test_what_is_nowhere_is_downloaded_to_the_cache(empty, monkeypatch, server):
    monkeypatch.setitem(SOURCES, "set/file.bin", source(server.address))
    file = data_file("set/file.xz", "set/file.bin")
    assert file == empty / "cache" / "dualform" / "data" / "set" / "file.bin"
    server.status = 404
    assert data_file("set/file.bin") == file


def test_offline_nothing_is_downloaded(empty, monkeypatch, server):
    monkeypatch.setitem(SOURCES, "set/file.bin", source(server.address))
    monkeypatch.setenv("DUALFORM_OFFLINE", "1")
    with pytest.raises(DataNotFound, match="DUALFORM_OFFLINE is set"):
        data_file("set/file.bin")
    assert not server.asked


def test_it_is_said_where_a_file_was_looked_for_and_why_it_did_not_come(empty, monkeypatch):
    with pytest.raises(DataNotFound, match=r"cannot find set/file.bin in .*Put it there"):
        data_file("set/file.bin")
    monkeypatch.setitem(SOURCES, "set/file.bin", source("http://127.0.0.1:9/file.bin"))
    with pytest.raises(DataNotFound, match=r"Put it there.*Downloading file.bin failed.*Check the network"):
        data_file("set/file.bin")


def test_every_source_has_an_address_a_size_and_a_checksum():
    for name, (addresses, size, checksum) in SOURCES.items():
        assert addresses and size > 0, name
        kind, digits = checksum.split(":")
        assert len(digits) == {"sha256": 64, "md5": 32}[kind], name
    assert folder.cache_folder().parts[-2:] == ("dualform", "data")


@pytest.mark.parametrize("name", SOURCES)
def test_the_files_at_hand_are_those_of_their_sources(name):
    file = find_file(name)
    if file is None or str(file).startswith("/usr/share"):  # Debian strips a date from the heads of its files
        pytest.skip(f"{name} is not at hand")
    kind, expected = SOURCES[name].checksum.split(":")
    assert file.stat().st_size == SOURCES[name].size
    assert hashlib.new(kind, file.read_bytes()).hexdigest() == expected
