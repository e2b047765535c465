"""The command line: each command is a few lines over the objects that Python users have."""

import sys
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
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
from ..views import ExamplePlace, WorkQueue, make_explorer
from . import demo as demonstration
from . import evaluate as evaluation
from . import reproduce as experiments
from .ask import RowQuestion, as_target, print_answers, require_memory_weights
from .heads import HeadsInputs, print_reports, write_page
from .help import print_help
from .inspect import print_contents
from .program import program
from .suspects import print_suspects

PROGRAM = escape(program())


class Commands(TyperGroup):
    """Prints every error of ours as one sentence without a traceback, and ends cleanly on Ctrl-C."""

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
            errors.print(
                "\nStopped. Everything that was complete is on disk. To start over, run the same command again."
            )
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
    epilog=f"Start with [bold]{PROGRAM} demo[/]. See docs/cli.md for more.",
)
MemoryPath = Annotated[Path, Argument(help="Folder of a memory written by dualform.record.", show_default=False)]
ModelName = Annotated[
    str, Option(help="Model factory as package.module:factory, with literal arguments in parentheses if it takes any.")
]
TrainingOption = Annotated[
    str | None,
    Option(help="Training examples in index order: a file with inputs and labels, or package.module:factory."),
]
TestsOption = Annotated[
    str | None, Option(help="Examples to ask about: a file with inputs and labels, or package.module:factory.")
]
ClassesOption = Annotated[str | None, Option(help="Names of the classes: cat,dog,…")]
TokensOption = Annotated[
    str | None, Option(help="Vocabulary of token ids: 'bytes', a .json or .txt list, or a tokenizer.json.")
]
IndexOption = Annotated[str, Option(help="Column that holds the index of each visit's training example.")]
LengthOption = Annotated[int, Option(help="Tokens per example if the data is one long text.", min=1)]


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"dualform {version('dualform')}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    debug: Annotated[bool, Option("--debug", envvar="DUALFORM_DEBUG", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, Option("--version", help="Show the version and exit.", callback=_version)] = False,
) -> None:
    """Options of all commands."""


@app.command(epilog=f"[bold]Example:[/] {PROGRAM} demo --out runs/demo")
def demo(
    out: Annotated[Path, Option(help="Folder for the memory, the figures and the report.")] = Path("runs/demo"),
    steps: Annotated[int, Option(help="Number of training steps.", min=1)] = demonstration.STEPS,
) -> None:
    """Record a small network on real digits, then show what three of its predictions are made of."""
    demonstration.run(out, steps, _console())


@app.command(epilog=f"[bold]Example:[/] {PROGRAM} inspect runs/demo/memory")
def inspect(path: MemoryPath) -> None:
    """Show what a memory holds: steps, visits, columns, layers, sizes on disk, certificate and marks."""
    print_contents(open_memory(path), _console())


EXAMPLES = f"""[bold]Examples:[/]

{PROGRAM} ask runs/demo/memory --model 'dualform.models:MLP(784, 128, 10)' --data runs/demo/test.npz --rows 0,3,5

{PROGRAM} ask runs/mine --model train:make_model --data test.npz --key images --layer fc1 --score abs --by source"""


@app.command(epilog=EXAMPLES)
def ask(
    path: MemoryPath,
    model: ModelName,
    data: Annotated[Path, Option(help="Inputs, prepared as in training: .npy, .npz, .csv, .parquet, .safetensors.")],
    rows: Annotated[str, Option(help="Rows of the file to ask about: 0,3,5 or 10:14.")] = "0",
    key: Annotated[str | None, Option(help="Array in the file, or columns of a table: a,b,c.")] = None,
    weights: Annotated[Path | None, Option(help="Check that this .safetensors file has the memory's weights.")] = None,
    step: Annotated[int | None, Option(help="Read the memory as it was after this step.")] = None,
    layer: Annotated[str | None, Option(help="Layer to ask. Default: the last one.")] = None,
    by: Annotated[
        str | None, Option(help="Sum over the groups of this column. Default: label if noted, else step.")
    ] = None,
    k: Annotated[int, Option("-k", help="Number of training examples, and of groups at either end.", min=1)] = 10,
    score: Annotated[Score, Option(help="Rank by the contribution, the weight α, or |α|.")] = "contribution",
    target: Annotated[
        str | None,
        Option(
            help="Explain the logit of this class, or the 'margin' or the 'loss' of the label that --data has of the "
            "row. Default: the logit of the predicted class."
        ),
    ] = None,
    without: Annotated[str | None, Option(help="Also predict without these visits, as in 'label = 3'.")] = None,
    train: TrainingOption = None,
    classes: ClassesOption = None,
    tokens: TokensOption = None,
    index: IndexOption = "index",
) -> None:
    """Show which training examples the predictions for rows of a file are made of."""
    memory = open_memory(path) if step is None else open_memory(path).at(step)
    network = make_model(model)
    if weights is not None:
        require_memory_weights(memory, load_weights(network, weights), weights)
    numbers = parse_rows(rows)
    inputs, named_inputs = as_inputs(read_rows(data, numbers, key), network), read_beside(data, numbers, network)
    vocabulary, names = load_vocabulary(tokens), None if classes is None else classes.split(",")
    series = is_series(inputs.shape[1:], named_inputs, network)
    shown_inputs = Examples(inputs, None, vocabulary, series=series, others=named_inputs) if inputs.ndim > 1 else None
    train_examples = None if train is None else load_examples(train, network, vocabulary=vocabulary)
    question = RowQuestion(
        layer or memory.layers[-1],
        by,
        k,
        score,
        as_target(target, data, network, numbers),
        without,
        shown_inputs,
        train_examples,
        index,
        names,
    )
    print_answers(memory, network, together(inputs, named_inputs, network), numbers, question, _console())


SUSPECTS = f"""[bold]Example:[/]

{PROGRAM} suspects runs/demo/memory --model 'dualform.models:MLP(784, 128, 10)' --data runs/demo/train.npz -o suspects.csv"""  # noqa: E501


@app.command(epilog=SUSPECTS)
def suspects(
    path: MemoryPath,
    model: ModelName,
    data: Annotated[
        str, Option(help="Training examples in index order: a file with inputs and labels, or package.module:factory.")
    ],
    step: Annotated[int | None, Option(help="Read the memory as it was after this step.")] = None,
    k: Annotated[int, Option("-k", help="Number of suspects to print.", min=1)] = 10,
    classes: ClassesOption = None,
    tokens: TokensOption = None,
    index: IndexOption = "index",
    out: Annotated[Path | None, Option("-o", "--out", help="CSV file to write with all examples and scores.")] = None,
) -> None:
    """Find training examples whose label looks wrong, with the label that the others suggest."""
    memory = open_memory(path) if step is None else open_memory(path).at(step)
    network = make_model(model)
    examples = load_examples(data, network, vocabulary=load_vocabulary(tokens))
    names = () if classes is None else tuple(name.strip() for name in classes.split(","))
    print_suspects(memory, network, examples, data, names, index, k, out, _console())


SERVE = f"""[bold]Examples:[/]

{PROGRAM} serve runs/demo/memory --model 'dualform.models:MLP(784, 128, 10)' --data runs/demo/train.npz --test runs/demo/test.npz

{PROGRAM} serve runs/mine --model train:make_model --data train:training_set --test train:test_set --classes cat,dog"""  # noqa: E501


REPORT = f"""[bold]Example:[/]

{PROGRAM} report runs/demo/memory --model 'dualform.models:MLP(784, 128, 10)' --data runs/demo/train.npz --test runs/demo/test.npz --examples 20 -o report.html"""  # noqa: E501


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
    examples: Annotated[int, Option(help="Number of predictions to explain.", min=1, max=200)] = 20,
    rows: Annotated[
        str | None, Option(help="Explain these test rows: 0,3,5. Default: mistakes, close calls and sure predictions.")
    ] = None,
    weigh: Annotated[
        int, Option(help="Number of test examples to weigh the training set over; 0 skips it.", min=0)
    ] = 200,
    title: Annotated[
        str, Option(help="Heading of the page.")
    ] = "Which training examples are these predictions made of?",
    out: Annotated[Path, Option("-o", "--out", help="File to write.")] = Path("report.html"),
) -> None:
    """Write a report of what predictions are made of, as one HTML file that needs nothing else."""
    queue = WorkQueue(patience=float("inf"), progress=True)
    explorer = make_explorer(path, model, data, test, classes, tokens, index, length, queue)
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
    host: Annotated[
        str, Option(help="Address to listen on. Other than on this machine, visitors need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None,
        Option(envvar="DUALFORM_TOKEN", help="Access token for visitors; generated and printed if one is needed."),
    ] = None,
    browser: Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Explore a memory in the browser: what predictions are made of, and what they would be without some training."""
    from ..web import serve as listen

    explorer = make_explorer(path, model, data, test, classes, tokens, index, length)
    listen(explorer, host, port, token, browser, _console())


EVALUATE = f"""[bold]Example:[/]

{PROGRAM} evaluate runs/demo/memory --model 'dualform.models:MLP(784, 128, 10)' --data runs/demo/train.npz --test runs/demo/test.npz"""  # noqa: E501


@app.command(epilog=EVALUATE)
def evaluate(
    path: MemoryPath,
    model: ModelName,
    data: Annotated[
        str, Option(help="Training examples in index order: a file with inputs and labels, or package.module:factory.")
    ],
    test: Annotated[
        str, Option(help="Examples to ask about: a file with inputs and labels, or package.module:factory.")
    ],
    queries: Annotated[int, Option(help="Number of test examples to ask about, from the first on.", min=1)] = 20,
    subsets: Annotated[int, Option(help="Number of trainings, each without a random subset.", min=2)] = 50,
    drop: Annotated[float, Option(help="Share of the training examples that each leaves out.", min=0, max=1)] = 0.1,
    seed: Annotated[int, Option(help="Seed of the subsets.", min=0, max=2**31)] = 0,
    processes: Annotated[
        int | None, Option(help="Trainings at a time. Default: one a core.", min=1, show_default=False)
    ] = None,
    index: IndexOption = "index",
    folder: Annotated[
        Path | None,
        Option(
            help="Folder for the figure, the numbers and the trainings; the same folder resumes. "
            "Default: PATH-evaluated.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train again without random subsets, and show how well influence and contributions predict what comes out."""
    network = make_model(model)
    training, tests = (load_examples(name, network) for name in (data, test))
    plan = evaluation.Plan(queries, subsets, drop, seed, processes, index)
    out = folder or path.with_name(path.name + "-evaluated")
    evaluation.run(open_memory(path), network, training, tests, plan, out, _console())


HEADS = f"""[bold]Examples:[/]

{PROGRAM} heads model.safetensors test.npz --model train:make_model

{PROGRAM} heads runs/mine test.npz --model train:make_model --layer blocks.0.attn --moments 6 -o heads.html"""


@app.command(epilog=HEADS)
def heads(
    checkpoint: Annotated[Path, Argument(help="Weights as a .safetensors file, or the folder of a memory.")],
    data: Annotated[Path, Argument(help="Inputs, prepared as in training: .npy, .npz, .csv, .parquet, .safetensors.")],
    model: ModelName,
    rows: Annotated[str | None, Option(help="Rows of the file to use: 0,3,5 or 0:16. Default: the first 16.")] = None,
    key: Annotated[str | None, Option(help="Array in the file, or columns of a table: a,b,c.")] = None,
    layer: Annotated[list[str] | None, Option(help="Attention layer to report on; repeatable. Default: all.")] = None,
    queries: Annotated[int, Option(help="Number of queries to sample at random.", min=1)] = 256,
    above: Annotated[float, Option(help="Use only queries with an attention weight above this.", min=0, max=1)] = 0.0,
    null: Annotated[int, Option(help="Number of random matrices to compare with.", min=0)] = 5,
    nuclear: Annotated[bool, Option("--nuclear/--no-nuclear", help="Also solve for the nuclear norm.")] = True,
    moments: Annotated[int, Option(help="Also report at this many moments of training; needs a memory.", min=0)] = 0,
    seed: Annotated[int, Option(help="Seed of the random choices.", min=0, max=2**31)] = 0,
    tokens: TokensOption = None,
    out: Annotated[Path | None, Option("-o", "--out", help="Also write the report as one HTML file.")] = None,
) -> None:
    """Report on attention heads: what each selects, what separates it, by what margin, and the support tokens."""
    network = make_model(model)
    numbers = list(range(min(16, count_rows(data, key)))) if rows is None else parse_rows(rows)
    memory = open_memory(checkpoint) if checkpoint.is_dir() else None
    if moments and memory is None:
        raise QueryError(
            f"--moments needs a memory, which holds the weights of earlier steps, but {checkpoint} is a file. Give the "
            "folder of a memory, or leave out --moments."
        )
    if out is not None and not out.parent.is_dir():
        raise QueryError(f"there is no folder {out.parent} to write {out.name} to. Create it first.")
    if memory is None:
        load_weights(network, checkpoint)
    weights = None if memory is None else memory.weights_for(network)
    inputs, named_inputs = as_inputs(read_rows(data, numbers, key), network), read_beside(data, numbers, network)
    words = inputs if inputs.ndim == 2 and not inputs.is_floating_point() else None
    heads_inputs = HeadsInputs(
        network, together(inputs, named_inputs, network), words, weights, memory, load_vocabulary(tokens)
    )
    options = {"queries": queries, "above": above, "null": null, "nuclear": nuclear, "seed": seed}
    reports, path, notes = print_reports(heads_inputs, layer or [], moments, options, _console())
    if out is not None:
        facts = {"weights": str(checkpoint), "inputs": f"{len(numbers)} rows of {data.name}", "seed": str(seed)}
        file = write_page(out, heads_inputs, reports, path, notes, facts)
        _console().print(f"The page is {file} ({size(file.stat().st_size)}).", soft_wrap=True)


@app.command(
    epilog=f"[bold]Examples:[/]\n\n{PROGRAM} reproduce\n\n{PROGRAM} reproduce dual-form/single\n\n"
    f"{PROGRAM} reproduce dual-form --quick"
)
def reproduce(
    experiment: Annotated[
        str | None, Argument(help="paper/experiment, or a paper for all its experiments. Without it, list all.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        Option(help="Variant to run, where the paper leaves a setting open; repeatable. Default: all."),
    ] = None,
    seeds: Annotated[
        int, Option(help="Networks to train per variant; 0 trains as many as the results page.", min=0)
    ] = 0,
    out: Annotated[Path, Option(help="Folder of the runs. Finished runs in it are not repeated.")] = Path("runs"),
    quick: Annotated[
        bool, Option("--quick", help="Train small networks for a few steps, to check that everything runs.")
    ] = False,
    threads: Annotated[int, Option(help="Number of torch threads; 0 leaves the choice to torch.", min=0)] = 0,
    keep: Annotated[bool, Option("--keep", help="Keep the memories, several gigabytes each.")] = False,
) -> None:
    """Repeat an experiment of a paper. Settings, versions, results and figures are written to a folder."""
    if experiment is None:
        _console().print("\n".join(experiments.experiment_names()))
        return
    experiments.reproduce(experiment, variant or [], seeds=seeds, out=out, quick=quick, threads=threads, keep=keep)


@app.command("help", epilog="[bold]Examples:[/]\n\ndualform help NoteError\n\ndualform help edited")
def explain_name(
    name: Annotated[str | None, Argument(help="An error or a mark; without a name all of them are listed.")] = None,
) -> None:
    """Explain an error or a mark: what happened, and what to do about it."""
    print_help(name, _console())


def _console() -> Console:
    return Console(highlight=False)
