"""What ``tape.describe`` says is kept as text: relative paths, resumes, several ways in."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dualform
from dualform.data import Columns, read
from dualform.errors import CorruptMemory, DataNotFound, QueryError
from dualform.models import MLP
from dualform.store import Recipe, RecipeSource
from dualform.store.format.recipe import recipe_of_json

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with data, in which somebody trains."""
    np.savez(tmp_path / "train.npz", inputs=X.numpy(), labels=Y.numpy())
    (tmp_path / "t.csv").write_text("a,colour,label\n1,red,0\n3,blue,1\n")
    (tmp_path / "words.txt").write_text("a\nb\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(tape, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        tape.note(index=torch.arange(12), label=Y)
        nn.functional.cross_entropy(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MLP(4, 3, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def recorded(path: str | Path, steps: int = 2, describe: dict | None = None, **options) -> None:
    model, optimizer = network()
    with dualform.record(model, optimizer, path, describe=describe, progress=False, **options) as tape:
        train(tape, model, optimizer, steps)


ALL = {
    "model": "train:make(3, name='x')", "train": "train.npz", "test": "train:tests", "classes": ["cat", "dog", "cow"],
    "tokenizer": "words.txt", "columns": "inputs", "index": "row", "length": 7,
}  # fmt: skip


def test_what_is_described_is_in_the_memory_as_text(project):
    recorded("runs/mine", describe=ALL)
    recipe = dualform.open("runs/mine").recipe
    assert recipe is not None and recipe.model == ALL["model"] and recipe.classes == ("cat", "dog", "cow")
    assert recipe.train == RecipeSource(file="../../train.npz") and recipe.test == RecipeSource(factory="train:tests")
    assert recipe.tokenizer == RecipeSource(file="../../words.txt") and (recipe.index, recipe.length) == ("row", 7)
    manifest = json.loads(Path("runs/mine/manifest.json").read_text())
    assert manifest["recipe"]["train"]["file"] == "../../train.npz" and str(project) not in json.dumps(
        manifest["recipe"]
    )


def test_the_tape_and_the_option_say_the_same(project):
    recorded("runs/a", describe=ALL)
    model, optimizer = network()
    with dualform.record(model, optimizer, "runs/b", progress=False) as tape:
        train(tape, model, optimizer, 1)
        tape.describe(**ALL)
        assert dualform.open("runs/b").recipe == dualform.open("runs/a").recipe, "it is on disk at once"
        train(tape, model, optimizer, 1)
    assert dualform.open("runs/b").recipe == dualform.open("runs/a").recipe
    assert dualform.open("runs/b").step == 2


def test_a_project_can_be_moved_and_the_paths_still_lead_to_the_data(project, tmp_path_factory):
    recorded("runs/mine", describe={"train": "train.npz"})
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "project"
    shutil.copytree(project, elsewhere)
    for file in project.glob("*.npz"):
        file.unlink()
    recipe = dualform.open(elsewhere / "runs" / "mine").recipe
    assert recipe is not None and recipe.train is not None
    assert Path(recipe.train.at(elsewhere / "runs" / "mine")) == (elsewhere / "train.npz").resolve()


@pytest.mark.skipif(os.name == "nt", reason="links need a right of their own on Windows")
def test_a_memory_behind_a_link_finds_its_data(project):
    (project / "disk" / "deep").mkdir(parents=True)
    (project / "runs").symlink_to(project / "disk" / "deep")
    recorded("runs/mine", describe={"train": "train.npz"})
    recipe = dualform.open("runs/mine").recipe
    assert recipe is not None and recipe.train is not None
    assert Path(recipe.train.at(Path("runs/mine"))).is_file()


def test_a_resume_keeps_the_recipe_and_a_new_one_replaces_it(project):
    model, optimizer = network()
    with dualform.record(model, optimizer, "m", progress=False, describe={"model": "train:one"}) as tape:
        train(tape, model, optimizer, 2)
    for describe, name in ((None, "train:one"), ({"model": "train:two"}, "train:two")):
        step = dualform.open("m").step
        with dualform.record(model, optimizer, "m", resume=step, progress=False, describe=describe) as tape:
            train(tape, model, optimizer, 2)
        recipe = dualform.open("m").recipe
        assert recipe is not None and recipe.model == name
    with dualform.record(model, optimizer, "m", resume=dualform.open("m").step, progress=False) as tape:
        tape.describe(model="train:three")
    assert dualform.open("m").recipe == Recipe(model="train:three")


def test_layers_that_are_added_later_do_not_lose_the_recipe(project):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with dualform.record(model, optimizer, "m", progress=False) as tape:
        tape.describe(model="train:make")
        optimizer.add_param_group({"params": list(model[0].parameters())})
        train(tape, model, optimizer, 2)
    memory = dualform.open("m")
    assert memory.recipe == Recipe(model="train:make") and len(memory.layers) == 2


def test_memories_without_a_recipe_open_as_before(project):
    recorded("m")
    assert dualform.open("m").recipe is None
    manifest = json.loads(Path("m/manifest.json").read_text())
    assert manifest["recipe"] is None and recipe_of_json(manifest.get("never written")) is None


def test_the_columns_of_a_table_come_along(project):
    rows = read("t.csv", categories=["colour"], scale=True)
    recorded("m", describe={"train": rows})
    recipe = dualform.open("m").recipe
    assert recipe is not None and recipe.columns == rows.columns and recipe.train == RecipeSource(file="../t.csv")
    assert recipe.columns is not None and recipe.columns.scale == {"a": (2.0, 1.0)}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": nn.Linear(1, 1)}, QueryError, "not a Linear"), ({"model": "make_model"}, QueryError, "cannot read"),
        ({"model": "train:make(open('x'))"}, QueryError, "cannot read"),
        ({"model": "__main__:make"}, QueryError, "name its file"), ({"modle": "a:b"}, QueryError, "has no 'modle'"),
        ({"train": X}, QueryError, "a Tensor has none"), ({"train": "none.npz"}, DataNotFound, "no such file"),
        ({"tokenizer": "none.json"}, DataNotFound, "no file"),
        ({"classes": "cat,dog"}, QueryError, "names 2 classes, but no layer of this MLP .*'fc2', .* has 3"),
        ({"train": "t.csv", "columns": ["a", "hue"]}, QueryError, "'hue', but ../t.csv, .* 'a', 'colour', 'label'"),
        ({"train": "t.csv", "columns": Columns(("a",), "sick")}, QueryError, "names 'sick'"),
        ({"train": "train.npz", "columns": "images"}, QueryError, "names 'images'.* 'inputs', 'labels'"),
        ({"train": "train:make", "test": "t.csv", "columns": ["b"]}, QueryError, r"describe\(test=…\) names"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_before_training(project, change, error, says):
    with pytest.raises(error, match=says):
        recorded("m", describe=change)
    assert not Path("m").exists()


def test_the_column_of_indices_must_be_one_that_is_noted(project):
    model, optimizer = network()
    with dualform.record(model, optimizer, "m", progress=False) as tape:
        tape.describe(index="number")  # no step yet: it may be noted later
        train(tape, model, optimizer, 1)
        with pytest.raises(QueryError, match=r"'number'.* not noted: the columns are 'index', 'label'"):
            tape.describe(index="number")
        tape.describe(index="index")
    assert dualform.open("m").recipe == Recipe(index="index")


@pytest.mark.parametrize("outputs", [1, 2, 1000])
def test_two_classes_fit_one_output_or_two(project, outputs):
    model = MLP(4, 3, outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = ["no", "yes"] if outputs < 3 else [f"class {number}" for number in range(outputs)]
    with dualform.record(model, optimizer, "m", progress=False, describe={"classes": names}):
        pass
    assert dualform.open("m").recipe == Recipe(classes=tuple(names))


@pytest.mark.parametrize(
    "broken",
    [
        {"model": 3}, {"train": "x.npz"}, {"train": {"file": 1}}, {"train": {}}, {"columns": {"names": 1}},
        {"train": {"file": "a", "factory": "b:c"}}, {"length": "long"}, {"classes": [1]},
    ],
)  # fmt: skip
def test_a_recipe_that_is_no_plain_text_is_refused(broken):
    with pytest.raises(CorruptMemory, match="recipe"):
        recipe_of_json(broken)
