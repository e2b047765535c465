"""Access control: allowed hosts, a token, security headers, and limits on requests."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from hashlib import blake2b
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

COOKIE = "dualform"
MOST_BYTES = 8_000_000
"""The largest request body."""

LONGEST = 30.0
"""The most seconds to wait for the next part of a request body."""

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

FRAMED = HEADERS | {
    "content-security-policy": HEADERS["content-security-policy"].replace(
        "frame-ancestors 'none'",
        "frame-ancestors http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:* vscode-webview:",
    )
}
FRAMED.pop("x-frame-options")
"""The headers where notebooks on this machine may show the pages inside their own."""

LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """An ASGI application that checks requests before the pages see them: other sites can neither read nor post.

    A request must name one of the ``hosts`` (against DNS rebinding), a POST must carry a header that other sites cannot
    send, and if there is a ``token`` every visitor must present it. With ``framed`` notebooks of this machine may show
    the pages in a frame: a browser then keeps the token's cookie for that notebook's site alone, and one for each
    explorer, as cookies do not know ports.
    """

    def __init__(
        self, app: App, hosts: tuple[str, ...] = LOOPBACK, token: str | None = None, framed: bool = False
    ) -> None:
        assert token or not framed
        self.app, self.hosts, self.token = app, {host.lower() for host in hosts}, token
        self.framed, self.headers = framed, FRAMED if framed else HEADERS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with a reason."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if "*" not in self.hosts and _host(headers.get("host", "")) not in self.hosts:
            return await _refuse(send, 421, "The explorer does not serve this host name.")
        if _is_cross_site(scope, headers, self.framed):
            return await _refuse(send, 403, "Other sites may not use the explorer. Open its address yourself.")
        if self.token is not None and not await self._has_token(scope, headers, send):
            return None
        if scope["method"] not in ("GET", "HEAD"):
            if scope["method"] != "POST" or headers.get("x-dualform") != "1":
                return await _refuse(send, 403, "Only the explorer's own pages may send changes.")
            if not headers.get("content-length", "0").isdigit() or int(headers.get("content-length", "0")) > MOST_BYTES:
                return await _refuse(send, 413, f"At most {MOST_BYTES:,} bytes can be sent.")
        await self.app(scope, _limited(receive), _with_headers(send, self.headers))
        return None

    async def _has_token(self, scope: Scope, headers: Mapping[str, str], send: Send) -> bool:
        """Whether a request carries the token. A token in the address is moved into a cookie by a redirect."""
        assert self.token is not None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if any(_same(secret, self.token) for secret in (*_cookies(headers.get("cookie", "")), bearer)):
            return True
        if any(name == "token" and _same(value, self.token) for name, value in query):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            address = "/" + quote(scope["path"].lstrip("/")) + (f"?{rest}" if rest else "")
            cookie = f"{COOKIE}-{blake2b(self.token.encode(), digest_size=4).hexdigest()}" if self.framed else COOKIE
            site = "SameSite=None; Secure; Partitioned" if self.framed else "SameSite=Strict"
            cookie_text = f"{cookie}={self.token}; HttpOnly; {site}; Path=/"
            await _answer(send, 303, b"", {"location": address, "set-cookie": cookie_text}, self.headers)
            return False
        await _refuse(send, 401, "Open the address with the token that the explorer printed when it started.")
        return False


def _is_cross_site(scope: Scope, headers: Mapping[str, str], framed: bool) -> bool:
    """Whether the browser made the request for a page of another site; following a link to ``/`` is allowed.

    A frame is opened by the page around it, and so are the pages that it is redirected to.
    """
    is_entrance = scope["path"] == "/" or (framed and scope["method"] == "GET")
    entering = is_entrance and headers.get("sec-fetch-mode") == "navigate"
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not entering


def _cookies(text: str) -> list[str]:
    """The values of our cookie among those of other applications."""
    pairs = (part.strip().partition("=") for part in text.split(";"))
    return [value.strip('"') for name, _, value in pairs if name.split("-")[0] == COOKIE]


def _host(text: str) -> str:
    """The host name in a Host header, without the port."""
    text = text.strip().lower()
    return text.split("]")[0] + "]" if text.startswith("[") else text.split(":")[0]


def _same(secret: str, token: str) -> bool:
    return hmac.compare_digest(secret.encode(), token.encode())


def _limited(receive: Receive) -> Receive:
    """Receive a request body, and disconnect if it is too large or too slow."""
    received_bytes, is_complete = 0, False

    async def limited() -> MutableMapping[str, Any]:
        nonlocal received_bytes, is_complete
        try:
            message = await asyncio.wait_for(receive(), None if is_complete else LONGEST)
        except TimeoutError:
            return {"type": "http.disconnect"}
        received_bytes, is_complete = (
            received_bytes + len(message.get("body", b"")),
            not message.get("more_body", False),
        )
        return {"type": "http.disconnect"} if received_bytes > MOST_BYTES else message

    return limited


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    async def guarded(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            ours = [(name.encode(), value.encode()) for name, value in headers.items()]
            message = {**message, "headers": [*message["headers"], *ours]}
        await send(message)

    return guarded


async def _refuse(send: Send, status: int, text: str) -> None:
    await _answer(send, status, text.encode(), {"content-type": "text/plain; charset=utf-8"})


async def _answer(
    send: Send, status: int, body: bytes, headers: Mapping[str, str], always: Mapping[str, str] = HEADERS
) -> None:
    all_headers = {**always, **headers, "content-length": str(len(body))}
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
