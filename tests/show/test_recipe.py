"""With a recipe a path is enough; options win over it; and a memory from a stranger runs nothing."""

import json
import shutil
import sys
from collections.abc import Iterator
from inspect import isfunction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dualform
from dualform.data import read
from dualform.errors import ConsentNeeded, ModelMismatch, QueryError
from dualform.models import MLP
from dualform.show.commands import cli
from dualform.show.consent import OWN, consent_file, is_own
from dualform.show.described import DataOptions, described

CODE = """
from pathlib import Path

import torch

Path("was-run").touch()


def make():
    return torch.nn.Sequential(torch.nn.Linear(4, 3))


def train():
    return torch.eye(4), torch.arange(4) % 3
"""


def call(*words: object):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture
def project(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder with a table, a module of the user's own, and an empty file of consents."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    draw = np.random.default_rng(0)
    lines = [f"{draw.integers(20, 80)},{draw.choice(['red', 'blue'])},{draw.choice(['no', 'yes'])}" for _ in range(40)]
    for name, part in (("train.csv", lines[:30]), ("test.csv", lines[30:])):
        (tmp_path / name).write_text("\n".join(["age,colour,sick", *part, ""]))
    (tmp_path / "mycode.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("mycode", "larger"):
        sys.modules.pop(name, None)


def record(path: str | Path, model: nn.Module, x: torch.Tensor, y: torch.Tensor, describe: dict | None) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path, dtype="float32", progress=False, describe=describe) as tape:
        for _ in range(3):
            tape.note(index=torch.arange(len(y)), label=y)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def table(project) -> Path:
    rows = read("train.csv", label="sick", categories=["colour"], scale=True)
    torch.manual_seed(0)
    assert rows.labels is not None
    describe = {"model": "dualform.models:MLP(3, 4, 2)", "train": rows, "test": "test.csv"}
    record("runs/table", MLP(3, 4, 2), rows.inputs, rows.labels, describe)
    record("runs/bare", MLP(3, 4, 2), rows.inputs, rows.labels, None)
    return project


@pytest.fixture
def foreign(project) -> Path:
    """A memory whose recipe names a module that leaves a trace when it is imported."""
    model = nn.Sequential(nn.Linear(4, 3))
    record("foreign", model, torch.eye(4), torch.arange(4) % 3, {"model": "mycode:make", "train": "mycode:train"})
    return project


def was_run(project: Path) -> bool:
    return (project / "was-run").exists()


# ---------------------------------------------------------------- a path is enough


def test_a_path_is_enough_for_ask_report_and_evaluate(table, monkeypatch):
    result = call("ask", "runs/table", "--rows", "0,9", "-k", 2)
    assert result.exit_code == 0, result.stderr
    first = Path("test.csv").read_text().splitlines()[1].split(",")
    assert f"age {first[0]}, colour {first[1]}" in result.stdout, "rows are shown as they stand in the table"
    assert "the network says no (class 0)" in result.stdout or "the network says yes (class 1)" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert {"no", "yes"} <= {line[0] for line in lines if line}, "sums by label are those of named classes"
    ranked = [line for line in lines if len(line) > 3 and line[0] in ("1", "2") and line[2] in ("no", "yes")]
    assert len(ranked) == 4, "so are the labels of the top examples"
    assert call("report", "runs/table", "--examples", 2, "--weigh", 0, "-o", "r.html").exit_code == 0
    result = call("evaluate", "runs/table", "--queries", 2, "--subsets", 2, "--processes", 1)
    assert result.exit_code == 0, result.stderr
    assert "bit for bit" in " ".join(result.stdout.split()), "training is run on exactly the rows that it saw"


def test_the_recipe_gives_what_all_options_give(table):
    options = (
        "--model", "dualform.models:MLP(3, 4, 2)", "--train", "train.csv", "--data", "test.csv", "--label", "sick",
        "--categories", "colour",
    )  # fmt: skip
    with_recipe, without = described(Path("runs/table"), DataOptions()), described(Path("runs/bare"), DataOptions())
    explorer = with_recipe.explorer()
    assert explorer.train is not None and explorer.test is not None and explorer.classes == ["no", "yes"]
    rows = read("test.csv", columns=read("train.csv", label="sick", categories=["colour"], scale=True).columns)
    assert torch.equal(explorer.test.rows(range(10)), rows.inputs)
    assert without.memory.recipe is None
    bare = call("ask", "runs/bare", *options)
    assert bare.exit_code == 0, bare.stderr
    assert "colour" in bare.stdout


def test_a_model_that_does_not_fit_is_named_with_who_named_it(table):
    wrong = ("--model", "dualform.models:MLP(3, 5, 2)", "--train", "train.csv", "--data", "test.csv")
    error = call("ask", "runs/table", *wrong).stderr
    assert "dualform.models:MLP(3, 5, 2), which --model names, makes a MLP that does not fit the memory" in error
    assert "it recorded 'fc1.weight' of shape (4, 3), the model has one of shape (5, 3)." in error
    rows = read("train.csv", label="sick", categories=["colour"], scale=True)
    assert rows.labels is not None
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    record("runs/plain", plain, rows.inputs, rows.labels, {"model": "dualform.models:MLP(3, 4, 2)", "train": rows})
    error = call("suspects", "runs/plain").stderr
    assert "'0.weight'" in error and "has 'fc1.weight'" in error and "which the recipe names" in error
    record("runs/small", nn.Sequential(nn.Linear(3, 2)), rows.inputs, rows.labels, {"model": "larger:make"})
    Path("larger.py").write_text(
        "from torch import nn\n\n\ndef make():\n    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))\n"
    )
    error = call("ask", "runs/small", "--data", "test.csv", "--trust").stderr
    assert "larger:make, which the recipe names" in error, "a parameter too many is a difference, too"
    assert "the model has '1.weight' of shape (2, 2), which the recorded one did not have" in error


def test_options_win_over_the_recipe(table):
    Path("other.csv").write_text("age,colour,sick\n33,blue,no\n")
    result = call("ask", "runs/table", "--data", "other.csv", "--classes", "healthy,ill")
    assert result.exit_code == 0, result.stderr
    assert "age 33, colour blue" in result.stdout
    assert "says healthy (class 0)" in result.stdout or "says ill (class 1)" in result.stdout
    assert "does not fit" in call("ask", "runs/table", "--model", "dualform.models:MLP(3, 9, 2)").stderr


def test_a_moved_project_answers(table, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "project"
    shutil.copytree(table, elsewhere)
    monkeypatch.chdir("/")
    for name in ("train.csv", "test.csv"):
        (table / name).unlink()
    assert call("ask", elsewhere / "runs" / "table").exit_code == 0
    result = call("ask", table / "runs" / "table")
    assert result.exit_code == 1 and "names its test examples as ../../test.csv" in result.stderr
    assert "Give --data" in result.stderr


def test_without_a_recipe_the_error_says_what_to_give(table):
    bare = ("runs/bare", "--model", "dualform.models:MLP(3, 4, 2)")
    assert "give --model" in call("ask", "runs/bare").stderr and "tape.describe" in call("ask", "runs/bare").stderr
    assert "give --data" in call("ask", *bare).stderr
    assert "give --data" in call("evaluate", *bare).stderr
    assert "give --test" in call("evaluate", *bare, "--data", "train.csv", "--columns", "age").stderr
    words = call("ask", *bare, "--data", "test.csv", "--columns", "age,colour").stderr
    assert "name it in categories (--categories)" in words
    assert "learned from the training examples" in call("ask", *bare, "--data", "test.csv", "--label", "sick",
                                                        "--categories", "colour").stderr  # fmt: skip


def test_inspect_shows_the_recipe_and_nothing_that_moves_the_cursor(table):
    text = " ".join(call("inspect", "runs/table").stdout.split())
    for words in ("dualform.models:MLP(3, 4, 2)", "train: ../../train.csv", "no, yes", "age, colour; label sick"):
        assert words in text
    edit_recipe("runs/table", lambda recipe: recipe.update(classes=["\x1b[2J", "[bold]"]))
    shown = call("inspect", "runs/table").stdout
    assert "\x1b" not in shown and "\\x1b[2J, [bold]" in shown


def test_texts_are_read_with_the_tokenizer_of_the_recipe(project):
    Path("texts.csv").write_text("text,label\n" + "ab,0\nba,1\n" * 3)
    rows = read("texts.csv", tokens="bytes", length=4)
    model = nn.Sequential(nn.Embedding(256, 3), nn.Flatten(), nn.Linear(12, 2))
    Path("textmodel.py").write_text(
        "from torch import nn\n\n\ndef make():\n"
        "    return nn.Sequential(nn.Embedding(256, 3), nn.Flatten(), nn.Linear(12, 2))\n"
    )
    assert rows.labels is not None
    record("texts", model, rows.inputs, rows.labels, {"model": "textmodel:make", "train": rows})
    recipe = dualform.open("texts").recipe
    assert recipe is not None and (str(recipe.tokenizer), recipe.length) == ("bytes", 4), "they come with the rows"
    result = call("ask", "texts", "--rows", "1", "--trust")
    assert result.exit_code == 0, result.stderr
    assert "ba" in result.stdout and "\0" not in result.stdout, "padding is not shown"


# ---------------------------------------------------------------- consent


@pytest.mark.parametrize("command", [["ask"], ["report", "-o", "r.html"], ["evaluate"], ["serve", "--no-open"]])
def test_a_strangers_memory_runs_nothing(foreign, command):
    result = call(command[0], "foreign", *command[1:])
    assert result.exit_code == 1 and not was_run(foreign)
    said = " ".join(result.stderr.split())
    assert "ConsentNeeded" in said and "'mycode:make'" in said and "--trust" in said
    assert f"the module 'mycode' ({foreign / 'mycode.py'})" in said and not consent_file().exists()


def test_consent_is_given_once_for_this_recipe_at_this_place(foreign):
    assert call("ask", "foreign", "--trust").exit_code == 0 and was_run(foreign)
    assert call("ask", "foreign").exit_code == 0, "it is remembered"
    shutil.copytree("foreign", "copy")
    assert "ConsentNeeded" in call("ask", "copy").stderr, "another memory asks for itself"
    edit_recipe("foreign", lambda recipe: recipe.update(index="other"))
    assert "ConsentNeeded" in call("ask", "foreign").stderr, "a changed recipe asks again"


def test_another_module_of_the_same_name_asks_again(foreign, tmp_path_factory, monkeypatch):
    assert call("ask", "foreign", "--trust").exit_code == 0
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "mycode.py").write_text(CODE)
    sys.modules.pop("mycode")
    monkeypatch.chdir(elsewhere)
    assert "ConsentNeeded" in call("ask", foreign / "foreign").stderr and not was_run(elsewhere)


def test_names_that_the_user_typed_are_consent(foreign):
    assert "ConsentNeeded" in call("ask", "foreign", "--model", "mycode:make").stderr, "the data were not named"
    assert call("ask", "foreign", "--model", "mycode:make", "--train", "mycode:train").exit_code == 0
    assert call("ask", "foreign").exit_code == 0, "both were typed once"


def test_options_replace_what_was_not_agreed_to(foreign):
    np.savez("own.npz", inputs=np.eye(4, dtype=np.float32), labels=np.arange(4) % 3)
    Path("own.py").write_text("import torch\n\n\ndef make():\n    return torch.nn.Sequential(torch.nn.Linear(4, 3))\n")
    result = call("ask", "foreign", "--model", "own:make", "--train", "own.npz", "--data", "own.npz")
    assert result.exit_code == 0 and not was_run(foreign), result.stderr
    assert not consent_file().exists()


def test_a_broken_file_of_consents_is_no_consent(foreign):
    consent_file().parent.mkdir(parents=True)
    for content in ("[]", "{", '{"x": 1}', "\x00"):
        consent_file().write_text(content)
        assert "ConsentNeeded" in call("ask", "foreign").stderr
    assert call("ask", "foreign", "--trust").exit_code == 0


@pytest.mark.parametrize(
    "name",
    [
        "os:system('touch was-run')", "dualform.models:mlp.nn.Linear(1, 1)", "dualform.data:folder.os.system('true')",
        "dualform.models:MLP.__init__(1)", "dualform.show.factory:make_model('mycode:make')",
        "dualform.show.factory:call('mycode:make', 'x')", "dualform:data.fetch.fetch('x')", 
        "dualform.models.mlp:MLP(1)",
        "dualform.models:torch.os.system('true')", "builtins:exec('1')", "dualforｍ.models:MLP(1, 2)",
    ],
)  # fmt: skip
def test_only_public_networks_and_data_sets_are_our_own(foreign, name):
    assert not is_own(name)
    edit_recipe("foreign", lambda recipe: recipe.update(model=name, train=None))
    result = call("ask", "foreign", "--data", "train.csv")
    assert result.exit_code == 1 and "ConsentNeeded" in result.stderr and not was_run(foreign)


def test_our_own_names_call_nothing_that_takes_code_or_modules():
    """What may be called without asking: classes and functions of two modules, and none of them imports by name."""
    assert set(OWN) == {"dualform.models", "dualform.data"}
    for module, names in OWN.items():
        for name in names:
            member = getattr(sys.modules[module], name)
            if not isinstance(member, type) and not isfunction(member):
                continue  # a list of names, or an alias of types: calling it is an error
            defined_in = member.__module__
            assert defined_in.startswith(("dualform.models", "dualform.data")), f"{module}:{name} is {defined_in}"


def test_python_asks_as_the_commands_do(foreign):
    source = described(Path("foreign"), DataOptions())
    with pytest.raises(ConsentNeeded):
        _ = source.train
    memory, model = dualform.open("foreign"), nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ConsentNeeded, match="trust=True"):
        dualform.explore(memory)
    with pytest.raises(ConsentNeeded, match="'mycode:train'"):
        dualform.explore(memory, model)
    assert not was_run(foreign)
    with dualform.explore(memory, model, torch.eye(4)) as explorer:
        assert not was_run(foreign) and explorer.explorer.train is not None
    with dualform.explore(memory, trust=True) as explorer:
        assert was_run(foreign) and explorer.explorer.train is not None and len(explorer.explorer.train) == 4
    assert call("ask", "foreign").exit_code == 0, "the commands know it, too"


def test_the_explorer_needs_nothing_but_a_memory_that_was_described(table):
    memory = dualform.open("runs/table")
    with_commands = described(Path("runs/table"), DataOptions()).explorer()
    with dualform.explore(memory) as opened:
        explorer = opened.explorer
        assert explorer.train is not None and explorer.test is not None and explorer.classes == ["no", "yes"]
        assert with_commands.test is not None
        assert torch.equal(explorer.test.rows(range(10)), with_commands.test.rows(range(10)))
        assert torch.equal(explorer.logits("test", [0, 1]), with_commands.logits("test", [0, 1]))
    with dualform.explore(memory, test=torch.zeros(2, 3), classes=["healthy", "ill, badly"]) as opened:
        assert opened.explorer.test is not None and len(opened.explorer.test) == 2, "what is given wins"
        assert opened.explorer.classes == ["healthy", "ill, badly"] and opened.explorer.train is not None
    with pytest.raises(ModelMismatch, match="which model= names, makes a MLP that does not fit"):
        dualform.explore(memory, "dualform.models:MLP(3, 5, 2)")
    with pytest.raises(QueryError, match="does not say how its model is made: give model="):
        dualform.explore(dualform.open("runs/bare"))


def edit_recipe(path: str, change) -> None:
    """Change the recipe of a memory as a stranger might, with a checksum that fits."""
    import xxhash

    file = Path(path) / "manifest.json"
    head, _, body = file.read_text(encoding="utf-8").partition("\n ")
    manifest = json.loads(head + "\n " + body)
    recipe = manifest["recipe"]
    change(recipe)
    lines = [f'"recipe": {json.dumps(recipe)}' if line.startswith('"recipe": ') else line.rstrip(",")
             for line in body.split("\n ")]  # fmt: skip
    start = next(i for i, line in enumerate(lines) if line.startswith('"shards"'))
    body = ",\n ".join(lines[:start]) + ",\n " + body[body.index('"shards"') :]
    file.write_text(f'{{"checksum": "{xxhash.xxh3_128_hexdigest(body.encode())}",\n {body}', encoding="utf-8")


def test_a_script_that_trains_when_it_is_imported_cannot_replace_the_memory(project):
    model = nn.Sequential(nn.Linear(4, 3))
    record("mine", model, torch.eye(4), torch.arange(4) % 3, {"model": "mycode:make", "train": "mycode:train"})
    before = {file: file.read_bytes() for file in Path("mine").rglob("*") if file.is_file()}
    (project / "mycode.py").write_text(f"{CODE}\n{TRAINING}")
    result = call("ask", "mine", "--trust")
    assert result.exit_code == 1 and "began to record a training" in " ".join(result.stderr.split())
    assert {file: file.read_bytes() for file in Path("mine").rglob("*") if file.is_file()} == before
    with dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), "later", progress=False):
        pass  # nothing is refused afterwards


TRAINING = """
import dualform

model = make()
with dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), "mine", overwrite=True, progress=False):
    pass
"""
