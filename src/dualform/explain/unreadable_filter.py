"""What is wrong with a filter that the database cannot read, in the words of somebody who has only seen the columns."""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches

ColumnNames = Sequence[str]

SEMICOLON = "it holds more than one statement"


def unreadable(text: str, error: str, columns: ColumnNames) -> str:
    """The message for a filter, from the database's ``error``: what is wrong, the columns there are, an example."""
    if not text.strip():
        return f"cannot read the filter {text!r}: it is empty. {_advice(columns)}"
    for pattern, explain in REASONS:
        if match := re.search(pattern, error):
            return f"cannot read the filter {text!r}: {explain(match, text, columns)} {_advice(columns)}"
    reason = error.split("\n")[0].partition("Error: ")[2] or error.split("\n")[0]
    return f"cannot read the filter {text!r}: {reason.rstrip('.!')}. {_advice(columns)}"


def _advice(columns: ColumnNames) -> str:
    number = next((name for name in ("label", "index") if name in columns), "step")
    example = f"{number} = 3 and step < 100" if number != "step" else "step < 100"
    return f"Write one condition on the columns {list(columns)}, such as {example!r}."


def _unknown_column(match: re.Match, text: str, columns: ColumnNames) -> str:
    name = match[1]
    if f'"{name}"' in text:
        column = next((column for column in columns if column in text), "source")
        return f"there is no column '{name}'; a value stands in single quotes, as in {column} = '{name}'."
    similar = get_close_matches(name.lower(), columns, n=1)
    return f"there is no column '{name}'." + (f" Do you mean '{similar[0]}'?" if similar else "")


def _unknown_table(match: re.Match, text: str, columns: ColumnNames) -> str:
    return f"there is no table '{match[1]}', only the columns of the visits."


def _wrong_type(match: re.Match, text: str, columns: ColumnNames) -> str:
    value, kind = match[1], KINDS.get(match[2].rstrip("0123456789"), match[2])
    if column := match[3]:
        return f"column '{column}' holds {value!r}, which is not {kind}; compare it with a value in single quotes."
    return f"{value!r} is not {kind}, and it is compared with a column that holds nothing else."


def _wrong_kinds(match: re.Match, text: str, columns: ColumnNames) -> str:
    return "it compares a column with a value of another kind, or gives a function a value of the wrong kind."


def _unknown_function(match: re.Match, text: str, columns: ColumnNames) -> str:
    return f"there is no function '{match[1]}'."


def _table_function(match: re.Match, text: str, columns: ColumnNames) -> str:
    return f"'{match[1]}' reads a table from elsewhere, and a filter sees the visits alone."


def _parameter(match: re.Match, text: str, columns: ColumnNames) -> str:
    return "it has a placeholder ($ or ?) in place of a value."


def _over_all_visits(match: re.Match, text: str, columns: ColumnNames) -> str:
    return "it sums or counts over visits, and a condition is about one visit."


def _unfinished_text(match: re.Match, text: str, columns: ColumnNames) -> str:
    return "a quote is opened and never closed."


def _syntax(match: re.Match, text: str, columns: ColumnNames) -> str:
    if text.count("(") != text.count(")"):
        return "it does not close every bracket that it opens, or closes one too many."
    word = match[1]
    if word == ";":
        return f"{SEMICOLON}."
    if word in text and not text.rstrip().endswith(("=", "<", ">", "and", "or", "not", "in", "between")):
        return f"it is not understood from {word!r} on."
    return "it ends too early: something is missing on the right."


KINDS = {
    "INT": "a whole number", "HUGEINT": "a whole number", "DOUBLE": "a number", "FLOAT": "a number",
    "BOOL": "a truth value", "BOOLEAN": "a truth value", "DECIMAL": "a number", "DATE": "a date",
}  # fmt: skip
"""What the database calls a value, in words. Sizes in bits are left out."""

REASONS: list[tuple[str, Callable[[re.Match, str, ColumnNames], str]]] = [
    (r'Referenced column "(.*?)" not found', _unknown_column),
    (r'Referenced table "(.*?)" not found', _unknown_table),
    (r"Could not convert string '(.*?)' to (\w+)(?: when casting from source column (\w+))?", _wrong_type),
    (r"No function matches|Cannot compare values|Unimplemented type for cast|Cannot mix values", _wrong_kinds),
    (r"Function with name (\S+) does not exist", _unknown_function),
    (r'Function "(\w+)" is a table function', _table_function),
    (r"Values were not provided|parameter", _parameter),
    (r"Cannot extract field", _wrong_kinds),
    (r"GROUP BY clause|aggregates? ", _over_all_visits),
    (r"unterminated", _unfinished_text),
    (r'syntax error at (?:or near "(.*?)"|end of input)', _syntax),
]
"""Parts of the database's messages, and what they mean."""
