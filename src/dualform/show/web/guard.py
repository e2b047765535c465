"""Who may come in, and what a page may do: hosts, a token, headers, and the size of what is sent."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

COOKIE = "dualform"
MOST_BYTES = 8_000_000
"""What somebody may send at most."""

LONGEST = 30.0
"""Seconds that a part of it may take to come."""

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; img-src 'self' data:; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Stands before the pages. A page on another site can neither read them nor change anything here.

    Requests must name a host that is ours (so no foreign name can be bound to this machine), changes must carry a
    header that other sites cannot send, and with a ``token`` every visitor must know it.
    """

    def __init__(self, app: App, hosts: tuple[str, ...] = LOOPBACK, token: str | None = None) -> None:
        self.app, self.hosts, self.token = app, {host.lower() for host in hosts}, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or say why not."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if "*" not in self.hosts and _host(headers.get("host", "")) not in self.hosts:
            return await _refuse(send, 421, "This host name is not one of the explorer's.")
        if _from_elsewhere(scope, headers):
            return await _refuse(send, 403, "Another site may not ask the explorer. Open its address yourself.")
        if self.token is not None and not await self._known(scope, headers, send):
            return None
        if scope["method"] not in ("GET", "HEAD"):
            if scope["method"] != "POST" or headers.get("x-dualform") != "1":
                return await _refuse(send, 403, "Only the explorer's own pages may change something.")
            if not headers.get("content-length", "0").isdigit() or int(headers.get("content-length", "0")) > MOST_BYTES:
                return await _refuse(send, 413, f"At most {MOST_BYTES:,} bytes can be sent.")
        await self.app(scope, _limited(receive), _with_headers(send))
        return None

    async def _known(self, scope: Scope, headers: Mapping[str, str], send: Send) -> bool:
        """Whether a visitor knows the token; from the address it moves into a cookie."""
        assert self.token is not None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if any(_same(given, self.token) for given in (*_cookies(headers.get("cookie", "")), bearer)):
            return True
        if any(name == "token" and _same(value, self.token) for name, value in query):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            address = "/" + quote(scope["path"].lstrip("/")) + (f"?{rest}" if rest else "")
            cookie_text = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            await _answer(send, 303, b"", {"location": address, "set-cookie": cookie_text})
            return False
        await _refuse(send, 401, "Open the address with the token that the explorer printed when it was started.")
        return False


def _from_elsewhere(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Whether a browser sends a request for another site's page; to come in through a link is allowed."""
    entering = scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not entering


def _cookies(text: str) -> list[str]:
    """The values of our cookie, whatever other applications left beside it."""
    pairs = (part.strip().partition("=") for part in text.split(";"))
    return [value.strip('"') for name, _, value in pairs if name == COOKIE]


def _host(text: str) -> str:
    """The name in a Host header, without its port."""
    text = text.strip().lower()
    return text.split("]")[0] + "]" if text.startswith("[") else text.split(":")[0]


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _limited(receive: Receive) -> Receive:
    """What is sent, cut off where it is too much."""
    seen, whole = 0, False

    async def limited() -> MutableMapping[str, Any]:
        nonlocal seen, whole
        try:
            message = await asyncio.wait_for(receive(), None if whole else LONGEST)
        except TimeoutError:
            return {"type": "http.disconnect"}
        seen, whole = seen + len(message.get("body", b"")), not message.get("more_body", False)
        return {"type": "http.disconnect"} if seen > MOST_BYTES else message

    return limited


def _with_headers(send: Send) -> Send:
    async def guarded(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message["headers"], *ours]}
        await send(message)

    return guarded


async def _refuse(send: Send, status: int, text: str) -> None:
    await _answer(send, status, text.encode(), {"content-type": "text/plain; charset=utf-8"})


async def _answer(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    every = {**HEADERS, **headers, "content-length": str(len(body))}
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in every.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
