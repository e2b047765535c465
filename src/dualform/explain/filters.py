"""Filters select visits: SQL that DuckDB runs, an Arrow expression, or a mask."""

import json
import threading
from collections.abc import Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Bool

from dualform.errors import FilterError

from .unreadable_filter import unreadable

Filter = str | pc.Expression | np.ndarray | torch.Tensor

CLOSED: dict[str, Any] = {
    "enable_external_access": False, "python_enable_replacements": False, "autoload_known_extensions": False,
    "autoinstall_known_extensions": False, "allow_persistent_secrets": False, "temp_directory": "",
    "lock_configuration": True,
}  # fmt: skip
"""Settings of the database under which a filter sees the visits, but no file, no variable and no other machine."""

SMALL: dict[str, Any] = {"memory_limit": "512MB", "threads": 1}

PLAIN = {
    "COLUMN_REF", "CONSTANT", "COMPARISON", "CONJUNCTION", "OPERATOR", "BETWEEN", "CAST", "TYPE", "CASE", "FUNCTION",
}  # fmt: skip
CALLS = {
    "+", "-", "*", "/", "//", "%", "~~", "!~~", "~~*", "!~~*", "abs", "lower", "upper", "length", "contains",
    "starts_with", "prefix", "suffix",
}  # fmt: skip
"""The nodes that a plain condition may hold, and the functions that it may call."""

LONGEST = 20.0
"""Seconds after which a filter is stopped."""


def matching(visits: pa.Table, filter: Filter, *, plain: bool = False) -> Bool[np.ndarray, " V"]:
    """Whether the filter holds for each visit: ``"label = 3 and step > 100"``, ``pc.field("label") == 3`` or a mask.

    ``plain`` is for text from strangers: it allows comparisons of columns with values and nothing that could take long.
    """
    if isinstance(filter, str):
        mask = _sql(visits, filter, plain)
    elif isinstance(filter, pc.Expression):
        mask = _expression(visits, filter)
    else:
        mask = np.asarray(filter)
        if mask.dtype != bool or mask.shape != (len(visits),):
            raise FilterError(
                f"a mask must hold {len(visits)} booleans, one per visit; got {mask.dtype} of shape {mask.shape}."
            )
    if not mask.any():
        raise FilterError(
            f"the filter {named(filter)} matches none of the {len(visits):,} visits. "
            "Look at memory.visits for the values its columns have."
        )
    return mask


def named(filter: Filter) -> str:
    """A filter as messages show it: as it was written, or the number of visits of a mask."""
    return repr(filter) if isinstance(filter, str | pc.Expression) else f"with {int(np.sum(np.asarray(filter)))} visits"


def _sql(visits: pa.Table, text: str, plain: bool) -> np.ndarray:
    if not text.strip():
        raise FilterError(unreadable(text, "", visits.column_names))
    connection = duckdb.connect(config=CLOSED | (SMALL if plain else {}))
    connection.register("visits", visits)
    query = f"select coalesce(({text}\n)::boolean, false) as holds from visits order by visit"
    timer = threading.Timer(LONGEST, connection.interrupt)
    timer.start()
    try:
        if plain:
            _require_plain(connection, text, visits.column_names)
        if len(connection.extract_statements(query)) != 1:
            raise FilterError(f"the filter {text!r} is more than one condition.")
        table = connection.sql(query).to_arrow_table()
    except duckdb.InterruptException as error:
        raise FilterError(f"the filter {text!r} takes more than {LONGEST} s. Write a simpler condition.") from error
    except duckdb.Error as error:
        raise FilterError(unreadable(text, str(error), visits.column_names)) from error
    finally:
        timer.cancel()
        connection.close()
    if len(table) != len(visits):
        raise FilterError(
            f"the filter {text!r} gives {len(table):,} answers for {len(visits):,} visits; it must be one condition on "
            f"the columns {visits.column_names}."
        )
    return table["holds"].to_numpy(zero_copy_only=False).astype(bool)


def _expression(visits: pa.Table, expression: pc.Expression) -> np.ndarray:
    try:
        table = visits.append_column("__line", pa.array(np.arange(len(visits)))).filter(expression)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        reason = str(error).split("\n")[0]
        raise FilterError(
            f"cannot read the filter {expression}: {reason} (the columns are {visits.column_names})"
        ) from error
    mask = np.zeros(len(visits), bool)
    mask[table["__line"].to_numpy()] = True
    return mask


def _require_plain(connection: duckdb.DuckDBPyConnection, text: str, columns: Sequence[str]) -> None:
    """Raise unless a text is one condition of plain parts. The database itself parses it."""
    lines = connection.execute("select json_serialize_sql(?::varchar)", [f"select ({text}\n)"]).fetchall()
    parsed = json.loads(lines[0][0])
    if parsed["error"]:
        raise FilterError(unreadable(text, f"Parser Error: {parsed.get('error_message', '')}", columns))
    node = parsed["statements"][0]["node"] if len(parsed["statements"]) == 1 else {}
    alone = (
        node.get("type") == "SELECT_NODE" and len(node["select_list"]) == 1 and node["from_table"]["type"] == "EMPTY"
    )
    if not alone or node["modifiers"] or node["where_clause"]:
        raise FilterError(f"the filter {text!r} is more than one condition.")
    waiting: list[Any] = [node["select_list"]]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            kind, name = part.get("class", "TYPE"), str(part.get("function_name", "")).lower()
            if kind not in PLAIN or (kind == "FUNCTION" and name not in CALLS):
                construct = name or kind.lower().replace("_", " ")
                raise FilterError(
                    f"the filter {text!r} uses {construct!r}; here a condition compares columns with values, as in "
                    "label = 3 and step < 100."
                )
            waiting += part.values()
