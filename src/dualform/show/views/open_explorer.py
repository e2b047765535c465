"""An explorer from names: of a memory, a model, and examples."""

from pathlib import Path

from dualform.explain import open_memory

from ..examples import load_examples, load_vocabulary
from ..factory import make_model
from .explorer import Explorer
from .work import WorkDesk


def make_explorer(
    path: Path,
    model: str,
    data: str | None,
    test: str | None,
    classes: str | None = None,
    tokens: str | None = None,
    index: str = "index",
    length: int = 100,
    desk: WorkDesk | None = None,
) -> Explorer:
    """Open what the names say. The weights are the memory's; without test examples the training examples are asked."""
    memory, network, vocabulary = open_memory(path), make_model(model), load_vocabulary(tokens)
    some, others = (
        None if name is None else load_examples(name, network, vocabulary=vocabulary, length=length)
        for name in (data, test)
    )
    names = None if classes is None else [name.strip() for name in classes.split(",")]
    return Explorer(memory, network, some, others, names, index, desk=desk or WorkDesk())
