"""A memory in MLflow: numbers as metrics of a run, the certificate and tables as its artifacts."""

from typing import Any

from dualform.errors import require
from dualform.explain import Memory

from .contents import Tables, contents


def mlflow(memory: Memory, run: Any, *, tables: Tables | None = None, step: int | None = None) -> None:
    """Log a memory's numbers, certificate and tables to a run that ``mlflow.start_run`` gave, or to the run of an id.

    ``tables`` are answers by name, such as ``{"top": spot.top(5)}``. ``step`` is by default that of the
    memory.
    """
    client = require("mlflow").MlflowClient()
    run_id = run if isinstance(run, str) else run.info.run_id
    logged, at = contents(memory, tables), memory.step if step is None else step
    for name, value in logged.numbers.items():
        client.log_metric(run_id, name, value, step=at)
    client.log_text(run_id, logged.text, "dualform/certificate.txt")
    for name, frame in logged.tables.items():
        client.log_table(run_id, frame, artifact_file=f"{name}.json")
