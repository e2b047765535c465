"""The command line: verbs over the same objects that Python users hold."""

import sys
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option
from typer.core import TyperGroup

from dualform.errors import DualformError, QueryError
from dualform.explain import open_memory
from dualform.types import Score

from ..examples import Examples, is_series, load_examples, load_vocabulary
from ..factory import load_weights, make_model
from ..inputs import as_inputs, count_rows, parse_rows, read_beside, read_rows, together
from ..report import choose, write_report
from ..text import size
from ..views import ExamplePlace, WorkDesk, make_explorer
from . import demo as demonstration
from . import reproduce as experiments
from .ask import RowQuestion, see_that_they_agree, tell
from .heads import HeadsInputs, tell_heads, write_page
from .inspect import describe


class Commands(TyperGroup):
    """Says every error of ours as one sentence, and what Ctrl-C means."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        _replace_what_cannot_be_encoded()
        errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        try:
            return super().invoke(ctx)
        except DualformError as error:
            if ctx.params.get("debug"):
                raise
            errors.print(f"{type(error).__name__}: {error}")
            raise typer.Exit(1) from error
        except OSError as error:
            if ctx.params.get("debug") or error.filename is None:
                raise
            errors.print(f"cannot use {error.filename}: {error.strerror}.")
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            errors.print("\nStopped. What was complete is on disk; run the same command again to start over.")
            raise typer.Exit(130) from error


def _replace_what_cannot_be_encoded() -> None:
    """Print "?" for a character that the encoding of the terminal or file lacks (cp1252 on Windows lacks "▓")."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    help="Which training examples is this prediction made of?",
    epilog="Start with [bold]dualform demo[/]. docs/cli.md says more.",
)
MemoryPath = Annotated[Path, Argument(help="The folder of a memory, made by dualform.record.", show_default=False)]
ModelName = Annotated[str, Option(help="How to make the model: package.module:factory, with plain arguments if any.")]
TrainingOption = Annotated[
    str | None,
    Option(
        help="The training examples, in the order of their index: a file (inputs, labels), or package.module:factory."
    ),
]
TestsOption = Annotated[
    str | None, Option(help="Examples to ask about: a file (inputs, labels), or package.module:factory.")
]
ClassesOption = Annotated[str | None, Option(help="What the classes are called: cat,dog,…")]
TokensOption = Annotated[
    str | None, Option(help="What tokens stand for: 'bytes', a .json or .txt list, or a tokenizer.json.")
]
IndexOption = Annotated[str, Option(help="The column that says which training example a visit was of.")]
LengthOption = Annotated[int, Option(help="Of one long text: the tokens of an example.", min=1)]


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"dualform {version('dualform')}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    debug: Annotated[bool, Option("--debug", envvar="DUALFORM_DEBUG", help="Show where an error comes from.")] = False,
    version: Annotated[bool, Option("--version", help="Say which version this is.", callback=_version)] = False,
) -> None:
    """Options of all commands."""


@app.command(epilog="[bold]Example:[/] dualform demo --out runs/demo")
def demo(
    out: Annotated[Path, Option(help="The folder for the memory, the figures and the report.")] = Path("runs/demo"),
    steps: Annotated[int, Option(help="How many steps to train.", min=1)] = demonstration.STEPS,
) -> None:
    """Record a small network on real digits, then ask it what three of its predictions are made of."""
    demonstration.run(out, steps, _console())


@app.command(epilog="[bold]Example:[/] dualform inspect runs/demo/memory")
def inspect(path: MemoryPath) -> None:
    """Show what is in a memory: steps, visits, columns, layers, sizes on disk, marks, and how exact it is."""
    describe(open_memory(path), _console())


EXAMPLES = """[bold]Examples:[/]

dualform ask runs/demo/memory --model 'dualform.models:MLP(784, 128, 10)' --data runs/demo/test.npz --rows 0,3,5

dualform ask runs/mine --model train:make_model --data test.npz --key images --layer fc1 --score abs --by source"""


@app.command(epilog=EXAMPLES)
def ask(
    path: MemoryPath,
    model: ModelName,
    data: Annotated[Path, Option(help="Inputs as the model saw them: .npy, .npz, .csv, .parquet, .safetensors.")],
    rows: Annotated[str, Option(help="Which rows of the file: 0,3,5 or 10:14.")] = "0",
    key: Annotated[str | None, Option(help="The array in the file, or the columns of a table: a,b,c.")] = None,
    weights: Annotated[Path | None, Option(help="Weights to see that they are the memory's: .safetensors.")] = None,
    step: Annotated[int | None, Option(help="Read the memory as it stood after this step.")] = None,
    layer: Annotated[str | None, Option(help="The layer to ask; by default the last one.")] = None,
    by: Annotated[str | None, Option(help="Sum over the groups of this column; by default label.")] = None,
    k: Annotated[int, Option("-k", help="How many examples, and groups at either end.", min=1)] = 10,
    score: Annotated[Score, Option(help="What counts: the contribution, the weight α, or |α|.")] = "contribution",
    target: Annotated[int | None, Option(help="Explain this class; by default the predicted one.")] = None,
    without: Annotated[str | None, Option(help="Also predict with visits masked out, as in 'label = 3'.")] = None,
    train: TrainingOption = None,
    classes: ClassesOption = None,
    tokens: TokensOption = None,
    index: IndexOption = "index",
) -> None:
    """Show which training examples the predictions for some rows of a file are made of."""
    memory = open_memory(path) if step is None else open_memory(path).at(step)
    network = make_model(model)
    if weights is not None:
        see_that_they_agree(memory, load_weights(network, weights), weights)
    numbers = parse_rows(rows)
    inputs, others = as_inputs(read_rows(data, numbers, key), network), read_beside(data, numbers, network)
    vocabulary, names = load_vocabulary(tokens), None if classes is None else classes.split(",")
    series = is_series(inputs.shape[1:], others, network)
    asked = Examples(inputs, None, vocabulary, series=series, others=others) if inputs.ndim > 1 else None
    known = None if train is None else load_examples(train, network, vocabulary=vocabulary)
    question = RowQuestion(layer or memory.layers[-1], by, k, score, target, without, asked, known, index, names)
    tell(memory, network, together(inputs, others, network), numbers, question, _console())


SERVE = """[bold]Examples:[/]

dualform serve runs/demo/memory --model 'dualform.models:MLP(784, 128, 10)' --data runs/demo/train.npz --test runs/demo/test.npz

dualform serve runs/mine --model train:make_model --data train:training_set --test train:test_set --classes cat,dog"""  # noqa: E501


REPORT = """[bold]Example:[/]

dualform report runs/demo/memory --model 'dualform.models:MLP(784, 128, 10)' --data runs/demo/train.npz --test runs/demo/test.npz --examples 20 -o report.html"""  # noqa: E501


@app.command(epilog=REPORT)
def report(
    path: MemoryPath,
    model: ModelName,
    data: TrainingOption = None,
    test: TestsOption = None,
    classes: ClassesOption = None,
    tokens: TokensOption = None,
    index: IndexOption = "index",
    length: LengthOption = 100,
    examples: Annotated[int, Option(help="How many predictions to explain.", min=1, max=200)] = 20,
    rows: Annotated[str | None, Option(help="Which test rows, as in 0,3,5; by default the most telling ones.")] = None,
    weigh: Annotated[int, Option(help="Test examples to weigh the training set by; 0 for none.", min=0)] = 200,
    title: Annotated[str, Option(help="The heading.")] = "Which training examples are these predictions made of?",
    out: Annotated[Path, Option("-o", "--out", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one page that shows what predictions are made of: a single file that needs nothing else."""
    desk = WorkDesk(patience=float("inf"), tell=True)
    explorer = make_explorer(path, model, data, test, classes, tokens, index, length, desk)
    name = "test" if explorer.test is not None else "train"
    chosen = (
        choose(explorer, examples)
        if rows is None
        else {ExamplePlace(name, row): f"{name} example {row}" for row in parse_rows(rows)}
    )
    file = write_report(out, explorer, chosen, title=title, weigh=weigh)
    _console().print(f"The report is {file} ({size(file.stat().st_size)}).", soft_wrap=True)


@app.command(epilog=SERVE)
def serve(
    path: MemoryPath,
    model: ModelName,
    data: TrainingOption = None,
    test: TestsOption = None,
    classes: ClassesOption = None,
    tokens: TokensOption = None,
    index: IndexOption = "index",
    length: LengthOption = 100,
    host: Annotated[str, Option(help="Where to listen. Beyond this machine a token is needed.")] = "127.0.0.1",
    port: Annotated[int, Option(help="On which port; 0 for any that is free.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, Option(envvar="DUALFORM_TOKEN", help="What visitors must know; made up where one is needed.")
    ] = None,
    browser: Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Look at a memory in the browser: what predictions are made of, and what they would be without some training."""
    from ..web import serve as listen

    explorer = make_explorer(path, model, data, test, classes, tokens, index, length)
    listen(explorer, host, port, token, browser, _console())


HEADS = """[bold]Examples:[/]

dualform heads model.safetensors test.npz --model train:make_model

dualform heads runs/mine test.npz --model train:make_model --layer blocks.0.attn --moments 6 -o heads.html"""


@app.command(epilog=HEADS)
def heads(
    checkpoint: Annotated[Path, Argument(help="Weights (.safetensors), or the folder of a memory.")],
    data: Annotated[Path, Argument(help="Inputs as the model takes them: .npy, .npz, .csv, .parquet, .safetensors.")],
    model: ModelName,
    rows: Annotated[str | None, Option(help="Which rows of the file: 0,3,5 or 0:16; the first 16 if none.")] = None,
    key: Annotated[str | None, Option(help="The array in the file, or the columns of a table: a,b,c.")] = None,
    layer: Annotated[list[str] | None, Option(help="Attention layers to report on; all if none.")] = None,
    queries: Annotated[int, Option(help="How many queries, chosen by chance.", min=1)] = 256,
    above: Annotated[float, Option(help="Only queries with a weight above this.", min=0, max=1)] = 0.0,
    null: Annotated[int, Option(help="Random matrices to hold beside.", min=0)] = 5,
    nuclear: Annotated[bool, Option("--nuclear/--no-nuclear", help="Also solve for the nuclear norm.")] = True,
    moments: Annotated[int, Option(help="Of a memory: at how many moments of training, too.", min=0)] = 0,
    seed: Annotated[int, Option(help="What chance begins with.", min=0, max=2**31)] = 0,
    tokens: TokensOption = None,
    out: Annotated[Path | None, Option("-o", "--out", help="Also write a page, as one file.")] = None,
) -> None:
    """Report on attention heads: what they select, what separates it, by what margin, and what holds the margin up."""
    network = make_model(model)
    numbers = list(range(min(16, count_rows(data, key)))) if rows is None else parse_rows(rows)
    memory = open_memory(checkpoint) if checkpoint.is_dir() else None
    if moments and memory is None:
        raise QueryError(f"--moments are of a memory, which knows earlier weights, and {checkpoint} is a file.")
    if out is not None and not out.parent.is_dir():
        raise QueryError(f"there is no folder {out.parent} to write {out.name} to.")
    if memory is None:
        load_weights(network, checkpoint)
    weights = None if memory is None else memory.weights_for(network)
    inputs, others = as_inputs(read_rows(data, numbers, key), network), read_beside(data, numbers, network)
    words = inputs if inputs.ndim == 2 and not inputs.is_floating_point() else None
    asked = HeadsInputs(network, together(inputs, others, network), words, weights, memory, load_vocabulary(tokens))
    options = {"queries": queries, "above": above, "null": null, "nuclear": nuclear, "seed": seed}
    found, path, notes = tell_heads(asked, layer or [], moments, options, _console())
    if out is not None:
        facts = {"weights": str(checkpoint), "inputs": f"{len(numbers)} rows of {data.name}", "seed": str(seed)}
        file = write_page(out, asked, found, path, notes, facts)
        _console().print(f"The page is {file} ({size(file.stat().st_size)}).", soft_wrap=True)


@app.command(
    epilog="[bold]Examples:[/]\n\ndualform reproduce\n\ndualform reproduce dual-form/single\n\n"
    "dualform reproduce dual-form --quick"
)
def reproduce(
    experiment: Annotated[
        str | None, Argument(help="paper/experiment, or a paper for all of it; none lists them.")
    ] = None,
    variant: Annotated[
        list[str] | None, Option(help="Settings that the sources leave open, by name; all if none.")
    ] = None,
    seeds: Annotated[int, Option(help="How many networks to train; 0 for as many as the results page has.", min=0)] = 0,
    out: Annotated[Path, Option(help="The folder of the runs. What has its result there is not run again.")] = Path(
        "runs"
    ),
    quick: Annotated[
        bool, Option("--quick", help="A few steps of small networks: to see that all of it runs.")
    ] = False,
    threads: Annotated[int, Option(help="Of torch; 0 for as many as torch takes.", min=0)] = 0,
    keep: Annotated[bool, Option("--keep", help="Keep the memories, some gigabytes each.")] = False,
) -> None:
    """Run an experiment of a paper again: settings, versions, results and figures end up in a folder."""
    if experiment is None:
        _console().print("\n".join(experiments.known()))
        return
    experiments.reproduce(experiment, variant or [], seeds=seeds, out=out, quick=quick, threads=threads, keep=keep)


def _console() -> Console:
    return Console(highlight=False)
