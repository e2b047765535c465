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
from typer.main import get_command

from dualform.errors import DualformError, QueryError
from dualform.explain import open_memory
from dualform.progress import quietly
from dualform.types import Per, Score

from ..described import Described, MemoryToOpen
from ..examples import load_examples, load_vocabulary
from ..factory import load_weights, make_model
from ..inputs import parse_rows, together
from ..report import choose, write_report
from ..text import size
from ..views import ExamplePlace, WorkQueue
from . import demo as demonstration
from . import evaluate as evaluation
from . import reproduce as experiments
from .as_json import print_json
from .ask import RowQuestion, as_target, print_answers, require_memory_weights
from .data_options import ColumnsOption, MemoryPath, TokensOption, takes_data
from .heads import HeadsInputs, print_reports, write_page
from .help import print_help, texts
from .inspect import contents, print_contents
from .program import program
from .shell import Shell, after_interrupt, script, warnings_as_sentences
from .suspects import find_suspects, print_suspects, write_suspects

PROGRAM = escape(program())


ANYWHERE = ("--quiet", "-q", "--debug")
"""Options of all commands, which may stand before the command or after it."""


class Commands(TyperGroup):
    """Prints every error of ours as one sentence without a traceback, and ends cleanly on Ctrl-C."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words that were typed; options of all commands are moved to the front."""
        ctx.meta["dualform.words"] = list(args)
        end = args.index("--") if "--" in args else len(args)
        first = [word for word in args[:end] if word in ANYWHERE]
        return super().parse_args(ctx, [*first, *(word for word in args[:end] if word not in ANYWHERE), *args[end:]])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that was typed, and remember its options for the case of Ctrl-C."""
        name, command, rest = super().resolve_command(ctx, args)
        ctx.meta["dualform.command"] = (name, command, list(rest))
        return name, command, rest

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by its name. Its flags are shown as flags, not as options with a value."""
        command = super().get_command(ctx, cmd_name)
        return None if command is None else _with_bare_flags(command, command.get_params(ctx))

    def get_params(self, ctx: Any) -> Any:
        """The options before the command."""
        params = super().get_params(ctx)
        _with_bare_flags(self, params)
        return params

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        _replace_what_cannot_be_encoded()
        errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        try:
            with warnings_as_sentences(errors):
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
            name, command, rest = ctx.meta["dualform.command"]
            values = command.make_context(name, rest, parent=ctx, resilient_parsing=True).params
            errors.print(f"\n{after_interrupt(name, values, ctx.meta['dualform.words'])}")
            raise typer.Exit(130) from error


def _with_bare_flags(command: Any, params: Any) -> Any:
    """A command whose flags have no ``<bool>`` in the help."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return command


def _replace_what_cannot_be_encoded() -> None:
    """Print "?" for a character that the encoding of the terminal or file lacks (cp1252 on Windows lacks "▓")."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    help="Which training examples is this prediction made of?",
    epilog=f"Start with [bold]{PROGRAM} demo[/]. [bold]{PROGRAM} COMMAND -h[/] says more.",
)
ModelName = Annotated[
    str, Option(help="Model factory as package.module:factory, with literal arguments in parentheses if it takes any.")
]
JsonOption = Annotated[bool, Option("--json", help="Print the result as JSON.")]


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"dualform {version('dualform')}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    context: typer.Context,
    quiet: Annotated[
        bool, Option("--quiet", "-q", help="Print results only: no progress, no estimates, no hints.")
    ] = False,
    debug: Annotated[bool, Option("--debug", envvar="DUALFORM_DEBUG", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, Option("--version", help="Show the version and exit.", callback=_version)] = False,
) -> None:
    """Options of all commands."""
    if quiet:
        context.with_resource(quietly())


@app.command(epilog=f"[bold]Example:[/] {PROGRAM} demo --out runs/demo")
def demo(
    out: Annotated[Path, Option(help="Folder for the memory, the figures and the report.")] = Path("runs/demo"),
    steps: Annotated[int, Option(help="Number of training steps.", min=1)] = demonstration.STEPS,
) -> None:
    """Record a small network on real digits, then show what three of its predictions are made of."""
    demonstration.run(out, steps, _console())


@app.command(epilog=f"[bold]Example:[/] {PROGRAM} inspect runs/demo/memory")
def inspect(path: MemoryPath, json: JsonOption = False) -> None:
    """Show what a memory holds: steps, visits, columns, layers, sizes on disk, certificate and marks."""
    print_json(contents(open_memory(path))) if json else print_contents(open_memory(path), _console())


EXAMPLES = f"""[bold]Examples:[/]

{PROGRAM} ask runs/demo/memory --rows 0,3,5

{PROGRAM} ask runs/mine --model train:make_model --data test.npz --columns images --layer fc1 --score abs --by source"""


@app.command(epilog=EXAMPLES)
@takes_data(train="train", test="data")
def ask(
    source: Described,
    rows: Annotated[str, Option(help="Rows of the examples to ask about: 0,3,5 or 10:14.")] = "0",
    weights: Annotated[Path | None, Option(help="Check that this .safetensors file has the memory's weights.")] = None,
    step: Annotated[int | None, Option(help="Read the memory as it was after this step.")] = None,
    layer: Annotated[
        str | None, Option(help="The exact account of this layer. Default: all layers together, to first order.")
    ] = None,
    per: Annotated[Per, Option(help="Rank training examples, single visits, or single slots of a layer.")] = "example",
    after: Annotated[int, Option(help="Leave out what training did up to this step.", min=0)] = 0,
    by: Annotated[
        str | None, Option(help="Sum over the groups of this column. Default: label if noted, else step.")
    ] = None,
    k: Annotated[int, Option("-k", help="Number of training examples, and of groups at either end.", min=1)] = 10,
    score: Annotated[Score, Option(help="Rank by the contribution, the weight α, or |α|.")] = "contribution",
    target: Annotated[
        str | None,
        Option(
            help="Explain the logit of this class, or the 'margin' or the 'loss' of the label that the row has. "
            "Default: the logit of the predicted class."
        ),
    ] = None,
    without: Annotated[str | None, Option(help="Also predict without these visits, as in 'label = 3'.")] = None,
    json: JsonOption = False,
) -> None:
    """Show which training examples the predictions for some rows are made of."""
    memory, network, numbers = source.memory, source.network, parse_rows(rows)
    memory = memory if step is None else memory.at(step)
    if weights is not None:
        require_memory_weights(memory, load_weights(network, weights), weights)
    examples = source.asked(numbers)
    question = RowQuestion(
        layer,
        per,
        by,
        k,
        score,
        as_target(target, examples),
        without,
        after,
        examples if examples.inputs.ndim > 1 else None,
        source.train,
        source.index,
        source.classes,
    )
    inputs = together(examples.inputs, examples.others, network)
    print_answers(memory, network, inputs, numbers, question, _console(), json=json)


SUSPECTS = f"""[bold]Example:[/]

{PROGRAM} suspects runs/demo/memory -o suspects.csv"""


@app.command(epilog=SUSPECTS)
@takes_data(test=None)
def suspects(
    source: Described,
    step: Annotated[int | None, Option(help="Read the memory as it was after this step.")] = None,
    k: Annotated[int, Option("-k", help="Number of suspects to print.", min=1)] = 10,
    out: Annotated[Path | None, Option("-o", "--out", help="CSV file to write with all examples and scores.")] = None,
    json: JsonOption = False,
) -> None:
    """Find training examples whose label looks wrong, with the label that the others suggest."""
    memory = source.memory if step is None else source.memory.at(step)
    table = find_suspects(memory, source.network, source.require("train"), source.classes or (), source.index)
    if out is not None:
        write_suspects(table, out)
    if json:
        print_json(table)
    else:
        print_suspects(memory, table, source.require("train"), k, out, _console())


SERVE = f"""[bold]Examples:[/]

{PROGRAM} serve runs/demo/memory

{PROGRAM} serve runs/mine --model train:make_model --data train.csv --test test.csv --label sick --categories sex"""


REPORT = f"""[bold]Example:[/]

{PROGRAM} report runs/demo/memory --examples 20 -o report.html"""


@app.command(epilog=REPORT)
@takes_data()
def report(
    source: Described,
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
    explorer = source.explorer(queue)
    name = "test" if explorer.test is not None else "train"
    chosen = (
        choose(explorer, examples)
        if rows is None
        else {ExamplePlace(name, row): f"{name} example {row}" for row in parse_rows(rows)}
    )
    file = write_report(out, explorer, chosen, title=title, weigh=weigh)
    _console().print(f"The report is {file} ({size(file.stat().st_size)}).", soft_wrap=True)


@app.command(epilog=SERVE)
@takes_data(opened=False)
def serve(
    source: MemoryToOpen,
    host: Annotated[
        str, Option(help="Address to listen on. Other than on this machine, visitors need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None,
        Option(envvar="DUALFORM_TOKEN", help="Access token for visitors; generated and printed if one is needed."),
    ] = None,
    token_file: Annotated[
        Path | None, Option(help="File with the access token, which other users then do not see in the process list.")
    ] = None,
    browser: Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")] = True,
    compare: Annotated[
        list[Path] | None, Option(help="Another memory of the same network, to compare with; repeatable.")
    ] = None,
) -> None:
    """Explore a memory in the browser: what predictions are made of, and what they would be without some training."""
    from ..web import opening_from_disk, token_in
    from ..web import serve as listen

    source.require_consent()
    if token_file is not None:
        token = token_in(token_file)
    listen(opening_from_disk(source, compare or ()), host, port, token, browser, _console())


EVALUATE = f"""[bold]Example:[/]

{PROGRAM} evaluate runs/demo/memory"""


@app.command(epilog=EVALUATE)
@takes_data(without=("classes",))
def evaluate(
    source: Described,
    queries: Annotated[int, Option(help="Number of test examples to ask about, from the first on.", min=1)] = 20,
    subsets: Annotated[int, Option(help="Number of trainings, each without a random subset.", min=2)] = 50,
    drop: Annotated[float, Option(help="Share of the training examples that each leaves out.", min=0, max=1)] = 0.1,
    seed: Annotated[int, Option(help="Seed of the subsets.", min=0, max=2**31)] = 0,
    processes: Annotated[
        int | None, Option(help="Trainings at a time. Default: one a core.", min=1, show_default=False)
    ] = None,
    folder: Annotated[
        Path | None,
        Option(
            help="Folder for the figure, the numbers and the trainings; the same folder resumes. "
            "Default: PATH-evaluated.",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train again without random subsets, and show how well influence and contributions predict what comes out."""
    training, tests = source.require("train"), source.require("test")
    plan = evaluation.Plan(queries, subsets, drop, seed, processes, source.index)
    path = source.memory.path
    out = folder or path.with_name(path.name + "-evaluated")
    outcome = evaluation.run(source.memory, source.network, training, tests, plan, out, _console(quiet=json))
    if json:
        print_json(evaluation.content(outcome, source.memory, plan))


HEADS = f"""[bold]Examples:[/]

{PROGRAM} heads model.safetensors test.npz --model train:make_model

{PROGRAM} heads runs/mine test.npz --model train:make_model --layer blocks.0.attn --moments 6 -o heads.html"""


@app.command(epilog=HEADS)
def heads(
    checkpoint: Annotated[Path, Argument(help="Weights as a .safetensors file, or the folder of a memory.")],
    data: Annotated[Path, Argument(help="Inputs, prepared as in training: .npy, .npz, .csv, .parquet, .safetensors.")],
    model: ModelName,
    rows: Annotated[str | None, Option(help="Rows of the file to use: 0,3,5 or 0:16. Default: the first 16.")] = None,
    columns: ColumnsOption = None,
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
    names = None if columns is None else [name.strip() for name in columns.split(",")]
    vocabulary, chosen = load_vocabulary(tokens), slice(0, 16) if rows is None else parse_rows(rows)
    examples = load_examples(str(data), network, columns=names, vocabulary=vocabulary, rows=chosen)
    inputs = examples.inputs
    words = inputs if inputs.ndim == 2 and not inputs.is_floating_point() else None
    heads_inputs = HeadsInputs(network, together(inputs, examples.others, network), words, weights, memory, vocabulary)
    options = {"queries": queries, "above": above, "null": null, "nuclear": nuclear, "seed": seed}
    reports, path, notes = print_reports(heads_inputs, layer or [], moments, options, _console())
    if out is not None:
        facts = {"weights": str(checkpoint), "inputs": f"{len(inputs)} rows of {data.name}", "seed": str(seed)}
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
    json: JsonOption = False,
) -> None:
    """Explain an error or a mark: what happened, and what to do about it."""
    print_json(texts(name)) if json else print_help(name, _console())


@app.command(
    epilog=f"[bold]Examples:[/]\n\n{PROGRAM} completion bash > ~/.local/share/bash-completion/completions/dualform\n\n"
    f"{PROGRAM} completion zsh > ~/.dualform-completion && echo 'source ~/.dualform-completion' >> ~/.zshrc\n\n"
    f"{PROGRAM} completion fish > ~/.config/fish/completions/dualform.fish"
)
def completion(shell: Annotated[Shell, Argument(help="The shell: bash, zsh or fish.")]) -> None:
    """Print a script with which the shell completes commands and options."""
    typer.echo(script(get_command(app), ANYWHERE, shell), nl=False)


def _console(quiet: bool = False) -> Console:
    return Console(highlight=False, quiet=quiet)
