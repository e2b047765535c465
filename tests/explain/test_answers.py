"""What comes back: hits and groups that iterate, name their columns, and go to pandas; targets of every kind."""

import numpy as np
import pytest
import torch
from helpers import Run, assert_whole, batches, close, mlp, sgd, tokens, trained
from torch import nn

import dualform
from dualform.errors import QueryError


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    model = mlp(5, 4, 3)
    return trained(tmp_path_factory.mktemp("memory"), model, sgd(model), batches(5, 4, 5, 3))


@pytest.fixture
def spot(run):
    return run.memory.attend(run.model, run.inputs[:3])


# ---------------------------------------------------------------- hits


def test_the_hits_of_a_single_query_iterate_with_their_columns_as_attributes(run):
    hits = run.memory.attend(run.model, run.inputs[:1]).top(4, layer="2", per="slot")
    assert len(hits) == 1
    found = list(hits)
    assert [hit.rank for hit in found] == [0, 1, 2, 3]
    assert [hit.contribution for hit in found] == sorted((hit.contribution for hit in found), reverse=True)
    visits = run.memory.visits.to_pylist()
    for hit in found:
        line = visits[hit.columns["visit"]]
        assert (hit.index, hit.label, hit.source, hit.row) == tuple(
            line[c] for c in ("index", "label", "source", "row")
        )
        assert hit.step == line["step"] and hit.query == 0 and hit.position == 0
        assert isinstance(hit.weight, float) and isinstance(hit.label, int) and isinstance(hit.source, str)
        with pytest.raises(AttributeError, match=r"no 'colour': it has .*'label'"):
            _ = hit.colour


def test_the_hits_of_several_queries_iterate_query_by_query(spot):
    hits = spot.top(4, layer="0", per="slot")
    assert len(hits) == 3
    assert [(hit.query, hit.rank) for hit in hits] == [(query, rank) for query in range(3) for rank in range(4)]
    assert [hit.columns["visit"] for hit in hits] == hits.columns["visit"].to_pylist() == hits.visits.flatten().tolist()
    for i in range(3):
        one = hits[i]
        assert len(one) == 1 and torch.equal(one.slots[0], hits.slots[i])
        assert [hit.columns["visit"] for hit in one] == hits.visits[i].tolist()


def test_a_query_can_be_counted_from_the_end(spot):
    hits = spot.top(4, layer="0", per="slot")
    assert torch.equal(hits[-1].slots, hits[2].slots)
    assert [hit.label for hit in hits[-1]] == [hit.label for hit in hits[2]]


def test_a_query_that_was_not_asked_is_no_empty_answer(spot):
    hits = spot.top(4, layer="0", per="slot")
    with pytest.raises((IndexError, QueryError)):
        _ = hits[3]


def test_hits_go_to_pandas_one_line_each(spot):
    hits = spot.top(4, layer="0", order="magnitude", per="slot")
    frame = hits.to_pandas()
    assert len(frame) == 12
    assert frame["query"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert frame["rank"].tolist() == [0, 1, 2, 3] * 3
    for name, tensor in (
        ("slot", hits.slots),
        ("step", hits.steps),
        ("position", hits.positions),
        ("weight", hits.weight),
        ("contribution", hits.contribution),
    ):
        assert frame[name].tolist() == tensor.flatten().tolist()
    for name in ("visit", "index", "label", "source", "row"):
        assert frame[name].tolist() == hits.columns[name].to_pylist()


# ---------------------------------------------------------------- groups


def test_groups_go_to_pandas_one_line_a_query(spot):
    groups = spot.by("source", layer="2")
    frame = groups.to_pandas()
    assert frame.columns.tolist() == ["even", "odd"] and frame.columns.name == "source"
    assert frame.index.name == "query"
    np.testing.assert_array_equal(frame.to_numpy(), groups.values.numpy())


def test_the_largest_groups_are_named(spot):
    groups = spot.by("label", layer="2")
    for line, values in zip(groups.largest(2), groups.values, strict=True):
        best = values.argsort(descending=True)[:2].tolist()
        assert [name for name, _ in line] == [groups.names[i] for i in best]
        assert [value for _, value in line] == values[best].tolist()
    assert all(len(line) == 3 for line in groups.largest(10))


def test_groups_and_timelines_of_one_query_are_those_of_the_query_asked_alone(run, spot):
    alone = run.memory.attend(run.model, run.inputs[2:3])
    for query in (2, -1):
        groups, expected = spot.by("label", layer="0")[query], alone.by("label", layer="0")
        for name in ("values", "bias", "initial", "total", "residual"):
            close(getattr(groups, name), getattr(expected, name))
        assert (groups.names, groups.target, len(groups)) == (expected.names, expected.target, 1)
        line, expected = spot.timeline("label", layer="0")[query], alone.timeline("label", layer="0")
        close(line.values, expected.values)
        assert torch.equal(line.edges, expected.edges) and line.names == expected.names
    sizes = spot.by("label", layer="0", score="abs")
    assert torch.equal(sizes[1].values, sizes.values[1:2]) and sizes[1].total is None


@pytest.mark.parametrize("query", [3, -4])
def test_a_query_that_was_not_asked_has_no_answer(query, spot):
    for answer in (spot.top(2, layer="0", per="slot"), spot.by("label", layer="0"), spot.timeline(layer="0")):
        with pytest.raises(QueryError, match=f"query {query} was not asked: this answer holds 3"):
            _ = answer[query]


def test_groups_and_timelines_iterate_query_by_query_and_group_by_group(spot):
    groups, line = spot.by("label", layer="0"), spot.timeline("label", layer="0")
    for answer in (groups, line):
        assert len(answer) == 3
        assert [row.query for row in answer] == [i for i in range(3) for _ in answer.names]
        assert [row.name for row in answer] == 3 * list(answer.names)
    assert [tuple(row) for row in groups[1]] == list(zip(groups.names, groups.values[1].tolist(), strict=True))
    assert all(torch.equal(values, line.values[1, i]) for i, (_, values) in enumerate(line[1]))


def test_only_contributions_have_a_total(spot):
    for score in ("weight", "abs"):
        groups = spot.by("label", layer="2", score=score)
        assert groups.residual is None and groups.total is None and groups.score == score
    assert spot.by("label", layer="2").residual is not None


def test_a_timeline_goes_to_pandas_one_line_a_stretch(spot):
    timeline = spot.timeline("label", layer="0", stretches=5)
    frame = timeline.to_pandas()
    assert len(frame) == 3 * 3 * 5
    assert frame["value"].tolist() == timeline.values.flatten().tolist()
    first = frame[(frame["query"] == 1) & (frame["label"] == 2)]
    assert first["after"].tolist() == [0, 1, 2, 3, 4] and first["upto"].tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(first["value"].to_numpy(), timeline.values[1, 2].numpy())
    alone = spot.timeline(layer="0", stretches=2).to_pandas()
    assert set(alone["group"]) == {"all"} and len(alone) == 6


def test_a_certificate_is_a_mapping_and_goes_to_pandas(run):
    certificate = run.memory.certificate
    assert set(certificate) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert certificate.worst == max(certificate.values())
    frame = certificate.to_pandas()
    assert frame.loc["2.bias", "error"] == certificate["2.bias"]
    assert frame.loc["2.bias", "floor"] == certificate.floor["2.bias"]
    for name in certificate:
        assert name in str(certificate)


def test_a_ledger_is_a_mapping_of_groups(run):
    ledger = run.memory.ledger("source")
    assert set(ledger) == {"odd", "even"} and len(ledger) == 2
    assert ledger["odd"]["0.weight"].shape == (4, 5) and ledger["odd"]["2.bias"].shape == (3,)
    with pytest.raises(QueryError, match="no group 'web' in column 'source'"):
        _ = ledger["web"]
    assert "odd" in ledger and "web" not in ledger


# ---------------------------------------------------------------- targets

CLASS = torch.tensor([2, 0, 1])
TARGETS = {
    "the predicted class": (None, lambda z: z.max(1).values, "the logit of the predicted class"),
    "a class": (1, lambda z: z[:, 1], "logit 1"),
    "a class from the end": (-1, lambda z: z[:, 2], "logit -1"),
    "a class each": (CLASS, lambda z: z.gather(1, CLASS[:, None])[:, 0], "the logit of the given class"),
    "a difference": ((0, 2), lambda z: z[:, 0] - z[:, 2], "logit 0 − logit 2"),
    "a function": (lambda z: z.square().sum(1), lambda z: z.square().sum(1), "the chosen target"),
    "a loss": (
        lambda z: nn.functional.cross_entropy(z, CLASS, reduction="none"),
        lambda z: nn.functional.cross_entropy(z, CLASS, reduction="none"),
        "the chosen target",
    ),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("when", ["attend", "ask"])
def test_contributions_add_to_the_target(name, when, run):
    target, value, said = TARGETS[name]
    x = run.inputs[:3]
    spot = run.memory.attend(run.model, x, target=target if when == "attend" else None)
    groups = spot.by("label", layer="2", target=target if when == "ask" else None)
    assert groups.target == said
    z = run.model(x).detach().requires_grad_()
    (direction,) = torch.autograd.grad(value(z).sum(), z)
    close(groups.total, (direction * z).sum(1))
    assert_whole(groups)
    hits = spot.top(20, layer="2", target=target if when == "ask" else None, per="slot")
    close(hits.contribution.sum(1), groups.values.sum(1))
    assert hits.target == said


def test_one_spotlight_takes_several_targets(run):
    x = run.inputs[:3]
    spot = run.memory.attend(run.model, x)
    close(spot.by("label", layer="2", target=0).total, run.model(x)[:, 0])
    close(spot.by("label", layer="2").total, run.model(x).max(1).values)
    close(spot.by("label", layer="2", target=(1, 0)).total, run.model(x)[:, 1] - run.model(x)[:, 0])
    close(spot.by("label", layer="2", target=0).total, run.model(x)[:, 0])


def test_one_spotlight_takes_several_functions_and_tensors(run):
    x = run.inputs[:3]
    spot = run.memory.attend(run.model, x)
    for c in range(3):
        close(spot.by("label", layer="2", target=lambda z, c=c: z[:, c]).total, run.model(x)[:, c])
    for c in range(3):
        close(spot.by("label", layer="2", target=torch.full((3,), c)).total, run.model(x)[:, c])


def test_a_tensor_of_classes_may_be_used_again(run):
    x = run.inputs[:3]
    spot, classes = run.memory.attend(run.model, x), torch.zeros(3, dtype=torch.int64)
    for c in range(3):
        classes.fill_(c)
        close(spot.by("label", layer="2", target=classes).total, run.model(x)[:, c])


def test_the_target_of_a_spotlight_is_that_of_its_making(run):
    x, classes = run.inputs[:3], torch.zeros(3, dtype=torch.int64)
    spot = run.memory.attend(run.model, x, target=classes)
    classes.fill_(2)
    close(spot.by("label", layer="2").total, run.model(x)[:, 0])
    close(spot.by("label", layer="2", target=classes).total, run.model(x)[:, 2])


def test_what_a_function_reads_may_change(spot, run):
    chosen = {"class": 0}
    target = lambda z: z[:, chosen["class"]]  # noqa: E731
    for chosen["class"] in range(3):
        close(spot.by("label", layer="2", target=target).total, run.model(run.inputs[:3])[:, chosen["class"]])


@pytest.mark.parametrize(
    "target",
    [3, -4, (0, 3), torch.tensor([0, 1]), torch.tensor([0, 1, 7]), torch.tensor([0.0, 1.0, 2.0]), True, lambda z: z,
     lambda z: z.sum()],
    ids=["too high", "too low", "a pair", "too few", "one too high", "fractions", "a boolean", "all logits",
         "one number"],
)  # fmt: skip
def test_a_target_that_does_not_fit_is_refused(target, spot):
    with pytest.raises(QueryError, match="target"):
        spot.top(1, layer="2", target=target, per="slot")


def test_the_target_of_a_sequence_is_its_last_position(tmp_path):
    model = nn.Sequential(nn.Linear(5, 3)).double()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
        for x, _ in batches(3, 2, 5, 3, middle=[4]):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    groups = dualform.open(tmp_path).attend(model, x).by("step", layer="0")
    close(groups.total, model(x)[:, -1].max(1).values)


@pytest.mark.parametrize("length", [2, 4])
def test_the_target_of_a_sequence_is_its_last_position_where_time_comes_first(length, tmp_path):
    model = nn.Sequential(nn.Linear(5, 3)).double()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False, batch_dim=1):
        for x, _ in batches(3, 4, 5, 3, middle=[2]):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    x = torch.randn(length, 2, 5, dtype=torch.float64)
    spot = dualform.open(tmp_path).attend(model, x)
    groups = spot.by("step", layer="0")
    assert spot.examples == 2
    close(groups.total, model(x)[-1].max(1).values)
    assert_whole(groups)


@pytest.mark.parametrize("flat", [True, False])
def test_a_network_with_one_output_explains_it(flat, tmp_path):
    model = nn.Sequential(nn.Linear(5, 1), *([nn.Flatten(0)] if flat else [])).double()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
        for x, _ in batches(3, 4, 5, 3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    x = torch.randn(2, 5, dtype=torch.float64)
    spot = dualform.open(tmp_path).attend(model, x)
    for target in (None, 0, -1):
        groups = spot.by("step", layer="0", target=target)
        close(groups.total, model(x).flatten())
    assert spot.by("step", layer="0").target == "the output"
    with pytest.raises(QueryError, match="target 1 is not among the 1 outputs"):
        spot.by("step", layer="0", target=1)


def test_a_single_number_for_all_examples_holds_no_logits(tmp_path):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x):
            return self.fc(x).sum()

    model = Loss().double()
    run = sgd(model)
    with dualform.record(model, run, tmp_path, dtype="float64", progress=False):
        model(torch.ones(2, 5, dtype=torch.float64)).backward()
        run.step()
    with pytest.raises(QueryError, match="cannot find the logits in a number; pass target=lambda"):
        dualform.open(tmp_path).attend(model, torch.ones(2, 5, dtype=torch.float64)).top(1, layer="fc", per="slot")


def test_inputs_may_be_a_tuple_or_a_mapping(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x, other):
            return self.a(x) + self.b(other), None

    torch.manual_seed(0)
    model = Two().double()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        for x, y in batches(3, 4, 5, 3):
            tape.note(label=y)
            nn.functional.cross_entropy(model(x, -x)[0], y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    x = torch.randn(2, 5, dtype=torch.float64)
    by_place, by_name = memory.attend(model, (x, 2 * x)), memory.attend(model, {"x": x, "other": 2 * x})
    close(by_place.output("b"), model.b(2 * x))
    close(by_name.output("b"), model.b(2 * x))
    assert torch.equal(by_place.by("label", layer="a").values, by_name.by("label", layer="a").values)
    parts = [by_place.by("label", layer=layer).total for layer in ("a", "b")]
    assert parts[0] is not None and parts[1] is not None
    close(parts[0] + parts[1], model(x, 2 * x)[0].max(1).values)
    close(memory.predict(model, (x, 2 * x))[0], model(x, 2 * x)[0])


def test_a_token_model_answers_with_positions(tmp_path):
    model = tokens()
    run = trained(tmp_path, model, sgd(model), batches(3, 2, 5, 3, middle=[4]))
    frame = run.memory.attend(model, run.inputs[:2]).top(24, layer="each", per="slot").to_pandas()
    assert set(frame["position"]) == {0, 1, 2, 3}
    assert frame.groupby("query")["slot"].nunique().tolist() == [24, 24]
