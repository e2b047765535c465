"""The explorer in a notebook: its server, who may frame it, and how it ends."""

import http.client
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import torch
from torch.utils.data import TensorDataset

import dualform
from dualform.errors import QueryError
from dualform.models import MLP
from dualform.show.notebook import NotebookExplorer

pytest.importorskip("uvicorn", reason="the extra web is not installed")


@pytest.fixture
def opened(recorded) -> Iterator[NotebookExplorer]:
    with dualform.explore(recorded.memory, recorded.model, (recorded.x, recorded.labels)) as explorer:
        yield explorer


def get(address: str, **headers: str) -> tuple[int, dict[str, str], str]:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0, timeout=30)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    answer = response.status, {k.lower(): v for k, v in response.getheaders()}, response.read().decode()
    connection.close()
    return answer


def test_outside_of_a_notebook_the_address_is_printed(opened, capsys, recorded):
    with dualform.explore(recorded.memory, recorded.model) as explorer:
        assert explorer.address in capsys.readouterr().out
        assert explorer.address in repr(explorer) and "token=" in explorer.address
    assert str(explorer) == "The explorer is closed." and "<iframe" not in explorer._repr_html_()


def test_a_page_wants_the_token_and_a_frame_gets_a_cookie_for_its_site_alone(opened):
    root = opened.address.partition("?")[0]
    assert get(root)[0] == 401
    status, headers, _ = get(opened.address, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")
    assert status == 303 and all(word in headers["set-cookie"] for word in ("HttpOnly", "Secure", "Partitioned"))
    cookie = headers["set-cookie"].partition(";")[0]
    status, headers, page = get(
        root + "prediction/train/0", Cookie=cookie, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate"
    )
    assert status == 200 and "It says" in page
    assert (
        "x-frame-options" not in headers and "frame-ancestors http://localhost:*" in headers["content-security-policy"]
    )
    assert get(root + "run.json", Cookie=cookie, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")[0] == 403
    assert get(root + "run", Cookie=cookie.replace("=", "=x"))[0] == 401


def test_closing_frees_the_port_and_can_be_repeated(recorded):
    explorer = dualform.explore(recorded.memory, recorded.model)
    port = urlsplit(explorer.address).port or 0
    assert explorer.is_open
    explorer.close()
    explorer.close()
    assert not explorer.is_open and "dualform explorer" not in [thread.name for thread in threading.enumerate()]
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_a_program_that_forgets_to_close_ends(recorded, tmp_path):
    program = (
        "import dualform, torch; from dualform.models import MLP\n"
        f"dualform.explore(dualform.open({str(recorded.path)!r}), MLP(16, 8, 3)); print('end')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0 and result.stdout.endswith("end\n"), result.stderr


def test_the_model_of_the_user_is_not_touched_and_not_needed(recorded):
    own = MLP(16, 8, 3)
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    with dualform.explore(recorded.memory, own, recorded.x) as explorer:
        logits = explorer.explorer.logits("train", [0, 1])
    assert torch.equal(logits, recorded.memory.attend(recorded.model, recorded.x[:2]).prediction)
    assert all(tensor.equal(before[name]) for name, tensor in own.state_dict().items())


@pytest.mark.parametrize("form", ["pair", "tensor", "array", "mapping", "data set"])
def test_examples_come_in_the_forms_that_people_hold(recorded, form):
    x, y = recorded.x, recorded.labels
    data = {
        "pair": (x, y), "tensor": x, "array": x.numpy(), "mapping": {"inputs": x, "labels": y},
        "data set": TensorDataset(x, y),
    }[form]  # fmt: skip
    with dualform.explore(recorded.memory, recorded.model, data, test=data) as explorer:
        train = explorer.explorer.train
        assert train is not None and len(train) == 60 and train.row(7).equal(x[7:8])
        assert [train.label(i) for i in range(60)] == (y.tolist() if form not in ("tensor", "array") else [None] * 60)


@pytest.mark.parametrize("data", [3, {"x": 1}, []])
def test_what_holds_no_examples_is_refused(recorded, data):
    with pytest.raises(QueryError, match="holds no example"):
        dualform.explore(recorded.memory, recorded.model, data)


# ---------------------------------------------------------------- in a browser


@contextmanager
def page_around(frame: str) -> Iterator[int]:
    """A page of another program on this machine, with a frame in it, as a notebook is one."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"<!doctype html><title>notebook</title><body>{frame}".encode()
            self.send_response(200)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    options = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP evil.example 127.0.0.1"]
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=options)
        yield started
        started.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_notebook_of_this_machine_shows_the_explorer_and_its_links_work(browser, opened, host):
    with page_around(opened._repr_html_()) as port:
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        page.goto(f"http://{host}:{port}/")
        frame = page.frame_locator("iframe")
        assert frame.locator(".verdict").inner_text(timeout=20_000).startswith("It says")
        frame.get_by_role("link", name="Run", exact=True).click()
        frame.get_by_text("SGD").first.wait_for(timeout=20_000)
        page.close()


def test_two_explorers_live_side_by_side(browser, opened, recorded):
    with (
        dualform.explore(recorded.memory, recorded.model, recorded.x) as second,
        page_around(opened._repr_html_() + second._repr_html_()) as port,
    ):
        page = browser.new_page(viewport={"width": 1100, "height": 2000})
        page.goto(f"http://localhost:{port}/")
        frames = [page.frame_locator("iframe >> nth=0"), page.frame_locator("iframe >> nth=1")]
        for frame in frames:
            frame.locator(".verdict").wait_for(timeout=20_000)
        for frame in frames:
            frame.get_by_role("link", name="Run", exact=True).click()
            frame.get_by_text("SGD").first.wait_for(timeout=20_000)
        page.close()


def test_another_site_cannot_frame_it(browser, opened):
    with page_around(opened._repr_html_()) as port:
        page = browser.new_page()
        complaints = []
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(f"http://evil.example:{port}/")
        page.wait_for_timeout(1500)
        assert any(re.search("frame-ancestors|Refused to frame|Framing", text) for text in complaints)
        assert not any("verdict" in frame.content() for frame in page.frames if "evil" not in frame.url)
        page.close()
