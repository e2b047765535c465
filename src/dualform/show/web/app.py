"""The pages and their addresses. Every page is there as ``.json`` too."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlencode

import torch

from dualform.errors import DualformError, QueryError, require
from dualform.svm.expansion import By
from dualform.types import Order, Score

from ..examples import read_picture
from ..inputs import as_inputs
from ..views import (
    BATCH,
    ORDERS,
    ROWS,
    SETS,
    AttentionQuestion,
    Correctness,
    ExamplePlace,
    Explorer,
    HitUnit,
    PendingWork,
    PredictionQuestion,
    SeparationQuestion,
    TrainingSetQuestion,
    WhatIfMasks,
    as_plain,
    attention,
    attention_layers,
    ledger_of,
    ledger_of_time,
    predict,
    render,
    run,
    seen,
    separation,
    style,
    suspects_csv,
    training_set,
    what_if,
)
from .fields import AddressFields, whole
from .guard import LOOPBACK, Guard

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HERE = Path(__file__).parent
PLACE = "dualform-place"
MANY_ROWS, MOST_TEXT = 5000, 200_000
"""Examples among which the next mistake is looked for, and bytes of a text that somebody types."""

log = logging.getLogger("dualform")


class Pages:
    """Answers requests with the views of an explorer."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self._turn = asyncio.Semaphore(1)
        self.responses: Any = require("starlette.responses", "web")

    # ------------------------------------------------------------------------------------------- views

    def home(self, request: "Request") -> "Response":
        """To the first example, or to the run where there is none."""
        first = next((name for name in SETS if self.explorer.count(name)), None)
        return self.responses.RedirectResponse(f"/prediction/{first}/0" if first else "/run", 303)

    def prediction(self, request: "Request") -> "Response":
        """What a prediction is made of."""
        place, fields = self._place(request), AddressFields(request)
        question = PredictionQuestion(
            layer=fields.text("layer"), score=fields.one_of("score", get_args(Score)),
            order=fields.one_of("order", get_args(Order)) or "largest",
            target=None if fields.text("target") == "rather" else fields.number("target"),
            rather=fields.text("target") == "rather", k=fields.number("k", 12), step=fields.number("step"),
            by=fields.text("by"), each=fields.one_of("each", get_args(HitUnit)),
        )  # fmt: skip
        view = predict(self.explorer, place, question)
        return self._page(request, "prediction.html", "Prediction", view, orders=ORDERS)

    def what_if(self, request: "Request") -> "Response":
        """What it would be without some training."""
        place, fields = self._place(request), AddressFields(request)
        masks = WhatIfMasks(
            by=fields.text("by"), groups=tuple(dict.fromkeys(fields.all("group"))), after=fields.number("after"),
            upto=fields.number("upto"), examples=tuple(dict.fromkeys(fields.numbers("example"))),
            filter=(fields.text("filter") or "").strip(),
        )  # fmt: skip
        return self._page(request, "what-if.html", "What if", what_if(self.explorer, place, masks))

    def training(self, request: "Request") -> "Response":
        """Which training examples matter."""
        view = training_set(self.explorer, self._choice(request))
        return self._page(
            request, "training.html", "Training set", view, query=urlencode(request.query_params.multi_items())
        )

    def suspects(self, request: "Request") -> "Response":
        """All training examples as a table."""
        found = suspects_csv(self.explorer, self._choice(request))
        if isinstance(found, PendingWork):
            return self._page(request, "waiting.html", "Training set", found)
        headers = {"content-disposition": 'attachment; filename="suspects.csv"'}
        return self.responses.Response(found, media_type="text/csv; charset=utf-8", headers=headers)

    def attention(self, request: "Request") -> "Response":
        """Where attention looks."""
        place, fields = self._place(request), AddressFields(request)
        looking = AttentionQuestion(
            layer=fields.text("layer"), head=fields.number("head"),
            token="all" if fields.text("token") == "all" else fields.number("token"), recalled=fields.text("recalled"),
            by=fields.one_of("by", get_args(By)) or "adds", call=fields.number("call"),
        )  # fmt: skip
        return self._page(request, "attention.html", "Attention", attention(self.explorer, place, looking))

    def heads(self, request: "Request") -> "Response":
        """What attention heads separate."""
        fields = AddressFields(request)
        asking = SeparationQuestion(
            fields.text("layer"), fields.number("head", 0), fields.number("rows", ROWS), fields.number("above", 0)
        )
        return self._page(request, "separation.html", "Heads", separation(self.explorer, asking))

    def run(self, request: "Request") -> "Response":
        """What is known of the recording."""
        return self._page(request, "run.html", "Run", run(self.explorer))

    def wrong(self, request: "Request") -> "Response":
        """To the next example that the network gets wrong."""
        place = self._place(request)
        found = next_mistake(self.explorer, place)
        if found is None:
            raise QueryError(f"the network gets none of the next {MANY_ROWS:,} examples after {place.row} wrong.")
        return self.responses.RedirectResponse(f"/prediction/{found.set}/{found.row}", 303)

    def example(self, request: "Request") -> "Response":
        """One training example."""
        text = request.path_params["index"].removesuffix(".json")
        if not whole(text) or text.startswith("-"):
            raise QueryError(f"there is no training example {text[:20]!r}: they have numbers.")
        return self._page(request, "example.html", "Training set", seen(self.explorer, int(text)))

    # ------------------------------------------------------------------------------------------- what is sent

    async def picture(self, request: "Request") -> "Response":
        """Take a picture that somebody brought: its bytes are the body of the request."""
        body = await request.body()
        return await self._in_turn(lambda: self._take_picture(body, AddressFields(request)))

    async def text(self, request: "Request") -> "Response":
        """Take a text, or numbers, that somebody typed."""
        body = await request.body()
        return await self._in_turn(lambda: self._take_text(body))

    async def _in_turn(self, work: Callable[[], "Response"]) -> "Response":
        """Look at what was sent beside the other pages, one thing at a time."""
        async with self._turn:
            return await require("starlette.concurrency", "web").run_in_threadpool(work)

    def _take_picture(self, body: bytes, fields: "AddressFields") -> "Response":
        like = self.explorer.test or self.explorer.train
        if like is None or like.kind != "image":
            raise QueryError("this network takes no pictures.")
        invert = {"yes": True, "no": False}.get(fields.text("invert") or "")
        pixels = read_picture(body, like.grid, like.channels, invert)
        name = (fields.text("name") or "picture")[:60]
        return self._brought(self.explorer.bring(name, like.from_pixels(pixels)))

    def _take_text(self, body: bytes) -> "Response":
        like = self.explorer.test or self.explorer.train
        if len(body) > MOST_TEXT:
            raise QueryError(f"at most {MOST_TEXT:,} bytes of text are taken.")
        if like is None or like.kind == "image":
            raise QueryError("this network takes pictures, not text.")
        text = body.decode("utf-8", errors="replace").strip()
        if like.kind == "text":
            ids = like.vocabulary.encode(text) if like.vocabulary is not None else _numbers(text, int)
            if not ids:
                raise QueryError("write something first.")
            if known := [number for number in ids if not 0 <= number < 2**31]:
                raise QueryError(f"{known[0]} is no token.")
            x = torch.tensor(_fitted(ids, like.shape, like.is_stream))
        elif like.kind == "series":
            values, width = _numbers(text, float), like.shape[1]
            if not values or len(values) % width:
                raise QueryError(f"a series has {width} numbers a step, so {len(values)} are no whole steps.")
            x = torch.tensor(values).reshape(-1, width)
        else:
            values = _numbers(text, float)
            size = math.prod(like.shape)
            if len(values) != size:
                raise QueryError(f"the network takes {size} numbers, not {len(values)}.")
            x = torch.tensor(values).reshape(like.shape)
        self._try(x)
        return self._brought(self.explorer.bring(text[:40], x))

    def _try(self, x: torch.Tensor) -> None:
        """See that the network can take an input before it is kept."""
        try:
            self.explorer.spot(self.explorer.memory, as_inputs(x.unsqueeze(0), self.explorer.model))
        except (IndexError, RuntimeError, TypeError) as error:
            raise QueryError(f"the network cannot take this: {str(error).splitlines()[0]}") from error

    def start(self, request: "Request") -> "Response":
        """Begin something that takes a while."""
        found = self.explorer.desk.start(request.path_params["name"])
        return self._state(found)

    def state(self, request: "Request") -> "Response":
        """How far something is."""
        return self._state(self.explorer.desk.state(request.path_params["name"]))

    # ------------------------------------------------------------------------------------------- inside

    def _page(self, request: "Request", template: str, tab: str, view: Any, **more: Any) -> "Response":
        """A view as a page, or as JSON where the address ends so."""
        path, query = request.url.path, request.url.query
        if path.endswith(".json"):
            return self.responses.JSONResponse(as_plain(view))
        if isinstance(view, PendingWork):
            template = "waiting.html"
        place = getattr(view, "place", None)
        back = f"{place.set}/{place.row}" if place is not None else self._back(request)
        base = path.rsplit("/", 1)[0]
        like = self.explorer.test or self.explorer.train
        keep = request.query_params.multi_items()

        def here(name: str, row: int) -> str:
            root = "/" + path.split("/")[1]
            return f"{root}/{name}/{row}" + (f"?{urlencode(keep)}" if keep else "")

        def address_with(**fields: Any) -> str:
            every = {**dict(request.query_params), **{name: str(value) for name, value in fields.items()}}
            return f"{path}?{urlencode(every)}"

        values = {
            "view": view, "explorer": self.explorer, "tab": tab, "tabs": self._tabs(back), "path": here, "base": base,
            "address": f"{path}?{query}" if query else path, "address_with": address_with, "back": back,
            "json_address": f"{path}.json" + (f"?{query}" if query else ""),
            "sets": [name for name in SETS if self.explorer.count(name)],
            "kind": like.kind if like is not None else "none",
            "channels": like.channels if like is not None and like.kind == "image" else 0,
            "numbers": 0 if like is None else like.shape[1] if like.kind == "series" else math.prod(like.shape),
        }  # fmt: skip
        response = self.responses.HTMLResponse(render(template, **values, **more))
        if back:
            response.set_cookie(PLACE, back, samesite="strict", httponly=True)
        return response

    def _tabs(self, back: str) -> list[tuple[str, str]]:
        tabs = [("Prediction", f"/prediction/{back}"), ("What if", f"/what-if/{back}")] if back else []
        if self.explorer.test is not None:
            tabs.append(("Training set", "/training"))
        if back and attention_layers(self.explorer.model):
            tabs += [("Attention", f"/attention/{back}"), ("Heads", "/heads")]
        return [*tabs, ("Run", "/run")]

    def problem(self, request: "Request", error: Exception) -> "Response":
        """Something that cannot be done, in a sentence."""
        known = isinstance(error, DualformError)
        if not known:
            log.error("%r failed", request.url.path, exc_info=error)
        message = str(error) if known else "This should not have happened. The terminal of the explorer says more."
        if request.url.path.endswith(".json") or request.method == "POST":
            return self.responses.JSONResponse({"error": message}, 400 if known else 500)
        return self._sorry(
            request, "This cannot be asked" if known else "Something broke", message, 400 if known else 500
        )

    def missing(self, request: "Request", error: Exception) -> "Response":
        """No such page."""
        status = getattr(error, "status_code", 404)
        return self._sorry(request, "Nothing here", "There is no page at this address.", status)

    def _sorry(self, request: "Request", heading: str, message: str, status: int) -> "Response":
        back = self._back(request)
        values = {"explorer": self.explorer, "tab": "", "tabs": self._tabs(back), "back": back, "address": ""}
        page = render("error.html", heading=heading, message=message, json_address="", **values)
        return self.responses.HTMLResponse(page, status)

    def _back(self, request: "Request") -> str:
        """The example that was looked at last, or the first one."""
        name, _, row = request.cookies.get(PLACE, "").partition("/")
        if name in SETS and whole(row) and 0 <= int(row) < self.explorer.count(name):
            return f"{name}/{row}"
        first = next((name for name in SETS if self.explorer.count(name)), None)
        return f"{first}/0" if first else ""

    def _place(self, request: "Request") -> ExamplePlace:
        row = request.path_params["row"].removesuffix(".json")
        name = request.path_params["set"]
        if name not in SETS or not whole(row) or row.startswith("-"):
            raise QueryError(f"there is no example {name[:20]}/{row[:20]}.")
        place = ExamplePlace(name, int(row))
        self.explorer.need(place)
        return place

    def _choice(self, request: "Request") -> TrainingSetQuestion:
        fields = AddressFields(request)
        which = fields.one_of("which", get_args(Correctness)) or "all"
        return TrainingSetQuestion(fields.text("layer"), which, fields.number("rows", 200))

    def _brought(self, place: ExamplePlace) -> "Response":
        return self.responses.JSONResponse({"address": f"/prediction/{place.set}/{place.row}"})

    def _state(self, found: PendingWork | None) -> "Response":
        if found is None:
            return self.responses.JSONResponse({"state": "done", "share": 1.0}, 200)
        return self.responses.JSONResponse({**as_plain(found), "left": found.left, "begun": None})


def make_app(explorer: Explorer, hosts: Sequence[str] = LOOPBACK, token: str | None = None) -> Guard:
    """The whole application, guarded."""
    routing, applications = require("starlette.routing", "web"), require("starlette.applications", "web")
    responses, exceptions = require("starlette.responses", "web"), require("starlette.exceptions", "web")
    pages, route = Pages(explorer), routing.Route

    def static(text: str, kind: str) -> Callable[["Request"], Awaitable["Response"]]:
        async def answer(request: "Request") -> "Response":
            return responses.Response(text, media_type=kind)

        return answer

    both = ("", ".json")
    routes = [
        route("/", pages.home),
        route("/prediction/{set}/{row}", pages.prediction),
        route("/wrong/{set}/{row}", pages.wrong),
        route("/what-if/{set}/{row}", pages.what_if),
        *(route(f"/training{end}", pages.training) for end in both),
        route("/training/suspects.csv", pages.suspects),
        route("/attention/{set}/{row}", pages.attention),
        *(route(f"/heads{end}", pages.heads) for end in both),
        *(route(f"/run{end}", pages.run) for end in both),
        route("/example/{index}", pages.example),
        route("/own/picture", pages.picture, methods=["POST"]),
        route("/own/text", pages.text, methods=["POST"]),
        route("/work/{name}.json", pages.state),
        route("/work/{name}", pages.start, methods=["POST"]),
        route("/static/style.css", static(style(), "text/css; charset=utf-8")),
        route("/static/explorer.js", static((HERE / "explorer.js").read_text(encoding="utf-8"), "text/javascript")),
        route("/static/icon.svg", static((HERE / "icon.svg").read_text(encoding="utf-8"), "image/svg+xml")),
    ]
    handlers = {exceptions.HTTPException: pages.missing, DualformError: pages.problem, Exception: pages.problem}
    return Guard(applications.Starlette(routes=routes, exception_handlers=handlers), tuple(hosts), token)


def warm_up(explorer: Explorer) -> None:
    """Ask once, so that the first visitor need not wait, and begin the ledgers that masks go through."""
    first = next((name for name in ("test", "train") if explorer.count(name)), None)
    for layer in reversed(explorer.layers):
        if first is not None and not explorer.is_swept(layer):
            predict(explorer, ExamplePlace(first, 0), PredictionQuestion(layer))
    for book in (ledger_of(explorer, explorer.columns[0]), ledger_of_time(explorer)):
        if isinstance(book, PendingWork):
            explorer.desk.start(book.name)


def next_mistake(explorer: Explorer, place: ExamplePlace) -> ExamplePlace | None:
    """The next example after a place that the network gets wrong."""
    examples = explorer.examples(place.set)
    if examples is None or examples.labels is None:
        raise QueryError(f"the examples of '{place.set}' have no labels, so it is not known which answers are wrong.")
    rows = range(place.row + examples.stride, len(examples), examples.stride)[:MANY_ROWS]
    for begin in range(0, len(rows), BATCH):
        some = rows[begin : begin + BATCH]
        for row, answer in zip(some, explorer.logits(place.set, some).argmax(1).tolist(), strict=True):
            if examples.label(row) not in (None, answer):
                return ExamplePlace(place.set, row)
    return None


def _numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise QueryError(f"these are not all numbers: {text[:60]!r}.") from error


def _fitted(ids: list[int], shape: tuple[int, ...], free: bool) -> list[int]:
    """Tokens in the length that the network takes: a long text loses its beginning."""
    length = shape[0]
    if len(ids) >= length or free:
        return ids[-length:]
    return ids
