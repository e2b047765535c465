"""The pages and their addresses. Every page is there as ``.json`` too."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlencode

import torch

from dualform.errors import DualformError, QueryError, require
from dualform.svm.expansion import By
from dualform.types import Order, Per, Score

from ..examples import read_picture
from ..inputs import as_inputs
from ..views import (
    BATCH,
    ORDERS,
    ROWS,
    SETS,
    AskedTokens,
    AttentionQuestion,
    CompareQuestion,
    Correctness,
    ExamplePlace,
    Explorer,
    PendingWork,
    PredictionQuestion,
    SeparationQuestion,
    Showing,
    SortOrder,
    Subset,
    TrainingSetQuestion,
    WhatIfMasks,
    as_plain,
    attention,
    attention_layers,
    compare,
    example_map,
    ledger_of,
    ledger_of_time,
    pending_in,
    predict,
    render,
    run,
    selection_csv,
    separation,
    shown_indices,
    style,
    suspects_csv,
    training_example,
    training_examples,
    training_set,
    what_if,
)
from .fields import AddressFields, is_whole_number
from .guard import LOOPBACK, Guard
from .opening import first_question

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HERE = Path(__file__).parent
PLACE = "dualform-place"
MANY_ROWS, MOST_TEXT = 5000, 200_000
"""How many examples are searched for the next mistake, and the most bytes of a typed text."""

log = logging.getLogger("dualform")


class Pages:
    """Answers requests with the views of an explorer."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self._uploads = asyncio.Semaphore(1)
        self.responses: Any = require("starlette.responses", "web")

    # ------------------------------------------------------------------------------------------- pages

    def home(self, request: "Request") -> "Response":
        """Redirect to the first example, or to the run if there are no examples."""
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
            by=fields.text("by"), per=fields.one_of("per", get_args(Per)), after=fields.number("after", 0),
            token=AskedTokens.read(fields.text("token")),
        )  # fmt: skip
        view = predict(self.explorer, place, question)
        return self._page(request, "prediction.html", "Prediction", view, orders=ORDERS)

    def what_if(self, request: "Request") -> "Response":
        """What a prediction would be without some training."""
        place, fields = self._place(request), AddressFields(request)
        masks = WhatIfMasks(
            by=fields.text("by"), groups=tuple(dict.fromkeys(fields.all("group"))), after=fields.number("after"),
            upto=fields.number("upto"), examples=tuple(dict.fromkeys(fields.numbers("example"))),
            filter=(fields.text("filter") or "").strip(), selected=fields.text("selected") == "1",
        )  # fmt: skip
        return self._page(request, "what-if.html", "What if", what_if(self.explorer, place, masks))

    def compare(self, request: "Request") -> "Response":
        """Two steps of training, or two memories, side by side."""
        place, fields = self._place(request), AddressFields(request)
        question = CompareQuestion(
            fields.number("left"), fields.number("right"), fields.text("other"), fields.number("rows", 200)
        )
        return self._page(request, "compare.html", "Compare", compare(self.explorer, place, question))

    def training(self, request: "Request") -> "Response":
        """All training examples, sorted and filtered."""
        view = training_set(self.explorer, self._choice(AddressFields(request)))
        return self._page(request, "training.html", "Training set", view, query=request.url.query)

    def suspects(self, request: "Request") -> "Response":
        """All training examples as CSV."""
        table = suspects_csv(self.explorer, self._choice(AddressFields(request)))
        if isinstance(table, PendingWork):
            return self._page(request, "waiting.html", "Training set", table)
        return self._csv("suspects.csv", table)

    def map(self, request: "Request") -> "Response":
        """A map of training and test examples."""
        view = example_map(self.explorer, AddressFields(request).text("layer"))
        return self._page(request, "map.html", "Training set", view)

    def selected(self, request: "Request") -> "Response":
        """The selected training examples as CSV."""
        return self._csv("selection.csv", selection_csv(self.explorer, self._choice(AddressFields(request))))

    async def select(self, request: "Request") -> "Response":
        """Change the selection; the body is a form: what to do, and with which examples or with those of which page."""
        body = await request.body()
        return await require("starlette.concurrency", "web").run_in_threadpool(lambda: self._select(body))

    def _select(self, body: bytes) -> "Response":
        form = require("starlette.datastructures", "web").QueryParams(body.decode("utf-8", errors="replace"))
        action, chosen = form.get("do"), self.explorer.selected
        if action == "clear":
            chosen.clear()
        elif action == "add-shown":
            chosen.add(shown_indices(self.explorer, self._choice(AddressFields.of_text(form.get("of") or ""))))
        elif action in ("add", "remove"):
            names = {str(name): name for name in training_examples(self.explorer).names}
            indices = form.getlist("index")
            if missing := [index for index in indices if index not in names]:
                raise QueryError(f"there is no training example {missing[0][:20]!r}.")
            (chosen.add if action == "add" else chosen.remove)(names[index] for index in indices)
        else:
            raise QueryError("a selection is changed by do=add, remove, clear or add-shown.")
        return self.responses.JSONResponse({"selected": len(chosen)})

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
        """The facts about the recording."""
        return self._page(request, "run.html", "Run", run(self.explorer))

    def wrong(self, request: "Request") -> "Response":
        """Redirect to the next example that the network gets wrong."""
        place = self._place(request)
        mistake = next_mistake(self.explorer, place)
        if mistake is None:
            raise QueryError(f"there is no mistake among the next {MANY_ROWS:,} examples after {place.row}.")
        return self.responses.RedirectResponse(f"/prediction/{mistake.set}/{mistake.row}", 303)

    def example(self, request: "Request") -> "Response":
        """One training example."""
        text = request.path_params["index"].removesuffix(".json")
        if not is_whole_number(text) or text.startswith("-"):
            raise QueryError(f"there is no training example {text[:20]!r}: use its number.")
        return self._page(request, "example.html", "Training set", training_example(self.explorer, int(text)))

    # ------------------------------------------------------------------------------------------- uploads and work

    async def picture(self, request: "Request") -> "Response":
        """Add an uploaded picture, which is the body of the request."""
        body = await request.body()
        return await self._one_at_a_time(lambda: self._take_picture(body, AddressFields(request)))

    async def text(self, request: "Request") -> "Response":
        """Add a typed text, series or list of numbers."""
        body = await request.body()
        return await self._one_at_a_time(lambda: self._take_text(body))

    async def _one_at_a_time(self, work: Callable[[], "Response"]) -> "Response":
        """Process an upload in a thread, one at a time, so that other pages are not delayed."""
        async with self._uploads:
            return await require("starlette.concurrency", "web").run_in_threadpool(work)

    def _take_picture(self, body: bytes, fields: "AddressFields") -> "Response":
        like = self.explorer.test or self.explorer.train
        if like is None or like.kind != "image":
            raise QueryError("this network does not take pictures.")
        invert = {"yes": True, "no": False}.get(fields.text("invert") or "")
        pixels = read_picture(body, like.grid, like.channels, invert)
        name = (fields.text("name") or "picture")[:60]
        return self._added(self.explorer.bring(name, like.from_pixels(pixels)))

    def _take_text(self, body: bytes) -> "Response":
        like = self.explorer.test or self.explorer.train
        if len(body) > MOST_TEXT:
            raise QueryError(f"the text is longer than {MOST_TEXT:,} bytes.")
        if like is None or like.kind == "image":
            raise QueryError("this network takes pictures, not text.")
        text = body.decode("utf-8", errors="replace").strip()
        if like.kind == "text":
            ids = like.vocabulary.encode(text) if like.vocabulary is not None else _numbers(text, int)
            if not ids:
                raise QueryError("the text is empty. Write something first.")
            if bad_ids := [number for number in ids if not 0 <= number < 2**31]:
                raise QueryError(f"{bad_ids[0]} is not a token.")
            x = torch.tensor(_fitted(ids, like.shape, like.is_stream))
        elif like.kind == "series":
            values, width = _numbers(text, float), like.shape[1]
            if not values or len(values) % width:
                raise QueryError(
                    f"a series has {width} numbers per step, and {len(values)} numbers are no whole steps."
                )
            x = torch.tensor(values).reshape(-1, width)
        else:
            values = _numbers(text, float)
            size = math.prod(like.shape)
            if len(values) != size:
                raise QueryError(f"the network takes {size} numbers, not {len(values)}.")
            x = torch.tensor(values).reshape(like.shape)
        self._require_accepted(x)
        return self._added(self.explorer.bring(text[:40], x))

    def _require_accepted(self, x: torch.Tensor) -> None:
        """Raise an error if the network cannot take an input."""
        try:
            self.explorer.spot(self.explorer.memory, as_inputs(x.unsqueeze(0), self.explorer.model))
        except (IndexError, RuntimeError, TypeError) as error:
            raise QueryError(f"the network cannot take this: {str(error).splitlines()[0]}") from error

    def start(self, request: "Request") -> "Response":
        """Start pending work."""
        work = self.explorer.work_queue.start(request.path_params["name"])
        return self._state(work)

    def state(self, request: "Request") -> "Response":
        """The progress of pending work."""
        return self._state(self.explorer.work_queue.state(request.path_params["name"]))

    def stop(self, request: "Request") -> "Response":
        """Stop work that was started, or take it out of the line."""
        return self._state(self.explorer.work_queue.stop(request.path_params["name"]))

    # ------------------------------------------------------------------------------------------- responses

    def _page(self, request: "Request", template: str, tab: str, view: Any, **more: Any) -> "Response":
        """A view as a page, or as JSON if the address ends in ``.json``."""
        path, query = request.url.path, request.url.query
        for work in pending_in(view):
            self.explorer.work_queue.start(work.name, by_itself=True)
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
            fields_of_page = {**dict(request.query_params), **{name: str(value) for name, value in fields.items()}}
            text = urlencode({name: value for name, value in fields_of_page.items() if value})
            return f"{path}?{text}" if text else path

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
        if self.explorer.test is not None or self.explorer.train is not None:
            tabs.append(("Training set", "/training"))
        if back and attention_layers(self.explorer.model):
            tabs += [("Attention", f"/attention/{back}"), ("Heads", "/heads")]
        compared = [("Compare", f"/compare/{back}")] if back else []
        return [*tabs, *compared, ("Run", "/run")]

    def problem(self, request: "Request", error: Exception) -> "Response":
        """An error as a page or as JSON, in one sentence."""
        is_ours = isinstance(error, DualformError)
        if not is_ours:
            log.error("%r failed", request.url.path, exc_info=error)
        message = str(error) if is_ours else "This is a bug in dualform. See the terminal of the explorer for details."
        if request.url.path.endswith(".json") or request.method == "POST":
            return self.responses.JSONResponse({"error": message}, 400 if is_ours else 500)
        return self._error_page(
            request, "This cannot be shown" if is_ours else "Something went wrong", message, 400 if is_ours else 500
        )

    def missing(self, request: "Request", error: Exception) -> "Response":
        """The page for an address that does not exist."""
        status = getattr(error, "status_code", 404)
        return self._error_page(request, "Page not found", "There is no page at this address.", status)

    def _error_page(self, request: "Request", heading: str, message: str, status: int) -> "Response":
        back = self._back(request)
        values = {"explorer": self.explorer, "tab": "", "tabs": self._tabs(back), "back": back, "address": ""}
        page = render("error.html", heading=heading, message=message, json_address="", **values)
        return self.responses.HTMLResponse(page, status)

    def _back(self, request: "Request") -> str:
        """The example that the visitor opened last, else the first one."""
        name, _, row = request.cookies.get(PLACE, "").partition("/")
        if name in SETS and is_whole_number(row) and 0 <= int(row) < self.explorer.count(name):
            return f"{name}/{row}"
        first = next((name for name in SETS if self.explorer.count(name)), None)
        return f"{first}/0" if first else ""

    def _place(self, request: "Request") -> ExamplePlace:
        row = request.path_params["row"].removesuffix(".json")
        name = request.path_params["set"]
        if name not in SETS or not is_whole_number(row) or row.startswith("-"):
            raise QueryError(f"there is no example {name[:20]}/{row[:20]}.")
        place = ExamplePlace(name, int(row))
        self.explorer.need(place)
        return place

    def _choice(self, fields: AddressFields) -> TrainingSetQuestion:
        return TrainingSetQuestion(
            layer=fields.text("layer"), which=fields.one_of("which", get_args(Correctness)) or "all",
            rows=fields.number("rows", 200), show=fields.one_of("show", get_args(Showing)), sort=fields.text("sort"),
            order=fields.one_of("order", get_args(SortOrder)), label=fields.number("label"),
            column=fields.text("column"), value=fields.text("value"), filter=(fields.text("filter") or "").strip(),
            text=(fields.text("text") or "").strip(), only=fields.one_of("only", get_args(Subset)) or "all",
            page=fields.number("page", 1),
        )  # fmt: skip

    def _csv(self, name: str, table: str) -> "Response":
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return self.responses.Response(table, media_type="text/csv; charset=utf-8", headers=headers)

    def _added(self, place: ExamplePlace) -> "Response":
        return self.responses.JSONResponse({"address": f"/prediction/{place.set}/{place.row}"})

    def _state(self, work: PendingWork | None) -> "Response":
        if work is None:
            return self.responses.JSONResponse({"state": "done", "share": 1.0, "left": 0.0, "says": ""})
        return self.responses.JSONResponse({**as_plain(work), "says": work.says})


def make_app(
    explorer: Explorer, hosts: Sequence[str] = LOOPBACK, token: str | None = None, framed: bool = False
) -> Guard:
    """The application behind its access control."""
    return Guard(make_pages(explorer), tuple(hosts), token, framed)


def make_pages(explorer: Explorer) -> Any:
    """All pages of an explorer, without access control."""
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
        route("/compare/{set}/{row}", pages.compare),
        *(route(f"/training{end}", pages.training) for end in both),
        route("/training/suspects.csv", pages.suspects),
        *(route(f"/map{end}", pages.map) for end in both),
        route("/selection", pages.select, methods=["POST"]),
        route("/selection.csv", pages.selected),
        route("/attention/{set}/{row}", pages.attention),
        *(route(f"/heads{end}", pages.heads) for end in both),
        *(route(f"/run{end}", pages.run) for end in both),
        route("/example/{index}", pages.example),
        route("/own/picture", pages.picture, methods=["POST"]),
        route("/own/text", pages.text, methods=["POST"]),
        route("/work/{name}.json", pages.state),
        route("/work/{name}/stop", pages.stop, methods=["POST"]),
        route("/work/{name}", pages.start, methods=["POST"]),
        *(route(path, static(*file)) for path, file in static_files().items()),
    ]
    handlers = {exceptions.HTTPException: pages.missing, DualformError: pages.problem, Exception: pages.problem}
    return applications.Starlette(routes=routes, exception_handlers=handlers)


@cache
def static_files() -> dict[str, tuple[str, str]]:
    """The files that pages load, by their addresses: text and media type."""

    def script(name: str) -> tuple[str, str]:
        return (HERE / name).read_text(encoding="utf-8"), "text/javascript"

    icon = (HERE / "icon.svg").read_text(encoding="utf-8")
    return {
        "/static/style.css": (style(), "text/css; charset=utf-8"),
        "/static/explorer.js": script("explorer.js"),
        "/static/waiting.js": script("waiting.js"),
        "/static/icon.svg": (icon, "image/svg+xml"),
    }


BACKGROUND = 60.0
"""Ledgers that take at most so many seconds are made before anybody asks for them."""


def warm_up(explorer: Explorer) -> None:
    """Ask once, so that the first visitor does not wait, and start the ledgers that masks need in the background."""
    first_question(explorer)
    prepare(explorer)


def prepare(explorer: Explorer) -> None:
    """Make the ledgers that masks need, in the background and after all that visitors ask for."""
    for make in (lambda: ledger_of(explorer, explorer.columns[0]), lambda: ledger_of_time(explorer)):
        try:
            ledger = make()
        except DualformError:  # the page that needs it says why there is none
            continue
        if isinstance(ledger, PendingWork) and ledger.seconds <= BACKGROUND:
            explorer.work_queue.start(ledger.name, behind=True)


def next_mistake(explorer: Explorer, place: ExamplePlace) -> ExamplePlace | None:
    """The next example after a place that the network gets wrong; None if none is near."""
    examples = explorer.examples(place.set)
    if examples is None or examples.labels is None:
        raise QueryError(f"the examples of '{place.set}' have no labels, so mistakes cannot be found.")
    rows = range(place.row + examples.stride, len(examples), examples.stride)[:MANY_ROWS]
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        for row, answer in zip(batch, explorer.logits(place.set, batch).argmax(1).tolist(), strict=True):
            if examples.label(row) not in (None, answer):
                return ExamplePlace(place.set, row)
    return None


def _numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise QueryError(f"not everything here is a number: {text[:60]!r}.") from error


def _fitted(ids: list[int], shape: tuple[int, ...], free: bool) -> list[int]:
    """Cut tokens to the length that the network takes: a long text loses its beginning."""
    length = shape[0]
    if len(ids) >= length or free:
        return ids[-length:]
    return ids
