"""The page of a prediction: its numbers are those of the memory."""

import pytest
import torch
from torch import nn

from dualform.data import Columns
from dualform.data.reading import WordVocabulary
from dualform.errors import QueryError
from dualform.explain import open_memory
from dualform.models import MLP
from dualform.record import record
from dualform.show.commands import demo
from dualform.show.examples import Examples
from dualform.show.views.explorer import ExamplePlace, Explorer, visible
from dualform.show.views.prediction import AskedTokens, PredictionQuestion, PredictionView, predict
from dualform.show.views.render import as_plain
from dualform.show.views.work import WorkQueue
from dualform.types import Per

THIRD = ExamplePlace("test", 3)


def answer_of(explorer: Explorer, question: PredictionQuestion, place: ExamplePlace = THIRD) -> PredictionView:
    view = predict(explorer, place, question)
    assert isinstance(view, PredictionView)
    return view


def values(view: PredictionView) -> list[float]:
    assert view.examples is not None
    return [example.adds for example in view.examples]


# ---------------------------------------------------------------- the whole network


@pytest.mark.parametrize("order", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize("step", [60, 25])
def test_the_page_asks_the_whole_network_for_training_examples(digits_explorer, order, step):
    view = answer_of(digits_explorer, PredictionQuestion(order=order, step=step, k=5))
    assert view.question.layer is None and view.question.per == "example" and view.examples and view.sums
    spot = digits_explorer.memory.at(step).attend(digits_explorer.model, digits_explorer.input(THIRD))
    best = list(spot.top(5, order=order))
    assert [example.index for example in view.examples] == [hit.index for hit in best]
    assert values(view) == pytest.approx([hit.contribution for hit in best], rel=1e-4)
    groups = spot.by("label")
    parts = [term.value for term in view.sums.terms if term.kind == "group"]
    assert parts == pytest.approx(groups.values[0].tolist(), rel=1e-3, abs=1e-3)
    *some, total = view.sums.terms
    assert total.kind == "total" and view.sums.residual is not None
    assert sum(term.value for term in some) + view.sums.residual == pytest.approx(total.value, abs=1e-3)


def test_later_visits_do_not_count_at_an_earlier_step(digits_explorer):
    view = answer_of(digits_explorer, PredictionQuestion(step=25, k=40))
    visits = digits_explorer.memory.visits
    seen = visits["index"].to_numpy()[visits["step"].to_numpy() <= 25]
    assert view.examples
    for example in view.examples:
        count = int((seen == example.index).sum())
        assert count and example.when == (f"{count} visit" if count == 1 else f"{count} visits")


def test_the_headline_counts_the_examples_that_give_half(digits_explorer):
    view = answer_of(digits_explorer, PredictionQuestion())
    sums = digits_explorer.memory.attend(digits_explorer.model, digits_explorer.input(THIRD)).by("index").values[0]
    speaking, half = sorted((value for value in sums.tolist() if value > 0), reverse=True), 0.0
    count = 0
    while half < sum(speaking) / 2:
        half, count = half + speaking[count], count + 1
    assert view.headline.answer == view.says[0].name and f"from {count:,} of {len(sums):,} " in view.headline.because
    assert view.headline.verdict == ("which is right" if view.says[0].number == view.label else "but it is")


def test_charts_draw_what_they_say(digits_explorer):
    view = answer_of(digits_explorer, PredictionQuestion(k=3))
    assert view.curve and view.time and view.curve.zero is not None
    spot = digits_explorer.memory.attend(digits_explorer.model, digits_explorer.input(THIRD))
    scores = spot.top(300).scores[0]
    heights = torch.tensor([bar.height for bar in view.curve.bars], dtype=torch.float64)
    torch.testing.assert_close(heights / heights[0], (scores / scores[0]).abs().double(), atol=2e-3, rtol=0)
    assert all(
        bar.kind == ("plus" if score > 0 else "minus") for bar, score in zip(view.curve.bars, scores, strict=True)
    )
    assert [bar.href for bar in view.curve.bars[:3]] == [f"/example/{hit.index}" for hit in list(spot.top(3))]
    for chart in (view.curve, view.time):
        for bar in chart.bars:
            assert -0.1 <= bar.x <= bar.x + bar.width <= 100.1 and -0.1 <= bar.y <= bar.y + bar.height <= 100.1
            assert bar.says
        assert all(0 <= tick.at <= 100 for tick in (*chart.x_ticks, *chart.y_ticks))


# ---------------------------------------------------------------- one layer


@pytest.mark.parametrize("layer", ["fc1", "fc2"])
@pytest.mark.parametrize("score", ["contribution", "abs", "weight"])
def test_single_rows_of_a_layer_are_those_of_the_memory(digits_explorer, layer, score):
    view = answer_of(digits_explorer, PredictionQuestion(layer, score, k=5, per="slot"))
    spot = digits_explorer.memory.attend(digits_explorer.model, digits_explorer.input(THIRD))
    best = list(spot.top(5, layer=layer, score=score, per="slot"))
    assert view.examples
    assert [example.index for example in view.examples] == [hit.index for hit in best]
    expected = [hit.contribution if score == "contribution" else hit.weight for hit in best]
    assert values(view) == pytest.approx([abs(value) for value in expected] if score == "abs" else expected)
    assert [example.when for example in view.examples] == [f"step {hit.step}" for hit in best]
    assert as_plain(view)["place"] == {"set": "test", "row": 3}


@pytest.mark.parametrize("score", ["contribution", "abs"])
@pytest.mark.parametrize("order", ["largest", "smallest", "magnitude"])
def test_examples_are_shown_with_all_their_visits_together(digits_explorer, score, order):
    view = answer_of(digits_explorer, PredictionQuestion("fc1", score, order, k=4))
    groups = digits_explorer.memory.attend(digits_explorer.model, digits_explorer.input(THIRD)).by(
        "index", layer="fc1", score=score
    )
    sums = groups.values[0] + (groups.bias[0] if groups.bias is not None else 0)
    key = {"largest": sums, "smallest": -sums, "magnitude": sums.abs()}[order]
    assert view.question.per == "example"
    assert values(view) == pytest.approx(sums[key.topk(4).indices].tolist(), rel=1e-3)


def test_another_target_and_one_class_rather_than_another(digits_explorer):
    explorer = digits_explorer
    view = answer_of(explorer, PredictionQuestion("fc2", target=8, order="smallest", k=3, per="slot"))
    spot = explorer.memory.attend(explorer.model, explorer.input(THIRD), target=8)
    best = spot.top(3, layer="fc2", order="smallest", per="slot")
    assert values(view) == pytest.approx([hit.contribution for hit in best]) and "class 8" in view.target
    wrong = next(
        ExamplePlace("test", row)
        for row in range(500)
        if int(explorer.predict(ExamplePlace("test", row))[0].argmax()) != explorer.test.label(row)
    )
    view = answer_of(explorer, PredictionQuestion("fc2", rather=True), wrong)
    true = next(score for score in view.says if score.number == view.label)
    assert view.sums and view.sums.total == pytest.approx(view.says[0].logit - true.logit, abs=1e-3)
    assert "less that of" in view.target and view.headline.truth == explorer.class_name(view.label)
    right = answer_of(explorer, PredictionQuestion("fc2", rather=True))
    assert right.sums and right.sums.total == pytest.approx(right.says[0].logit - right.says[1].logit, abs=1e-3)


def test_before_the_first_step_there_is_nothing_to_recall(digits_explorer):
    view = answer_of(digits_explorer, PredictionQuestion(step=0))
    assert view.examples == [] and view.sums is None and "nothing was learned" in view.notes[0]
    with torch.no_grad():
        torch.manual_seed(0)
        first = MLP(*demo.WIDTHS)(digits_explorer.input(THIRD))[0]
    assert view.says[0].logit == pytest.approx(float(first.max()), abs=1e-5)


@pytest.mark.parametrize(
    "question",
    [
        PredictionQuestion("fc9"),
        PredictionQuestion(by="nothing"),
        PredictionQuestion(k=0),
        PredictionQuestion(k=10**6),
        PredictionQuestion(target=10),
        PredictionQuestion(step=61),
        PredictionQuestion(step=-1),
        PredictionQuestion(after=60),
        PredictionQuestion(score="abs"),
        PredictionQuestion(token=AskedTokens(1, 2)),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(digits_explorer, question):
    with pytest.raises(Exception, match=r"fc9|nothing|k=|target 10|step|score='abs'|single tokens"):
        predict(digits_explorer, THIRD, question)
    with pytest.raises(QueryError, match="no example"):
        predict(digits_explorer, ExamplePlace("test", 500), PredictionQuestion())


def test_under_adam_the_parts_sum_and_the_first_steps_are_told(adam_run, monkeypatch):
    monkeypatch.setattr("dualform.explain.ask.early_steps._is_worth_a_word", lambda *_: True)
    path, data = adam_run
    examples = Examples(data.x, data.labels)
    explorer = Explorer(open_memory(path), MLP(784, 16, 10), examples, examples, work_queue=WorkQueue(1e9))
    places: list[tuple[str | None, Per]] = [(None, "example"), ("fc1", "slot"), ("fc2", "slot")]
    for layer, per in places:
        for by in ("label", "index"):
            view = answer_of(explorer, PredictionQuestion(layer, by=by, per=per))
            assert view.examples and view.sums and view.sums.residual is not None and view.sums.total is not None
            assert abs(view.sums.residual) < 1e-3 * max(1.0, abs(view.sums.total))
            assert sum("first 5 of 60 steps" in note for note in view.notes) == 1
    later = answer_of(explorer, PredictionQuestion(after=5))
    assert any("first 5 steps of training are left out" in note for note in later.notes)
    assert later.sums and later.sums.residual is None


# ---------------------------------------------------------------- texts


def test_a_text_shows_the_tokens_that_its_examples_speak_to(text_explorer):
    explorer = text_explorer
    explorer.work_queue.patience = 1e9
    place = ExamplePlace("test", 40)
    view = answer_of(explorer, PredictionQuestion(k=3), place)
    assert view.tokens and view.tokens.speaks and view.tokens.says_next == view.says[0].name and view.examples
    assert [token.text for token in view.tokens.tokens] == list(view.shown.tokens) and len(view.tokens.tokens) == 20
    assert max(token.level for token in view.tokens.tokens) == 10
    spot = explorer.memory.attend(explorer.model, explorer.input(place))
    places = spot.places(spot.top(3))
    for example, line in zip(view.examples, places.query, strict=True):
        assert example.speaks == pytest.approx(line.tolist(), rel=1e-4, abs=1e-6)
    for example, line in zip(view.examples, places.training, strict=True):
        assert example.shown is not None and example.shown.mark is not None and example.shown.taught is not None
        start = example.index + int(line.abs().argmax())
        read, taught = explorer.train.vocabulary.decode([int(i) for i in explorer.train.inputs[start : start + 2]])
        assert example.shown.tokens[example.shown.mark] == read
        assert example.shown.tokens[example.shown.taught] == taught


def test_a_token_that_is_clicked_is_the_one_that_is_explained(text_explorer):
    explorer = text_explorer
    explorer.work_queue.patience = 1e9
    place = ExamplePlace("test", 40)
    ids = [int(token) for token in explorer.input(place)[0]]
    view = answer_of(explorer, PredictionQuestion(token=AskedTokens(7, 8), k=3), place)
    spot = explorer.memory.attend(explorer.model, explorer.input(place), target=lambda out: out[0][:, 6, ids[7]])
    assert values(view) == pytest.approx([hit.contribution for hit in spot.top(3)], rel=1e-4)
    assert view.truth == ids[7] and visible(explorer.test.vocabulary.tokens[ids[7]]) in view.target
    logits = spot.prediction[0][0, 6]
    assert view.says[0].number == int(logits.argmax())
    span = answer_of(explorer, PredictionQuestion(token=AskedTokens.read("7-9"), k=3), place)
    spot = explorer.memory.attend(
        explorer.model, explorer.input(place),
        target=lambda out: sum(out[0][:, i - 1, ids[i]] for i in (7, 8, 9)),
    )  # fmt: skip
    assert values(span) == pytest.approx([hit.contribution for hit in spot.top(3)], rel=1e-4)
    for token in ("0", "20", "5-25"):
        with pytest.raises(QueryError, match="out of range"):
            answer_of(explorer, PredictionQuestion(token=AskedTokens.read(token)), place)
    with pytest.raises(QueryError, match="span of tokens"):
        AskedTokens.read("x")


def test_rows_of_a_layer_mark_their_token(text_explorer):
    explorer = text_explorer
    explorer.work_queue.patience = 1e9
    for layer in explorer.layers:
        view = answer_of(explorer, PredictionQuestion(layer, "abs", k=3, per="slot"), ExamplePlace("test", 40))
        spot = explorer.memory.attend(explorer.model, explorer.input(ExamplePlace("test", 40)))
        best = spot.top(3, layer=layer, score="abs", per="slot", position=-1)
        assert view.examples
        for example, hit in zip(view.examples, best, strict=True):
            assert example.shown is not None and example.shown.mark is not None
            token = int(explorer.train.inputs[hit.index + hit.position])
            assert example.shown.tokens[example.shown.mark] == explorer.train.vocabulary.decode([token])[0]


def test_a_passage_keeps_what_counts_in_the_middle():
    words = [f"w{i}" for i in range(500)]
    examples = Examples(torch.arange(500).unsqueeze(0), [0], WordVocabulary(words, " "))
    for token in (0, 3, 250, 499):
        shown = examples.passage(0, token, taught=True)
        assert shown.mark is not None and shown.tokens[shown.mark].strip() == f"w{token}"
        assert (shown.taught is None) == (token == 499)
        assert len("".join(shown.tokens)) <= 200 and shown.is_cut == (token > 100, token < 400)


# ---------------------------------------------------------------- tables, pictures


def test_rows_of_a_table_stand_beside_the_one_that_is_asked_about(tmp_path):
    torch.manual_seed(0)
    columns = Columns(
        ("age", "size", "colour"), "kind", {"colour": ("red", "blue")}, ("cat", "dog"), {"age": (50.0, 10.0)}
    )
    x = torch.cat([torch.randn(30, 2), nn.functional.one_hot(torch.arange(30) % 2, 2)], 1)
    labels, model = torch.arange(30) % 2, MLP(4, 6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer, tmp_path / "memory", dtype="float32", progress=False) as tape:
        for step in range(12):
            index = torch.arange(5 * step, 5 * step + 5) % 30
            tape.note(index=index, label=labels[index])
            nn.functional.cross_entropy(model(x[index]), labels[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    examples = Examples(x, labels, columns=columns)
    explorer = Explorer(open_memory(tmp_path / "memory"), model, examples, examples, ["cat", "dog"])
    view = answer_of(explorer, PredictionQuestion(k=30))
    assert view.rows and view.examples and sorted(view.rows.columns) == ["age", "colour", "size"]
    colour, age = view.rows.columns.index("colour"), view.rows.columns.index("age")
    assert view.rows.asked[colour] == "blue" and view.rows.asked[age] == f"{50 + 10 * float(x[3, 0]):.4g}"
    spread = float((50 + 10 * x[:, 0]).std(correction=0))
    for line in view.rows.lines:
        index = line.example.index
        assert (
            line.cells[colour].text == ("red", "blue")[index % 2]
            and line.example.label_name == ("cat", "dog")[index % 2]
        )
        assert line.cells[colour].differs == (0 if index % 2 else 2)
        apart = 10 * abs(float(x[3, 0] - x[index, 0])) / spread
        assert line.cells[age].differs == (0 if apart < 0.25 else 1 if apart < 1 else 2)
    means = [
        sum(
            abs(float(x[3, i] - x[line.example.index, i])) / float(x[:, i].std(correction=0))
            for line in view.rows.lines
        )
        for i in (0, 1)
    ]
    assert (age < view.rows.columns.index("size")) == (means[0] > means[1])


def test_a_convolution_marks_the_place_in_the_picture(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 7, stride=7), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
    images = torch.rand(12, 1, 28, 28)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer, tmp_path / "memory", dtype="float32", progress=False) as tape:
        for step in range(6):
            index = torch.arange(4 * step, 4 * step + 4) % 12
            tape.note(index=index, label=index % 4)
            nn.functional.cross_entropy(model(images[index]), index % 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    examples = Examples(images, torch.arange(12) % 4)
    explorer = Explorer(open_memory(tmp_path / "memory"), model, examples, examples)
    view = answer_of(explorer, PredictionQuestion("0", per="slot"), ExamplePlace("test", 1))
    assert view.examples and view.sums and view.sums.residual is not None and abs(view.sums.residual) < 1e-4
    best = explorer.memory.attend(model, images[1:2]).top(12, layer="0", per="slot")
    for example, hit in zip(view.examples, best, strict=True):
        assert example.shown is not None
        assert example.shown.patch == (hit.position % 4 / 4, hit.position // 4 / 4, 0.25, 0.25)
