"""The explorer's pages over a real connection: what they say, and what they refuse."""

import re
import socket
import time
from io import BytesIO
from urllib.parse import quote, urlencode

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Served, serving

from dualform.errors import QueryError
from dualform.show.examples import Examples, png
from dualform.show.views.explorer import ExamplePlace, Explorer
from dualform.show.views.prediction import PredictionQuestion, predict
from dualform.show.views.render import as_plain
from dualform.show.views.what_if import REMOVED
from dualform.show.web.app import warm_up
from dualform.show.web.guard import HEADERS, MOST_BYTES
from dualform.show.web.serve import is_loopback, listen, make_server

pytest.importorskip("uvicorn", reason="the extra web is not installed")


@pytest.fixture
def served(digits_explorer):
    with serving(digits_explorer) as found:
        yield found


PAGES = [
    "/prediction/test/3",
    "/prediction/test/3?layer=fc1&score=abs&order=magnitude&by=index&k=3",
    "/prediction/test/3?step=20&target=4",
    "/prediction/test/3?target=rather&per=visit",
    "/prediction/test/3?step=0",
    "/prediction/train/17",
    "/what-if/test/3",
    "/what-if/test/3?group=1&group=2&example=17&filter=step+%3C+5&after=3&upto=9",
    "/training",
    "/training?rows=30&which=wrong&layer=fc1",
    "/run",
    "/example/17",
]


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_there_as_json_too(served, path):
    page = served.get(path)
    assert page.status == 200 and page.headers["content-type"].startswith("text/html"), page.text
    before, mark, query = path.partition("?")
    plain = served.get(f"{before}.json{mark}{query}")
    assert plain.status == 200 and plain.headers["content-type"] == "application/json" and plain.json


def test_the_json_of_a_page_is_its_view(served):
    found = served.get("/prediction/test/3.json?layer=fc1").json
    assert found == as_plain(predict(served.explorer, ExamplePlace("test", 3), PredictionQuestion("fc1")))


@pytest.mark.parametrize("path", PAGES)
def test_pages_load_nothing_from_elsewhere_and_keep_the_rules(served, path):
    page = served.get(path)
    for name, value in HEADERS.items():
        assert page.headers[name] == value
    addresses = re.findall(r'(?:src|href|action)="([^"]*)"', page.text)
    assert addresses and all(each.startswith(("/", "?", "data:image/png;base64,", "#")) for each in addresses)
    assert "style=" not in page.text and "onclick" not in page.text and "<script>" not in page.text
    assert page.text.count("<img") == len(re.findall(r'<img [^>]*alt="[^"]+"', page.text))
    assert "unsafe" not in page.headers["content-security-policy"]


def test_the_first_page_is_the_first_example(served):
    assert served.get("/").headers["location"] == "/prediction/test/0"
    assert served.get("/static/style.css").status == served.get("/static/explorer.js").status == 200


def test_every_masked_answer_says_what_it_is(served):
    assert REMOVED in served.get("/what-if/test/3?group=1").text
    assert REMOVED in served.get("/what-if/test/3.json?group=1").json["note"]


def test_warming_up_makes_ledgers_ready(digits_explorer):
    warm_up(digits_explorer)
    assert ("ledger", "label") in digits_explorer.work_queue.results and (
        "ledger",
        None,
    ) in digits_explorer.work_queue.results


# ---------------------------------------------------------------- own inputs


def test_a_picture_can_be_asked_about(served):
    examples = served.explorer.test
    answer = served.post("/own/picture?name=mine.png", png(examples.pixels(examples.row(3)[0])))
    assert answer.status == 200 and answer.json["address"] == "/prediction/own/0"
    mine, theirs = served.get("/prediction/own/0.json").json, served.get("/prediction/test/3.json").json
    assert [each["number"] for each in mine["says"]][:2] == [each["number"] for each in theirs["says"]][:2]
    assert mine["says"][0]["logit"] == pytest.approx(theirs["says"][0]["logit"], abs=0.05)
    assert "mine.png" in mine["shown"]["alt"] and served.get("/what-if/own/0?group=1").status == 200


def test_a_text_can_be_asked_about(text_explorer):
    with serving(text_explorer) as served:
        answer = served.post("/own/text", b"which training exam")
        assert answer.status == 200
        found = served.get(f"{answer.json['address']}.json?layer=output&score=abs").json
        assert "".join(found["shown"]["tokens"]) == "which training exam"
        assert served.post("/own/text", "日本".encode()).json["error"].startswith("'日' is not in the vocabulary")
        assert served.post("/own/text", b"  ").status == 400 and served.post("/own/picture", b"x").status == 400


def test_numbers_can_be_asked_about(recorded):
    examples = Examples(recorded.x, recorded.labels)
    explorer = Explorer(recorded.memory, recorded.model, examples, examples)
    with serving(explorer) as served:
        text = ", ".join(str(value) for value in recorded.x[5].flatten().tolist())
        address = served.post("/own/text", text.encode()).json["address"]
        mine, theirs = served.get(f"{address}.json").json["says"], served.get("/prediction/test/5.json").json["says"]
        assert mine[0]["logit"] == pytest.approx(theirs[0]["logit"], abs=1e-4)
        assert "takes 16 numbers, not 2" in served.post("/own/text", b"1, 2").json["error"]
        assert "not everything here is a number" in served.post("/own/text", b"one two").json["error"]


def test_a_series_can_be_asked_about(series_explorer):
    with serving(series_explorer) as served:
        x = series_explorer.input(ExamplePlace("test", 4))["x"][0, : series_explorer.test.unpadded_length(4)]
        text = "\n".join(", ".join(map(str, line)) for line in x.tolist())
        address = served.post("/own/text", text.encode()).json["address"]
        mine, theirs = served.get(f"{address}.json").json["says"], served.get("/prediction/test/4.json").json["says"]
        assert mine[0]["logit"] == pytest.approx(theirs[0]["logit"], abs=1e-4)
        assert "3 numbers per step, and 4" in served.post("/own/text", b"1 2 3 4").json["error"]
        assert "longer than the 16 positions" in served.post("/own/text", b"0 " * 51).json["error"]


def test_attention_has_a_page(attention_explorer):
    with serving(attention_explorer) as served:
        page = served.get("/attention/test/4?head=1&token=2")
        assert page.status == 200 and "/attention/test/0" in served.get("/run").text
        assert len(served.get("/attention/test/4.json?head=1").json["weights"]) == 6


# ---------------------------------------------------------------- hostile visitors

HOSTILE = [
    "/prediction/test/-1", "/prediction/test/500", "/prediction/test/999999999999999999999", "/prediction/test/3x",
    "/prediction/test/%C2%B2", "/prediction/test/3?k=%C2%B2", "/prediction/test/3?k=0", "/prediction/test/3?per=x",
    "/prediction/../../etc/passwd", "/prediction/..%2f..%2fetc/passwd", "/prediction/own/0", "/prediction/secret/0",
    "/prediction/test/3?layer=fc9", "/prediction/test/3?layer=../../x", "/prediction/test/3?score=__class__",
    "/prediction/test/3?k=1e9", "/prediction/test/3?k=301", "/prediction/test/3?step=61", "/prediction/test/3?step=nan",
    "/prediction/test/3?target=10", "/prediction/test/3?by=visits%3B+drop+table", "/prediction/test/3?order=sideways",
    "/what-if/test/3?example=x", "/training?which=some", "/training?layer=x", "/training?rows=many",
    "/training?rows=-1",
    "/training/suspects.csv?rows=-1", "/training/suspects.csv?rows=0", "/example/none", "/example/99999999",
    "/example/%C2%B2", "/example/" + "9" * 5000, "/example/..%2f..%2fmanifest.json",
    "/attention/test/3", "/wrong/own/0",
]  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE)
def test_what_makes_no_sense_is_refused_in_a_sentence(served, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = served.get(path)
    assert answer.status in (400, 404), answer.text
    for inside in ("Traceback", "root:", "is a bug in dualform"):
        assert inside not in answer.text
    assert not list(tmp_path.iterdir())


CONDITIONS = {
    "group=eleven": "no group", "filter=label = 77": "matches none", "filter=nothing = 3": "nothing",
    "filter=1); drop view visits; --": "cannot read", "filter=" + "a" * 501: "longer than",
    "filter=(select count(*) from read_csv('/etc/passwd')) > 0": "subquery",
    "filter=__import__('os').system('touch stolen')": "system",
    "filter=levenshtein(repeat('a',2000000),repeat('b',2000000)) > 0": "levenshtein",
    "filter=length(repeat('x', 3000000000)) > 0": "repeat", "filter=sleep_ms(60000) is null": "sleep_ms",
    "filter=error(current_setting('secret_directory'))": "error", "filter=label = 3) limit (1": "more than one",
    "filter=true)::boolean,false), unnest(range(300)), coalesce((true": "cannot read",
    "after=40&upto=20": "no step lies after", "example=99999": "never trained on",
    "&".join(f"example={i}" for i in range(101)): "at most 100",
}  # fmt: skip


@pytest.mark.parametrize("fields", CONDITIONS)
def test_a_mask_that_makes_no_sense_is_said_beside_the_form_at_once(served, fields, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin = time.perf_counter()
    query = "&".join(f"{name}={quote(value)}" for name, _, value in (f.partition("=") for f in fields.split("&")))
    found = served.get(f"/what-if/test/3.json?{query}")
    problems = " ".join(found.json["problems"].values())
    assert found.status == 200 and CONDITIONS[fields] in problems, found.text
    assert found.json["hidden"] == 0 and found.json["answers"] == []
    assert time.perf_counter() - begin < 10 and not list(tmp_path.iterdir())
    assert served.get(f"/what-if/test/3?{query}").text.count('role="alert"') == 1


FILES = ["/static/../server.py", "/static/%2e%2e/guard.py", "/manifest.json", "/work/x", "/own/picture", "//etc/passwd"]


@pytest.mark.parametrize("path", FILES)
def test_no_file_can_be_read(served, path):
    assert served.get(path).status in (404, 405)


def test_names_are_shown_as_text_and_never_as_markup(served):
    examples = served.explorer.test
    name = "%3Cscript%3Ealert(1)%3C/script%3E%22onload=%22x"
    served.post(f"/own/picture?name={name}", png(examples.pixels(examples.row(3)[0])))
    page = served.get("/prediction/own/0").text
    assert "<script>alert" not in page and '"onload="' not in page and "&lt;script&gt;" in page
    page = served.get("/prediction/test/3?layer=%3Cscript%3Ealert(1)%3C/script%3E").text
    assert "<script>alert" not in page
    page = served.get("/training?rows=20&x=%22%3E%3Cscript%3Ealert(1)%3C/script%3E").text
    assert "<script>alert" not in page


def test_other_sites_cannot_change_anything_or_name_this_machine(served):
    assert served.send("POST", "/own/picture", b"x").status == 403
    assert served.send("PUT", "/own/picture", b"x", X_Dualform="1").status == 403
    assert served.send("DELETE", "/run", None).status == 403
    for host in ("evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "[::2]:80"):
        assert served.get("/run", Host=host).status == 421, host
    for host in (f"localhost:{served.port}", f"127.0.0.1:{served.port}", f"[::1]:{served.port}"):
        assert served.get("/run", Host=host).status == 200, host


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_cannot_make_the_explorer_work(served, site):
    image = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "image"}
    for path in ("/what-if/test/0?filter=label=3", "/run", "/run.json", "/static/explorer.js", "/"):
        assert served.get(path, **image).status == 403
    assert served.get("/", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate").status == 303  # a link may lead here
    assert (
        served.get("/run", Sec_Fetch_Site="same-origin").status
        == served.get("/run", Sec_Fetch_Site="none").status
        == 200
    )


def test_a_picture_that_takes_long_is_refused_and_others_do_not_wait(served):
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    file = BytesIO()
    image.new("L", (64, 64)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    begin = data.index(b"\xff\xda")
    end = data.index(b"\xff", begin + 20)
    bomb = data[:begin] + data[begin:end] * 200 + data[begin:]
    assert "more than 64 scans" in served.post("/own/picture", bomb).json["error"]
    assert served.post("/own/picture", data).status == 200


def test_cookies_of_other_applications_do_no_harm(digits_explorer):
    with serving(digits_explorer, "0.0.0.0", "s3cret") as served:
        for cookie in ("a/b=1; dualform=s3cret", '{"a":1}; dualform=s3cret', 'dualform="s3cret"; x'):
            assert served.get("/run", Cookie=cookie).status == 200, cookie
        assert served.get("/run", Cookie="a/b=1").status == 401
        for place in ("test/\xb2", "own/0", "test/999", "../x", "test/-1"):
            assert served.get("/run", Cookie=f"dualform=s3cret; dualform-place={place}").status == 200, place
        assert served.get("//evil.example/?token=s3cret").headers["location"] == "/evil.example/"
        assert served.get("/%E2%82%AC?token=s3cret").status == 303


def test_what_waits_does_not_pile_up(text_explorer):
    text_explorer.work_queue.patience = 0.0
    with serving(text_explorer) as served:
        for row in range(0, 1600, 20):
            served.get(f"/prediction/test/{row}?layer=rnn&score=abs")
        assert len(text_explorer.work_queue.pending) <= 64


def test_the_next_mistake_is_one_click_away(served):
    row = 0
    for _ in range(3):
        answer = served.get(f"/wrong/test/{row}")
        assert answer.status == 303
        row = int(answer.headers["location"].rsplit("/", 1)[1])
        found = served.get(f"/prediction/test/{row}.json").json
        assert found["says"][0]["number"] != found["label"]
    assert served.get("/wrong/test/499").status == 400


def test_too_much_is_not_taken(served):
    assert served.post("/own/picture", b"\0" * (MOST_BYTES + 1)).status == 413
    assert served.post("/own/picture", b"", Content_Length="9" * 12).status in (400, 413)
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as line:  # no length is said
        line.sendall(
            b"POST /own/picture HTTP/1.1\r\nHost: localhost\r\nX-Dualform: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"100000\r\n" + b"\0" * 0x100000 + b"\r\n"
        try:
            for _ in range(2 * MOST_BYTES // 0x100000):
                line.sendall(chunk)
            line.sendall(b"0\r\n\r\n")
            answer = line.recv(200)
        except OSError:
            answer = b""
    assert b" 200 " not in answer
    assert served.get("/run").status == 200 and not served.explorer.own


def test_own_inputs_are_not_taken_without_end(served):
    examples = served.explorer.test
    picture = png(examples.pixels(examples.row(3)[0]))
    answers = [served.post("/own/picture", picture).status for _ in range(201)]
    assert answers == [200] * 200 + [400]


def test_beyond_this_machine_a_token_is_needed(digits_explorer):
    server, address = make_server(digits_explorer, "0.0.0.0", 0, None)
    server.dualform_socket.close()
    assert re.search(r"\?token=[\w-]{30,}$", address)
    other, again = make_server(digits_explorer, "0.0.0.0", 0, None)
    other.dualform_socket.close()
    assert again.split("token=")[1] != address.split("token=")[1]
    with serving(digits_explorer, "0.0.0.0", "s3cret") as served:
        assert served.get("/run").status == 401
        assert served.get("/run?token=wrong").status == served.get("/run", Cookie="dualform=wrong").status == 401
        assert served.get("/static/style.css").status == served.post("/own/text", b"1").status == 401
        let_in = served.get("/run?token=s3cret&x=1")
        assert let_in.status == 303 and let_in.headers["location"] == "/run?x=1"
        cookie = let_in.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert served.get("/run", Cookie=cookie.split(";")[0]).status == 200
        assert served.get("/run", Authorization="Bearer s3cret").status == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.8.8", True), ("0.0.0.0", False), ("::", False),
     ("192.168.1.4", False), ("localhost.evil.example", False), ("example.org", False)],
)  # fmt: skip
def test_only_loopback_is_this_machine(host, local):
    assert is_loopback(host) == local


def test_a_port_that_is_taken_is_said():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(QueryError, match=r"cannot listen at .* --port"):
            listen("127.0.0.1", other.getsockname()[1])


VIEWS = ["prediction", "what-if", "attention"]
WORDS = st.text(st.characters(codec="utf-8"), max_size=30)


@settings(deadline=None, max_examples=40)
@given(path=st.sampled_from(VIEWS), fields=st.dictionaries(WORDS, WORDS, max_size=4), row=WORDS)
def test_whatever_is_asked_nothing_breaks(fuzzed: Served, path, fields, row):
    answer = fuzzed.get(f"/{path}/test/{quote(row, safe='')}?{urlencode(fields)}")
    assert answer.status in (200, 303, 307, 400, 404)


@pytest.fixture(scope="module")
def fuzzed(recorded):
    examples = Examples(recorded.x, recorded.labels)
    with serving(Explorer(recorded.memory, recorded.model, examples, examples)) as found:
        yield found


def test_a_broken_page_tells_nothing_of_the_inside(digits_explorer, monkeypatch):
    with serving(digits_explorer) as served:
        monkeypatch.setattr(Explorer, "says", lambda *args, **options: 1 / 0)
        answer = served.get("/prediction/test/3")
        assert answer.status == 500 and "is a bug in dualform" in answer.text and "division" not in answer.text
        assert torch.is_tensor(served.explorer.input(ExamplePlace("test", 3)))
