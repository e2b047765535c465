"""The explorer inside a notebook: a server of this process on this machine, and a frame that shows it."""

import atexit
import copy
import sys
import threading
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from torch import nn

from dualform.errors import QueryError
from dualform.explain import Memory, ReplayedRun

from ..described import DataOptions, described_objects
from ..examples import Vocabulary
from ..views import Explorer
from ..web import make_server

HEIGHT = 820
"""The height of the frame in pixels."""

PATIENCE = 20.0
"""The most seconds that the server may take to start, and to stop."""


def explore(
    memory: Memory,
    model: nn.Module | str | None = None,
    train: Any = None,
    test: Any = None,
    *,
    classes: Sequence[str] | None = None,
    index: str | None = None,
    vocabulary: Vocabulary | None = None,
    length: int | None = None,
    run: ReplayedRun | None = None,
    compare: Sequence[Memory] = (),
    trust: bool = False,
    height: int = HEIGHT,
    port: int = 0,
) -> "NotebookExplorer":
    """Open the explorer in a notebook; outside of one, print its address.

    What is left out comes from the memory's recipe, if ``tape.describe`` was told: then ``explore(memory)`` is enough.

    - ``model``: any network of the recorded kind, or the name of a factory, ``package.module:factory``. The weights
      come from the memory, and yours is not touched.
    - ``train``, ``test``: rows as the model takes them: a tensor or an array, a pair (inputs, labels), a data set of
      such pairs, a mapping with "inputs" and perhaps "labels" and further arguments of the model; or a file or table
      as for ``dualform.data.read``, or the name of a factory.
    - ``classes``: the names of the classes; ``index``: the column that says which training example a visit was
      (default: ``index``).
    - ``vocabulary``: what decodes tokens; ``length``: tokens of an example where the data are one long text.
    - ``run``: the training, to be run again on the page "What if" (``memory.replay(…)``). Without it, that of a
      classifier on tensors is tried.
    - ``compare``: other memories of the same network, to compare with.
    - ``trust``: agree that the modules that the recipe names are imported, which runs them. It is remembered, also for
      the commands, which ask in the same way.
    - ``port``: 0 picks a free one.

    The server listens on this machine only and wants the token that the address has. It stops with ``close()``, at the
    end of a ``with``, or with the process. Needs the extra ``web``.
    """
    options = DataOptions(
        classes=classes, index=index, length=length, flags=("train=", "test="), model_flag="model=",
        trust_flag="trust=True",
    )  # fmt: skip
    own = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    held = {"model": own, "train": train, "test": test, "vocabulary": vocabulary}
    source = described_objects(memory, options, trust, held)
    explorer = source.explorer()
    explorer.run = run
    explorer.compare_with(compare)
    return NotebookExplorer(explorer, height=height, port=port)


class NotebookExplorer:
    """A running explorer: a notebook shows it in a frame. ``close()`` stops it."""

    def __init__(self, explorer: Explorer, *, height: int = HEIGHT, port: int = 0) -> None:
        self.explorer, self.height = explorer, height
        self._server, self.address = make_server(explorer, "127.0.0.1", port, None, framed=True)
        listener = self._server.dualform_socket
        self._thread = threading.Thread(
            target=lambda: self._server.run(sockets=[listener]), name="dualform explorer", daemon=True
        )
        self._thread.start()
        end = time.monotonic() + PATIENCE
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                self.close()
                raise QueryError("the explorer's server did not start. See the messages above.")
            time.sleep(0.01)
        atexit.register(self.close)
        if not in_notebook():
            print(self)

    @property
    def is_open(self) -> bool:
        """Whether the server still answers."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the server and free its port."""
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        self._server.dualform_socket.close()
        self.explorer.work_queue.close()
        atexit.unregister(self.close)

    def __enter__(self) -> "NotebookExplorer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __str__(self) -> str:
        if not self.is_open:
            return "The explorer is closed."
        return f"The explorer is at {self.address} until explorer.close() or the end of this process."

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        if not self.is_open:
            return f"<p>{escape(str(self))}</p>"
        address = escape(self.address)
        frame = (
            f'<iframe src="{address}" title="dualform explorer" loading="lazy" '
            f'style="width:100%;height:{int(self.height)}px;border:1px solid rgba(128,128,128,.35)"></iframe>'
        )
        link = f'<a href="{address}" target="_blank">In a tab of its own</a>'
        return f'{frame}<p style="font-size:90%;opacity:.7">{link}</p>'


def in_notebook() -> bool:
    """Whether this is Jupyter or marimo, which show what a cell ends with."""
    if "marimo" in sys.modules and sys.modules["marimo"].running_in_notebook():
        return True
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")
