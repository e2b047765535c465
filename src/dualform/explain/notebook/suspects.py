"""Suspects as people see them: examples whose label looks wrong, and how much examples speak for themselves."""

from typing import TYPE_CHECKING

from .hits import example_table, example_tiles
from .illustrations import illustrations_of
from .markup import card
from .text import same_digits, visible_text

if TYPE_CHECKING:
    from ..suspects import SelfInfluence, Suspects

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


def self_influence_html(influence: "SelfInfluence") -> str:
    """The examples that add most to a number about themselves, as pictures or with a bar."""
    looks, visits = (
        illustrations_of(influence.folder),
        dict(zip(influence.index.tolist(), influence.visits.tolist(), strict=True)),
    )
    largest = influence.largest(SHOWN)
    lines = [(index, value, {"index": index, "visits": visits[index]}) for index, value in largest]
    if looks is not None and looks.kind == "pictures":
        numbers = same_digits(value for _, value, _ in lines)
        content = example_tiles(
            looks, [(index, number, noted, "") for (index, _, noted), number in zip(lines, numbers, strict=True)]
        )
    else:
        content = example_table([(*line, "") for line in lines], looks, "adds")
    place = visible_text(", ".join(influence.layers), 200)
    left_out = [f"Left out: {name}, as {reason}." for name, reason in influence.left_out.items()]
    return card(f"Examples that add most to their own {influence.target}, through {place}", content, notes=left_out)
