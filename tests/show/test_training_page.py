"""The pages about the training set say what the memory says, for every kind of data."""

import csv
import time
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import serving
from sklearn.metrics import roc_auc_score
from torch import nn

from dualform.errors import DualformError, QueryError
from dualform.explain import open_memory
from dualform.models import MLP
from dualform.record import record
from dualform.show.commands import demo
from dualform.show.examples import Examples
from dualform.show.views.example import training_example
from dualform.show.views.explorer import ExamplePlace, Explorer
from dualform.show.views.render import as_plain
from dualform.show.views.selection import Selection
from dualform.show.views.training import (
    LearnedOverTime,
    MovedAnswers,
    Neighbours,
    TrainingSetQuestion,
    TrainingSetView,
    example_map,
    moved_answers,
    points_of,
    principal_axes,
    selection_csv,
    settle_choice,
    shown_indices,
    spot_of_visits,
    sums_of,
    suspects_csv,
    training_examples,
    training_set,
)
from dualform.show.views.work import PendingWork, WorkQueue


@pytest.fixture(params=["digits", "adam", "text", "words", "series", "table"])
def any_explorer(request, tmp_path) -> Explorer:
    """Pictures under SGD and Adam, one long text, texts with labels, series, a table."""
    if request.param == "adam":
        path, data = request.getfixturevalue("adam_run")
        rows = range(300)
        explorer = Explorer(open_memory(path), MLP(784, 16, 10), Examples(data.x, data.labels))
        explorer.test = Examples(data.x[data.test], data.labels[data.test]).only(list(rows)[:40])
    elif request.param == "table":
        explorer = table_explorer(tmp_path / "memory")
    else:
        name = {"words": "attention"}.get(request.param, request.param)
        explorer = request.getfixturevalue(f"{name}_explorer")
    explorer.work_queue = WorkQueue(1e9)
    return explorer


def table_explorer(path, labels=None) -> Explorer:
    """A table of two numbers and a word, of which the last ten rows were never trained on."""
    from dualform.data import Columns

    draw = torch.Generator().manual_seed(2)
    x = torch.cat([torch.randn(60, 2, generator=draw), nn.functional.one_hot(torch.arange(60) % 2)], 1).float()
    labels = (x[:, 0] > 0).long() if labels is None else labels
    columns = Columns(
        ("age", "weight", "=colour"), "label", {"=colour": ("red", "blue")}, ("no", "yes"), {"age": (40.0, 10.0)}
    )
    torch.manual_seed(0)
    model = MLP(4, 8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with record(model, optimizer, path, progress=False) as tape:
        for step in range(25):
            index = torch.arange(5 * step, 5 * step + 5) % 50
            source = ["=web" if i % 3 else "book" for i in index.tolist()]
            tape.note(index=index, label=labels[index], source=source, half="first" if step < 10 else "second")
            nn.functional.cross_entropy(model(x[index]), labels[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    train = Examples(x, labels, columns=columns)
    return Explorer(open_memory(path), model, train, train.only(range(0, 60, 4)), ["no", "yes"])


@pytest.fixture
def table(tmp_path) -> Explorer:
    explorer = table_explorer(tmp_path / "memory")
    explorer.work_queue = WorkQueue(1e9)
    return explorer


def view_of(explorer: Explorer, **choice) -> TrainingSetView:
    return training_set(explorer, TrainingSetQuestion(**choice))


# ---------------------------------------------------------------- what they add


@pytest.mark.parametrize("layer", [None, "fc2"])
def test_training_examples_are_weighed_by_all_they_add(digits_explorer, layer):
    explorer = digits_explorer
    explorer.work_queue = WorkQueue(1e9)
    view = view_of(explorer, layer=layer, rows=150)
    labels = torch.tensor([explorer.test.label(row) for row in range(150)])
    x = explorer.inputs("test", range(150))
    groups = explorer.memory.attend(explorer.model, x, target=labels).by("index", layer=layer)
    values = groups.values + (0 if groups.bias is None else groups.bias)
    adds, own = dict(zip(groups.names, values.sum(0).tolist(), strict=True)), explorer.train.labels
    assert view.asked == 150 and view.count == len(explorer.train) and len(view.lines) == 48
    best = view.lines[0]
    assert best.index == max(adds, key=lambda name: adds[name])
    assert best.adds == pytest.approx(adds[best.index], rel=1e-3)
    assert view_of(explorer, layer=layer, rows=150, order="up").lines[0].index == min(adds, key=lambda name: adds[name])
    worst = view_of(explorer, layer=layer, rows=150, sort="against").lines[0]
    column = groups.names.index(worst.index)
    assert worst.against == pytest.approx(float(-values[labels != own[worst.index], column].sum()), rel=1e-3)
    assert worst.size == pytest.approx(float(values[:, column].abs().sum()), rel=1e-3)
    assert worst.visits == int((explorer.memory.visits["index"].to_numpy() == worst.index).sum())
    for mistake in view.mistakes:
        says = explorer.says(explorer.predict(ExamplePlace("test", mistake.row))[0])[0].name
        assert says == mistake.says != mistake.label
    assert view.right is not None
    assert view_of(explorer, layer=layer, which="wrong", rows=150).asked == round(150 * (1 - view.right))


def test_every_kind_of_data_has_its_page(any_explorer):
    explorer = any_explorer
    view = view_of(explorer, rows=20)
    assert not view.pending and view.asked and view.shown == view.count == len(training_examples(explorer))
    values = [line.adds for line in view.lines if line.adds is not None]
    assert values == sorted(values, reverse=True) and any(values)
    assert view.question.show == ("table" if view.kind == "numbers" else "gallery")
    name = view.lines[0].index
    page = training_example(explorer, name)
    assert page.line.adds is None or page.line.adds == view.lines[0].adds
    assert isinstance(page.moved, MovedAnswers) and isinstance(page.learned, LearnedOverTime)
    assert isinstance(page.neighbours, Neighbours) and len(page.learned.visits) == page.line.visits
    assert name not in [other.index for other in page.neighbours.nearest]
    drawn = example_map(explorer)
    assert not drawn.pending and len(drawn.dots) == drawn.trained + drawn.tested
    assert 0 < drawn.share <= 1 + 1e-6 and all(0 <= dot.x <= 1 and 0 <= dot.y <= 1 for dot in drawn.dots)
    assert as_plain(drawn)["dots"] and as_plain(page)["line"] and as_plain(view)["lines"]
    with serving(explorer) as served:
        paths = (
            "/training?rows=20",
            "/training?show=table&rows=20",
            "/training?show=gallery",
            "/map",
            f"/example/{name}",
        )
        for path in paths:
            answer = served.get(path)
            assert answer.status == 200, answer.text
            assert "style=" not in answer.text and answer.text.count("<h1") == 1


@pytest.mark.parametrize("layer", [None, "fc1", "fc2"])
def test_under_adam_the_sums_are_those_of_the_memory(adam_run, layer):
    path, data = adam_run
    test = Examples(data.x[data.test], data.labels[data.test]).only(list(range(12)))
    explorer = Explorer(open_memory(path), MLP(784, 16, 10), Examples(data.x, data.labels), test)
    explorer.work_queue = WorkQueue(1e9)
    sums = sums_of(explorer, settle_choice(explorer, TrainingSetQuestion(layer)))
    assert not isinstance(sums, PendingWork)
    labels = torch.tensor([test.label(row) for row in range(12)])
    spot = explorer.memory.attend(explorer.model, explorer.inputs("test", range(12)), target=labels)
    groups = spot.by("index", layer=layer)
    values = groups.values + (0 if groups.bias is None else groups.bias)
    assert sums.names == groups.names
    expected = values.double().sum(0)  # the ledger sums in another order than the sweep, both in float32
    torch.testing.assert_close(sums.adds, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_one_example_alone_adds_what_it_adds_among_all(any_explorer):
    explorer = any_explorer
    choice = settle_choice(explorer, TrainingSetQuestion(rows=20))
    sums = sums_of(explorer, choice)
    assert not isinstance(sums, PendingWork) and sums.single is not None
    place = int(sums.adds.argmax())
    index = sums.names[place]
    visits = int(training_examples(explorer).visits[training_examples(explorer).place[index]])
    labelled = explorer.test.labels is not None and not explorer.test.is_stream
    target = torch.tensor([explorer.test.label(row) for row in sums.test_rows]) if labelled else None
    spot = spot_of_visits(explorer, index, explorer.inputs("test", sums.test_rows), target)
    alone = spot.top(visits, per="visit", progress=False).scores.sum(1)
    torch.testing.assert_close(alone.double(), sums.single[:, place].double(), rtol=1e-3, atol=1e-5)
    fresh = explorer.fork()
    fresh.work_queue = WorkQueue(1e9)
    moved, again = moved_answers(fresh, choice, index), moved_answers(explorer, choice, index)
    assert isinstance(moved, MovedAnswers) and isinstance(again, MovedAnswers)
    assert [answer.row for answer in moved.up] == [answer.row for answer in again.up]
    assert [answer.adds for answer in moved.down] == pytest.approx([answer.adds for answer in again.down], rel=1e-2)


def test_what_an_example_taught_itself_sums_to_its_contribution(digits_explorer):
    explorer = digits_explorer
    explorer.work_queue = WorkQueue(1e9)
    index = int(explorer.memory.visits["index"][0].as_py())
    page = training_example(explorer, index)
    assert isinstance(page.learned, LearnedOverTime)
    groups = explorer.memory.attend(
        explorer.model, explorer.inputs("train", [index]), target=explorer.train.label(index)
    ).by("index")
    assert page.learned.total == pytest.approx(float(groups.values[0, groups.names.index(index)]), rel=1e-3)
    steps = explorer.memory.visits.filter(np.array(explorer.memory.visits["index"]) == index)["step"].to_pylist()
    assert [visit.step for visit in page.learned.visits] == steps


def test_an_example_that_was_never_seen_says_so(table):
    page = training_example(table, 55)
    assert page.line.visits == 0 and page.moved is None and page.learned is None and page.neighbours is not None
    with serving(table) as served:
        assert "never saw it" in served.get("/example/55").text
    assert [line.index for line in view_of(table, only="unseen", sort="index").lines] == list(range(50, 60))
    with pytest.raises(QueryError, match="no training example"):
        training_example(table, 10**9)


# ---------------------------------------------------------------- suspects


def test_suspects_find_wrong_labels(tmp_path):
    """A law with a number: 5 % of the labels are exchanged, and the suspects are those."""
    data = demo.load()
    labels, draw = data.labels.clone(), torch.Generator().manual_seed(1)
    wrong = data.train[torch.randperm(len(data.train), generator=draw)[:225]]
    labels[wrong] = (labels[wrong] + torch.randint(1, 10, (225,), generator=draw)) % 10
    torch.manual_seed(0)
    model = MLP(784, 32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with record(model, optimizer, tmp_path / "memory", progress=False) as tape:
        for index in demo.batches(data.train, 450):
            tape.note(index=index, label=labels[index])
            nn.functional.cross_entropy(model(data.x[index]), labels[index]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    train, test = Examples(data.x, labels), Examples(data.x[data.test], data.labels[data.test])
    explorer = Explorer(open_memory(tmp_path / "memory"), model, train, test, work_queue=WorkQueue(1e9))
    table = suspects_csv(explorer, TrainingSetQuestion(rows=200))
    assert isinstance(table, str)
    lines = [line for line in csv.DictReader(table.splitlines()) if line["visits"] != "0"]
    is_wrong = np.isin([int(line["index"]) for line in lines], wrong.numpy())
    suspicion = np.array([float(line["suspicion"]) for line in lines])
    assert list(suspicion) == sorted(suspicion, reverse=True)
    assert roc_auc_score(is_wrong, suspicion) > 0.97 and is_wrong[:50].mean() > 0.9
    assert roc_auc_score(is_wrong, [float(line["against other labels"]) for line in lines]) > 0.9
    suggested = [int(line["suggested"]) for line in lines[:50]]
    true = [int(data.labels[int(line["index"])]) for line in lines[:50]]
    assert np.mean(np.array(suggested) == np.array(true)) > 0.9


def test_without_a_test_set_or_labels_the_page_says_what_is_missing(table, text_explorer):
    table.test = None
    view = view_of(table)
    assert view.asked == 0 and "no test set" in view.notes[0] and view.suspects is not None
    assert view.question.sort == "index" and view.shown == 60
    text_explorer.work_queue = WorkQueue(1e9)
    assert any("Suspects" in note for note in view_of(text_explorer).notes)
    text_explorer.train = None
    assert any("--data" in note for note in view_of(text_explorer).notes)


def test_what_takes_long_is_announced_and_the_examples_are_there_at_once(digits_explorer):
    explorer = digits_explorer
    explorer.work_queue.patience = 1e-9
    view = view_of(explorer)
    assert len(view.pending) == 2 and len(view.lines) == 48 and view.lines[0].adds is None
    assert "Not sorted yet" in view.notes[0] and all(work.seconds > 0 for work in view.pending)
    for work in view.pending:
        explorer.work_queue.start(work.name)
    for _ in range(600):
        if not (view := view_of(explorer)).pending:
            break
        time.sleep(0.05)
    assert view.lines[0].adds is not None and view.suspects is not None


# ---------------------------------------------------------------- sorting, filtering, paging


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_filters_and_orders_do_what_a_slow_search_does(data, table_once):
    explorer = table_once
    visits = explorer.memory.visits.to_pylist()
    everything = {line.index: line for page in (1, 2) for line in view_of(explorer, page=page).lines}
    explorer.selected.clear()
    explorer.selected.add(data.draw(st.sets(st.integers(0, 59))))
    choice = TrainingSetQuestion(
        sort=data.draw(st.sampled_from(["adds", "size", "visits", "index", "label", "suspicion", "noted.source"])),
        order=data.draw(st.sampled_from(["up", "down", None])),
        label=data.draw(st.sampled_from([None, 0, 1])),
        column=data.draw(st.sampled_from([None, "source", "half"])),
        only=data.draw(st.sampled_from(["all", "selected", "suspects", "unseen"])),
        filter=data.draw(st.sampled_from(["", "step < 4", "label = 1 and step > 10"])),
    )
    value = data.draw(
        st.sampled_from({None: [None], "source": ["=web", "book"], "half": ["first", "second"]}[choice.column])
    )
    choice = TrainingSetQuestion(**{**vars(choice), "value": value})

    def shown(line) -> bool:
        own = [visit for visit in visits if visit["index"] == line.index]
        holds = {
            "": True,
            "step < 4": any(visit["step"] < 4 for visit in own),
            "label = 1 and step > 10": any(visit["label"] == 1 and visit["step"] > 10 for visit in own),
        }[choice.filter]
        subset = {
            "all": True, "selected": line.index in explorer.selected, "suspects": line.suspect,
            "unseen": line.visits == 0,
        }[choice.only]  # fmt: skip
        of_column = choice.column is None or any(visit[choice.column] == choice.value for visit in own)
        return holds and subset and of_column and choice.label in (None, line.label)

    expected = {index for index, line in everything.items() if shown(line)}
    if choice.filter and training_set(explorer, choice).problems:
        assert not expected
        return
    indices = shown_indices(explorer, choice)
    assert set(indices) == expected and len(indices) == len(expected)
    view = training_set(explorer, choice)
    assert view.shown == len(expected) and [line.index for line in view.lines] == indices[:48]
    field = choice.sort or "adds"
    if field != "noted.source":
        values = [getattr(everything[index], field) for index in indices]
        known = [value for value in values if value is not None]
        assert values[: len(known)] == known, "what is not known comes last"
        down = view.question.order == "down"
        assert known == sorted(known, reverse=down)


@pytest.fixture(scope="module")
def table_once(tmp_path_factory) -> Explorer:
    explorer = table_explorer(tmp_path_factory.mktemp("table") / "memory")
    explorer.work_queue = WorkQueue(1e9)
    return explorer


def test_pages_cover_all_examples_once(table):
    view = view_of(table)
    pages = [view_of(table, page=page) for page in range(1, view.pages + 1)]
    indices = [line.index for page in pages for line in page.lines]
    assert sorted(indices) == list(range(60)) and view_of(table, page=99).question.page == view.pages == 2


def test_texts_are_searched_in(attention_explorer):
    explorer = attention_explorer
    explorer.work_queue = WorkQueue(1e9)
    texts = {i: "".join(explorer.train.shown(i).tokens) for i in range(len(explorer.train))}
    wanted = texts[7][:8].upper()
    found = set(shown_indices(explorer, TrainingSetQuestion(text=wanted)))
    assert found == {i for i, text in texts.items() if wanted.lower() in text.lower()} and 7 in found


def test_a_row_of_a_table_stands_under_its_columns(table):
    view = view_of(table, sort="index", order="up")
    assert view.features == ("age", "weight", "=colour")
    row = table.train.inputs[0]
    assert view.lines[0].features == (f"{float(row[0]) * 10 + 40:.4g}", f"{float(row[1]):.4g}", "red")
    with serving(table) as served:
        page = served.get("/training").text
        assert all(f'class="feature">{name}</th>' in page for name in view.features)
        assert "no" in {line.label_name for line in view.lines}


def test_a_wrong_condition_is_shown_beside_its_field_and_selects_nothing(table):
    view = view_of(table, filter="labl = 3")
    assert "labl" in view.problems["filter"] and view.shown == 0
    with pytest.raises(QueryError):
        shown_indices(table, TrainingSetQuestion(filter="labl = 3"))
    for choice in ({"sort": "nothing"}, {"column": "nothing"}, {"layer": "fc9"}, {"rows": 0}, {"filter": "x" * 501}):
        with pytest.raises(DualformError):
            view_of(table, **choice)


# ---------------------------------------------------------------- the selection


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "clear"]), st.sets(st.integers(0, 20)))))
def test_a_selection_is_a_set(changes):
    selection, expected = Selection(), set()
    for change, indices in changes:
        if change == "clear":
            selection.clear()
            expected = set()
        elif change == "add":
            selection.add(indices)
            expected |= indices
        else:
            selection.remove(indices)
            expected -= indices
    assert list(selection) == sorted(expected) == list(selection.indices) and len(selection) == len(expected)


def test_the_selection_is_changed_by_posts_of_our_own_pages_alone(table):
    with serving(table) as served:

        def change(**fields: object) -> int:
            answer = served.post("/selection", urlencode(fields, doseq=True).encode())
            assert answer.status == 200, answer.text
            return answer.json["selected"]

        assert change(do="add", index=[3, 17, 5]) == 3 and table.selection == (3, 5, 17)
        assert change(do="remove", index=5) == 2
        assert "2</span> selected" in served.get("/training").text and "2</span> selected" in served.get("/map").text
        unseen = change(do="add-shown", of="only=unseen&show=table")
        assert unseen == 12 and set(table.selection) == {3, 17, *range(50, 60)}
        assert {line["index"] for line in served.get("/training.json?only=selected").json["lines"]} == set(
            table.selection
        )
        assert f"{served.get('/what-if/test/0').status}" == "200"
        for bad in ({"do": "add", "index": 10**6}, {"do": "what"}, {}, {"do": "add-shown", "of": "filter=labl"}):
            assert served.post("/selection", urlencode(bad).encode()).status == 400
        assert served.send("POST", "/selection", b"do=clear").status == 403
        other = served.send("POST", "/selection", b"do=clear", **{"X-Dualform": "1", "Sec-Fetch-Site": "cross-site"})
        assert other.status == 403 and served.get("/selection").status == 405 and len(table.selection) == 12
        assert change(do="clear") == 0 and table.selection == ()


def test_the_csv_of_the_selection_is_safe_and_whole(table):
    table.selected.add([1, 2, 57])
    view_of(table)
    lines = list(csv.DictReader(selection_csv(table, TrainingSetQuestion()).splitlines()))
    assert [line["index"] for line in lines] == ["1", "2", "57"]
    assert lines[0]["source"] == "'=web" and lines[0]["class"] in ("no", "yes") and lines[2]["visits"] == "0"
    by_index = {line.index: line for line in view_of(table, only="selected").lines}
    assert float(lines[0]["adds in sum"]) == by_index[1].adds and lines[0]["suggested"] == by_index[1].suggested
    with serving(table) as served:
        answer = served.get("/selection.csv")
        assert answer.headers["content-disposition"].endswith('"selection.csv"')
        assert list(csv.DictReader(answer.text.splitlines())) == lines


# ---------------------------------------------------------------- the map


def test_the_map_shows_the_directions_of_largest_variance():
    draw = torch.Generator().manual_seed(4)
    points = torch.randn(200, 30, generator=draw, dtype=torch.float64) * torch.arange(30, 0, -1).double()
    centred = points - points.mean(0)
    axes, best = principal_axes(centred), torch.linalg.svd(centred, full_matrices=False)
    assert float((centred @ axes).square().sum()) == pytest.approx(float(best.S[:2].square().sum()), rel=1e-6)
    torch.testing.assert_close(axes.mT @ axes, torch.eye(2).double())
    torch.testing.assert_close(principal_axes(centred), axes, rtol=0, atol=0)
    one = principal_axes(torch.randn(5, 1, generator=draw))
    assert one.shape == (1, 2) and not one[:, 1].any()


def test_dots_lie_where_the_layer_sees_them(table):
    layer = "fc2"
    drawn = example_map(table, layer)
    hidden = {}
    hook = table.model.fc2.register_forward_pre_hook(lambda _, args: hidden.update(x=args[0].detach()))
    table.model(table.inputs("train", list(range(60))))
    hook.remove()
    torch.testing.assert_close(points_of(table, "train", list(range(60)), layer, False).points, hidden["x"])
    centred = hidden["x"].double() - hidden["x"].double().mean(0)
    best = torch.linalg.svd(centred, full_matrices=False).S.square()
    assert drawn.share == pytest.approx(float(best[:2].sum() / best.sum()), rel=1e-4)
    assert drawn.trained == 60 and drawn.tested == 15 and drawn.left_out == 0
    assert example_map(table, layer).dots == drawn.dots
    assert {group.name for group in drawn.groups} == {"no", "yes"}
    assert sum(group.count for group in drawn.groups) == 75
    twins = {dot.name: (dot.x, dot.y) for dot in drawn.dots if dot.set == "train"}
    for dot in drawn.dots:
        if dot.set == "test":  # test example i is training example 4 i
            assert twins[4 * dot.name] == pytest.approx((dot.x, dot.y), abs=1e-3)
    with pytest.raises(DualformError):
        example_map(table, "fc9")


def test_a_map_has_at_most_so_many_dots_and_says_what_is_left_out(digits_explorer, monkeypatch):
    monkeypatch.setattr("dualform.show.views.training.map.MOST_DOTS", 60)
    monkeypatch.setattr("dualform.show.views.training.map.MOST_TEST", 20)
    digits_explorer.work_queue = WorkQueue(1e9)
    drawn = example_map(digits_explorer)
    assert (drawn.trained, drawn.tested) == (40, 20) and len(drawn.dots) == 60
    assert drawn.left_out == len(digits_explorer.train) + len(digits_explorer.test) - 60
    with serving(digits_explorer) as served:
        assert f"{drawn.left_out:,} others are left out" in served.get("/map").text


def test_neighbours_are_the_most_similar_examples(table):
    page = training_example(table, 12)
    assert isinstance(page.neighbours, Neighbours)
    points = points_of(table, "train", list(range(60)), table.layers[-1], False).points
    centred = nn.functional.normalize(points - points.mean(0), dim=1)
    cosines = centred @ centred[12]
    cosines[12] = -2
    expected = cosines.topk(8)
    assert [other.cosine for other in page.neighbours.nearest] == pytest.approx(expected.values.tolist(), abs=1e-4)
