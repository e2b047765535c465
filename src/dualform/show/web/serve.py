"""Start the server, for this machine only or with a token."""

import ipaddress
import secrets
import socket
import threading
import time
import webbrowser
from typing import Any

from rich.console import Console

from dualform.errors import QueryError, require

from ..views import Explorer
from .app import make_app, warm_up
from .guard import LOOPBACK


def serve(explorer: Explorer, host: str, port: int, token: str | None, browser: bool, console: Console) -> None:
    """Serve the explorer until it is stopped."""
    server, address = make_server(explorer, host, port, token)
    start = time.perf_counter()
    console.print("Warming up …", end="\r")
    warm_up(explorer)
    console.print(
        f"The explorer is at [bold]{address}[/] (ready after {time.perf_counter() - start:.1f} s). "
        "Press Ctrl-C to stop it."
    )
    if browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    try:
        server.run(sockets=[server.dualform_socket])
    finally:
        explorer.work_queue.close()


def make_server(explorer: Explorer, host: str, port: int, token: str | None, framed: bool = False) -> tuple[Any, str]:
    """A server whose port is already open, and the address for the browser; ``framed`` for one inside a notebook."""
    uvicorn = require("uvicorn", "web")
    local = is_loopback(host)
    token = token or (None if local and not framed else secrets.token_urlsafe(24))
    hosts = (*LOOPBACK, host, f"[{host}]") if host not in ("0.0.0.0", "::") else ("*",)
    listener = listen(host, port)
    config = uvicorn.Config(
        make_app(explorer, hosts, token, framed),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=100,
        timeout_graceful_shutdown=3,
    )
    server = uvicorn.Server(config)
    server.dualform_socket = listener
    shown = f"[{host}]" if ":" in host else "localhost" if host == "127.0.0.1" else host
    address = f"http://{shown}:{listener.getsockname()[1]}/"
    return server, address if token is None else f"{address}?token={token}"


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
    listener = socket.socket(family, socket.SOCK_STREAM)
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
