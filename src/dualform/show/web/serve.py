"""Start the server, for this machine only or with a token."""

import ipaddress
import os
import secrets
import socket
import threading
import time
import webbrowser
from pathlib import Path
from typing import Any

from rich.console import Console

from dualform.errors import QueryError, require

from ..views import Explorer
from .app import make_pages, prepare
from .entrance import Entrance
from .guard import LOOPBACK, Guard
from .opening import Opening

GRACE = 3.0
"""The most seconds that a browser may take to fetch the page that says why the explorer could not be opened."""


def serve(
    opening: Opening, host: str, port: int, token: str | None, browser: bool, console: Console
) -> None:  # fmt: skip
    """Serve an explorer until it is stopped. The port answers at once, and the explorer is opened in the background."""
    server, address = make_server(opening, host, port, token)
    console.print(f"The explorer is at [bold]{address}[/]. Press Ctrl-C to stop it.", soft_wrap=True)

    def opened(opening: Opening) -> None:
        if opening.explorer is None:
            _tell_browser(server.dualform_entrance, browser)
            server.should_exit = True
            return
        console.print(f"Ready after {opening.seconds:.1f} s.")
        prepare(opening.explorer)

    opening.start(opened)
    if browser:
        threading.Timer(0.3, webbrowser.open, [address]).start()
    try:
        server.run(sockets=[server.dualform_socket])
    finally:
        if not opening.stop():  # Python ends badly while another thread computes
            console.print("\nStopped.")
            os._exit(130)
        if opening.explorer is not None:
            opening.explorer.work_queue.close()
    if opening.error is not None:
        raise opening.error


def _tell_browser(entrance: Entrance, browser: bool) -> None:
    """Wait until a waiting page has shown the error, if there is one or one was just opened."""
    end = time.monotonic() + (GRACE if browser or entrance.is_watched else 0.0)
    while not entrance.has_told and time.monotonic() < end:
        time.sleep(0.05)
    if entrance.has_told:
        time.sleep(0.5)  # for the style sheet


def make_server(
    explorer: Explorer | Opening, host: str, port: int, token: str | None, framed: bool = False
) -> tuple[Any, str]:  # fmt: skip
    """A server whose port is already open, and the address for the browser; ``framed`` for one inside a notebook.

    An explorer that is still being opened is served as soon as it is there.
    """
    uvicorn = require("uvicorn", "web")
    local = is_loopback(host)
    token = token or (None if local and not framed else secrets.token_urlsafe(24))
    hosts = (*LOOPBACK, host, f"[{host}]") if host not in ("0.0.0.0", "::") else ("*",)
    listener = listen(host, port)
    entrance = Entrance(explorer) if isinstance(explorer, Opening) else make_pages(explorer)
    config = uvicorn.Config(
        Guard(entrance, hosts, token, framed),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=100,
        timeout_graceful_shutdown=3,
    )
    server = uvicorn.Server(config)
    server.dualform_socket, server.dualform_entrance = listener, entrance
    shown = f"[{host}]" if ":" in host else "localhost" if host == "127.0.0.1" else host
    address = f"http://{shown}:{listener.getsockname()[1]}/"
    return server, address if token is None else f"{address}?token={token}"


def token_in(file: Path) -> str:
    """The access token that a file holds."""
    token = file.read_text(encoding="utf-8").strip()
    if not token:
        raise QueryError(f"the file {file} holds no token. Write one into it, for instance with: openssl rand -hex 24")
    return token


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to a host and port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns on TCP_NODELAY only for sockets that say that they are TCP: without it a page waits 40 ms more
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    exclusive = getattr(
        socket, "SO_EXCLUSIVEADDRUSE", None
    )  # Windows: SO_REUSEADDR would let two programs share a port
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR if exclusive is None else exclusive, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # whoever opens the printed address at once waits until the server answers
    except OSError as error:
        listener.close()
        raise QueryError(
            f"cannot listen at {host}:{port}: {error.strerror or error}. Choose another --port; 0 picks a free one."
        ) from error
    return listener
