"""An explorer from the options of a command: paths, a model factory, data files."""

from pathlib import Path

from dualform.explain import open_memory

from ..examples import load_examples, load_vocabulary
from ..factory import make_model
from .explorer import Explorer
from .work import WorkQueue


def make_explorer(
    path: Path,
    model: str,
    data: str | None,
    test: str | None,
    classes: str | None = None,
    tokens: str | None = None,
    index: str = "index",
    length: int = 100,
    work_queue: WorkQueue | None = None,
) -> Explorer:
    """Open a memory, make its network and load the examples. The weights come from the memory.

    Without test examples the pages ask about training examples.
    """
    memory, network, vocabulary = open_memory(path), make_model(model), load_vocabulary(tokens)
    train_examples, test_examples = (
        None if name is None else load_examples(name, network, vocabulary=vocabulary, length=length)
        for name in (data, test)
    )
    names = None if classes is None else [name.strip() for name in classes.split(",")]
    return Explorer(memory, network, train_examples, test_examples, names, index, work_queue=work_queue or WorkQueue())
