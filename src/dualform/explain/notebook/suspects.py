"""Suspects as people see them: examples whose label looks wrong, with the label that the others suggest."""

from typing import TYPE_CHECKING

from .hits import example_table, example_tiles
from .illustrations import illustrations_of
from .markup import card

if TYPE_CHECKING:
    from ..suspects import Suspects

SHOWN = 12


def suspects_html(suspects: "Suspects") -> str:
    """The most suspicious examples, as pictures or with the chance that the label is wrong as a bar."""
    looks, lines = illustrations_of(suspects.folder), suspects.table.slice(0, SHOWN).to_pylist()
    changes = [f"{suspects.class_name(line['label'])} → {suspects.class_name(line['suggested'])}" for line in lines]
    if looks is not None and looks.kind == "pictures":
        content = example_tiles(
            looks,
            [
                (line["index"], change, {"index": line["index"], "score": f"{line['score']:.3f}"}, "")
                for line, change in zip(lines, changes, strict=True)
            ],
        )
    else:
        examples = [
            (
                line["index"],
                line["score"],
                {"index": line["index"], "label → suggested": change, "loss": line["loss"], "visits": line["visits"]},
                "",
            )
            for line, change in zip(lines, changes, strict=True)
        ]
        content = example_table(examples, looks, "score")
    return card("Training examples whose label looks wrong", content, notes=(suspects.summary,))
