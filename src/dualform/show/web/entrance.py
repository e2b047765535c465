"""What visitors see while the explorer is being opened: what is being done, how long it takes, or why it failed."""

import time
from typing import Any
from urllib.parse import unquote

from dualform.errors import require

from ..views import as_plain, render
from .app import make_pages, static_files
from .guard import App, Receive, Scope, Send
from .opening import Opening, OpeningState

OPENING = "/opening.json"
"""The address of the state as JSON."""

WATCHED = 5.0
"""For how many seconds after a request somebody is thought to look at the waiting page."""


class Entrance:
    """An ASGI application: waiting pages until an explorer is open, and from then on its pages.

    All addresses are there from the beginning: each leads to its page as soon as there is one.
    """

    def __init__(self, opening: Opening) -> None:
        self.opening = opening
        self.has_told = False
        """Whether a visitor was shown why the explorer cannot be opened."""
        self._asked = -WATCHED
        self._pages: App | None = None
        self._responses: Any = require("starlette.responses", "web")
        self._static = static_files()

    @property
    def is_watched(self) -> bool:
        """Whether a visitor has just asked for a page."""
        return time.monotonic() - self._asked < WATCHED

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the pages, if there are any yet; else answer it with what is being done."""
        if scope["type"] != "http":
            return
        if self._pages is None and self.opening.explorer is not None:
            self._pages = make_pages(self.opening.explorer)
        if self._pages is not None and scope["path"] != OPENING:
            await self._pages(scope, receive, send)
            return
        await self._waiting(scope)(scope, receive, send)

    def _waiting(self, scope: Scope) -> Any:
        path, state = scope["path"], self.opening.state()
        if path in self._static:
            text, kind = self._static[path]
            return self._responses.Response(text, media_type=kind)
        self._asked = time.monotonic()
        self.has_told = self.has_told or state.state == "failed"
        status, headers = (200, {}) if state.state == "done" else (503, {"retry-after": "1"})
        if path.endswith(".json") or scope["method"] == "POST":
            return self._responses.JSONResponse(as_plain(state), status, headers)
        return self._responses.HTMLResponse(self._page(scope, state), status, headers)

    def _page(self, scope: Scope, state: OpeningState) -> str:
        query = scope["query_string"].decode("latin-1")
        address = unquote(scope["path"]) + (f"?{query}" if query else "")
        return render("opening.html", title=self.opening.title, opening=state, address=address)
