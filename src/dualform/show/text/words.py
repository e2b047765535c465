"""Numbers and answers in words: units, sums of parts, sizes."""

from dualform.explain import Groups, Memory
from dualform.explain.notebook import same_digits
from dualform.types import Score

MASKED = (
    "A mask removes direct contributions with everything else held fixed. It shows what the weights are made of, not "
    "what training without these examples would have produced."
)
WHOLE_NETWORK = (
    "Each number is the first-order effect of taking the example out of all layers at once. The parts of several "
    "layers do not add up to the logit; those of one layer do: --layer."
)
FIRST_ORDER = (
    "This is not the last layer, so contributions are followed through later layers to first order. The parts still "
    "sum to the layer's own part."
)


def unit(score: Score, target: str) -> str:
    """What a score measures, in words."""
    return {
        "contribution": f"what each adds to {target}",
        "weight": "the weight α = key · query, a similarity without a unit",
        "abs": "the absolute weight |α|, a similarity without a unit",
    }[score]


def parts(groups: Groups, query: int = 0) -> dict[str, float]:
    """The parts that sum to the total, by name."""
    assert groups.initial is not None
    if groups.bias is None:
        return {
            "training": float(groups.values[query].sum()),
            "initial weights and what is not explained": float(groups.initial[query]),
        }
    return {
        "training, in the weights": float(groups.values[query].sum()),
        "training, in the bias": float(groups.bias[query].sum()),
        "initial weights": float(groups.initial[query]),
    }


def sum_check(groups: Groups, query: int = 0) -> str:
    """A sentence with the parts, their sum and the residual."""
    assert groups.total is not None and groups.residual is not None
    *numbers, total = same_digits([*parts(groups, query).values(), float(groups.total[query])])
    named = " ".join(f"{number} ({name})" for number, name in zip(numbers, parts(groups, query), strict=True))
    what = f"everything that layer {groups.layer} adds to {groups.target}"
    if not groups.layer:
        what = f"the first-order effect of all explained layers together on {groups.target}"
    return f"The parts sum to the whole: {named} = {total}, {what}; residual {float(groups.residual[query]):+.0e}."


def size(count: int | float) -> str:
    """A number of bytes in a readable unit."""
    names = iter(("bytes", "kB", "MB", "GB", "TB"))
    name = next(names)
    while count >= 1000 and name != "TB":
        count, name = count / 1000, next(names)
    return f"{count:.1f} {name}" if name != "bytes" and count < 100 else f"{count:,.0f} {name}"


def disk_size(memory: Memory) -> int:
    """The size of a memory on disk in bytes."""
    return sum(memory.store.file_sizes.values())
