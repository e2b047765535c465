"""A real server on this machine, for the tests that need one."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dualform.show.views.explorer import Explorer
from dualform.show.web.opening import Opening
from dualform.show.web.serve import make_server


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Served:
    explorer: Explorer
    address: str

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, None, **headers)

    def post(self, path: str, body: bytes = b"", **headers: str) -> Answer:
        return self.send("POST", path, body, **{"X-Dualform": "1", **headers})

    def send(self, method: str, path: str, body: bytes | None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            fields = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, fields, response.read())
        finally:
            connection.close()


@contextmanager
def serving(explorer: Explorer | Opening, host: str = "127.0.0.1", token: str | None = None) -> Iterator[Served]:
    """Serve an explorer, or one that is being opened, on a free port while the block runs."""
    server, address = make_server(explorer, host, 0, token)
    thread = threading.Thread(target=lambda: server.run(sockets=[server.dualform_socket]), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Served(explorer, address)  # type: ignore[arg-type]
    finally:
        server.should_exit = True
        thread.join(10)
        if isinstance(explorer, Explorer):
            explorer.work_queue.close()
