"""What attention selects and recalls: the page shows what the layer does, and its parts sum to what they claim."""

import math
from typing import Any

import pytest
import torch
from conftest import few_steps, series_model, some_pictures, some_series
from serving import serving
from torch import Tensor, nn

from dualform.attention import ATTENTIONS, Heads, build
from dualform.data.reading import WordVocabulary
from dualform.errors import QueryError
from dualform.explain import open_memory
from dualform.models import TransformerLM, ViT
from dualform.show.examples import Examples
from dualform.show.views.attention import AttentionQuestion, attention
from dualform.show.views.attention.allocation import ThroughTraining
from dualform.show.views.attention.heads import call_of_layer
from dualform.show.views.attention.support import members
from dualform.show.views.explorer import ExamplePlace, Explorer
from dualform.show.views.prediction import PredictionView
from dualform.show.views.render import as_plain
from dualform.tuning import VisualQueryTuning

FOURTH = ExamplePlace("test", 4)


def tokens_of(explorer: Explorer, place: ExamplePlace) -> tuple[Heads, Tensor, Tensor]:
    """The attention layer with the memory's weights, what it sees of a series, and its padding."""
    model: Any = explorer.memory.load_into(explorer.model)
    given = explorer.input(place)
    with torch.no_grad():
        x = model.blocks[0].norm1(model.embed(given["x"]) + model.position(torch.arange(16))[None])
    return model.blocks[0].attn, x, given["padding"]


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_weights_are_those_of_every_layer_of_the_table(name, tmp_path, no_waiting_for_the_disk):
    waves, padding, labels = some_series()
    few_steps(series_model(name), tmp_path / "memory", (waves, padding), labels, 2)
    examples = Examples(waves, labels, series=True, others={"padding": padding})
    explorer = Explorer(open_memory(tmp_path / "memory"), series_model(name), examples, examples)
    views = [attention(explorer, FOURTH, AttentionQuestion(head=head)) for head in range(4)]
    layer, x, hidden = tokens_of(explorer, FOURTH)
    there = 16 - int(hidden.sum())
    with torch.no_grad():
        weights = layer.weights(x, padding=hidden)[0, :, :there, :there].double()
    torch.testing.assert_close(torch.tensor([view.weights for view in views]).double(), weights, atol=1e-5, rtol=0)
    for view in views:
        assert [sum(line) for line in view.weights] == pytest.approx([1.0] * there, abs=1e-5)
        assert sum(view.looks) == pytest.approx(1.0, abs=1e-5) and view.support is not None
        assert view.tokens[-1] == f"t = {there - 1}"


def test_padding_changes_nothing(series_explorer):
    """A series with its padding, and the same one brought without."""
    explorer = series_explorer
    padded = attention(explorer, FOURTH, AttentionQuestion())
    steps = len(padded.tokens)
    assert steps < 16 and padded.shown.lines is not None and padded.shown.lines.steps == steps
    own = attention(explorer, explorer.bring("cut", explorer.input(FOURTH)["x"][0, :steps]), AttentionQuestion())
    torch.testing.assert_close(torch.tensor(padded.weights), torch.tensor(own.weights), atol=1e-6, rtol=0)
    assert padded.support is not None and own.support is not None
    for one, other in zip(padded.support.largest, own.support.largest, strict=True):
        assert one.tokens == other.tokens and one.name == other.name
        assert (one.mass, one.share, one.log_dual) == pytest.approx((other.mass, other.share, other.log_dual), abs=1e-4)


class Twice(nn.Module):
    """One attention layer that is called twice, then one of torch."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.embed, self.ours = nn.Linear(3, 8), build("softmax", 8, 2)
        self.theirs, self.out, self.mask = nn.MultiheadAttention(8, 2), nn.Linear(8, 3), mask

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.ours(x, causal=True)
        x = self.ours(x, x[:, :9].flip(1)).transpose(0, 1)
        return self.out(self.theirs(x, x, x, attn_mask=self.mask, need_weights=False)[0].mean(0))


def explorer_of(model: nn.Module, folder, steps: int = 3) -> Explorer:
    waves, _, labels = some_series()
    few_steps(model, folder / "memory", (waves,), labels, steps)
    examples = Examples(waves, labels, series=True)
    return Explorer(open_memory(folder / "memory"), model, examples, examples)


def test_of_several_calls_the_last_one_is_seen(tmp_path):
    torch.manual_seed(0)
    explorer = explorer_of(Twice(), tmp_path)
    seen = call_of_layer(explorer.model, explorer.model.get_submodule("ours"), explorer.memory, explorer.input(FOURTH))
    assert seen.context is not None and not seen.causal and torch.equal(seen.context, seen.x[:, :9].flip(1))
    view = attention(explorer, FOURTH, AttentionQuestion("ours", token=12))
    assert view.support is not None and view.looks == pytest.approx(seen.weights.mean(0)[12].tolist())
    assert len(view.tokens) == 9 and len(view.queries) == 16 and view.tokens[3] == "token 3"
    assert view.calls == ["16 tokens, themselves", "16 tokens, 9 others"] and view.looking.call == 1
    first = attention(explorer, FOURTH, AttentionQuestion("ours", call=0))
    assert len(first.tokens) == 16 and first.looking.token == 15 and not torch.tensor(first.weights).triu(1).any()
    with pytest.raises(QueryError, match="there is no call 2 of this attention layer: it was called 2 times"):
        attention(explorer, FOURTH, AttentionQuestion("ours", call=2))
    with serving(explorer) as served:  # one looks from another sequence than one looks at
        page = served.get("/attention/test/4?layer=ours&token=12")
        assert page.status == 200 and "token=3" not in page.text and "What query token 12 attends to" in page.text


@pytest.mark.parametrize("mask", ["none", "causal", "band"])
def test_ours_stands_for_the_attention_of_torch_where_it_says_the_same(tmp_path, mask):
    torch.manual_seed(0)
    ones = torch.ones(16, 16, dtype=torch.bool)
    masks = {"none": None, "causal": ones.triu(1), "band": ones.triu(3) | ones.tril(-3)}
    view = attention(
        explorer_of(Twice(masks[mask]), tmp_path), FOURTH, AttentionQuestion("theirs", head=1, token=5, by="mass")
    )
    assert sum(view.looks) == pytest.approx(1.0) and view.calls == ["16 tokens, themselves"] and view.itself
    if mask == "band":
        assert view.support is None
        return
    assert view.support is not None
    for each in view.support.largest:
        assert view.looks[each.tokens[0]] == pytest.approx(each.mass, abs=1e-5)


# ---------------------------------------------------------------- support tokens


@pytest.mark.parametrize("head", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("token", ["all", 2])
@pytest.mark.parametrize("by", ["adds", "mass", "dual"])
def test_support_tokens_are_the_parts_of_what_the_heads_give(series_explorer, head, token, by):
    """The slow way: every weight times its value, through the last projection, along what the layer gives."""
    view = attention(series_explorer, FOURTH, AttentionQuestion(head=head, token=token, by=by))
    layer, x, padding = tokens_of(series_explorer, FOURTH)
    rows = (~padding[0]).nonzero()[:, 0] if token == "all" else torch.tensor([2])
    found = {}
    with torch.no_grad():
        for each in layer.expansions(x, padding=padding):
            alphas, first = each.weights()[0, :, rows].mean(1), each.pairs.first.tolist()
            for i, number in enumerate(each.heads):
                out = layer.out.weight[:, 4 * number : 4 * number + 4]
                for window, begin in enumerate(first):
                    found[number, begin] = alphas[i, window], out @ (alphas[i, window] * each.values[0, i, window])
        whole = (layer(x, padding=padding)[0, rows].mean(0) - layer.out.bias).double()
    mine = {key: pair for key, pair in found.items() if head in (None, key[0])}
    given = torch.stack([vector for _, vector in mine.values()]).sum(0)
    if head is None:
        torch.testing.assert_close(given.double(), whole, atol=1e-5, rtol=0)
    assert view.support is not None and view.support.largest
    for each in view.support.largest:
        mass, vector = mine[each.head, each.tokens[0]]
        assert each.mass == pytest.approx(float(mass), abs=1e-5)
        assert each.share == pytest.approx(float(vector @ given / (given @ given)), abs=1e-4)
    support = view.support
    assert sum(each.share for each in support.largest) + support.others_share == pytest.approx(1.0, abs=1e-5)
    if support.others_mass is None:
        assert head is None
    else:
        assert sum(each.mass for each in support.largest) + support.others_mass == pytest.approx(1.0, abs=1e-5)
    key = {"adds": lambda each: abs(each.share), "mass": lambda each: each.mass, "dual": lambda each: each.log_dual}[by]
    assert [key(each) for each in support.largest] == sorted(map(key, support.largest), reverse=True)


def test_a_window_is_named_by_the_steps_that_are_there(series_explorer):
    view = attention(series_explorer, FOURTH, AttentionQuestion(head=2))
    steps, names = len(view.tokens), {}
    assert view.support is not None and steps % 4
    for each in view.support.largest:
        names[each.tokens[0]] = each.name
        assert each.tokens == tuple(range(each.tokens[0], min(each.tokens[0] + 4, steps)))
    assert names[0] == "t = 0–3" and sorted(names) == list(range(0, steps, 4))


def test_a_window_of_a_grid_is_a_block():
    layer: Any = build("sh", 8, 2, scales=[1, 4], grid=(4, 4), class_tokens=1)
    assert members(layer, 3, 8) == (3, 4, 7, 8) and members(layer, 0, 0) == (0,)
    assert members(build("sh", 8, 2), 3, 5) == (3, 4, 5)  # type: ignore


def test_the_class_token_looks_at_patches(patches_explorer):
    view = attention(patches_explorer, FOURTH, AttentionQuestion())
    assert view.looking.token == 0 and view.patches == 4 and view.shown.kind == "image"
    assert view.queries[0] == "the class token" and view.queries[6] == "row 2, column 2" and len(view.tokens) == 17
    assert all(sum(line) == pytest.approx(1.0) for line in view.weights)
    assert view.support is not None and {len(each.tokens) for each in view.support.largest} == {1}
    assert all(each.name == view.tokens[each.tokens[0]] for each in view.support.largest)


@pytest.mark.parametrize("tokens", [4, 17])  # also as many as there are others
def test_query_tokens_of_a_tuned_backbone_look_at_patches(tmp_path, tokens):
    """Beside the tokens themselves; the backbone is frozen, so it is the head that recalls."""
    torch.manual_seed(0)
    model = VisualQueryTuning(ViT(12, 3, channels=1, classes=3, width=8, heads=2, layers=2), 3, tokens=tokens)
    pictures, labels = some_pictures()
    few_steps(model, tmp_path / "memory", (pictures,), labels, 3)
    examples = Examples(pictures, labels)
    explorer = Explorer(open_memory(tmp_path / "memory"), model, examples, examples)
    view = attention(explorer, FOURTH, AttentionQuestion("backbone.blocks.1.attn", head=1, token=2))
    assert view.calls == ["17 tokens, themselves", f"{tokens} tokens, 17 others"] and view.looking.call == 1
    assert view.patches == 4 and len(view.queries) == tokens and view.queries[2] == "query token 2"
    with torch.no_grad():
        block: Any = model.backbone.blocks[1]
        before = model.states(pictures[4:5])[:, 1]
        expected = block.attn.weights(block.norm1(model.queries[1:2]), block.norm1(before))[0, 1, 2]
    assert view.looks == pytest.approx(expected.tolist(), abs=1e-5)
    assert view.support is not None and isinstance(view.recalled, PredictionView) and view.looking.recalled == "head"
    own = attention(explorer, FOURTH, AttentionQuestion("backbone.blocks.1.attn", call=0))
    assert own.looking.token == 0 and own.queries[0] == "the class token" and own.itself and not view.itself
    with serving(explorer) as served:
        page = served.get("/attention/test/4?layer=backbone.blocks.1.attn&token=2")
        assert page.status == 200 and f"{tokens} tokens, 17 others" in page.text and "query token 2" in page.text


@pytest.mark.parametrize("name", ["gqa", "kdgqa", "dgqa"])
def test_the_page_shows_which_heads_share_keys_and_how_that_came_to_be(name, tmp_path):
    torch.manual_seed(0)
    options = {"window": 3} if name == "dgqa" else {}
    model = ViT(12, 3, channels=1, classes=3, width=16, heads=8, layers=2, attention=name, groups=4, **options)
    pictures, labels = some_pictures()
    few_steps(model, tmp_path / "memory", (pictures,), labels, 9)
    examples = Examples(pictures, labels)
    explorer = Explorer(open_memory(tmp_path / "memory"), model.eval(), examples, examples)
    explorer.work_queue.patience = math.inf
    found = attention(explorer, FOURTH, AttentionQuestion("blocks.1.attn")).allocation
    assert found is not None and found.heads == 8
    assert [head for each in found.groups for head in each.heads] == list(range(8))
    if name == "gqa":
        assert [len(each.heads) for each in found.groups] == [2, 2, 2, 2] and found.through is None
        return
    assert isinstance(found.through, ThroughTraining) and found.through.steps == [0, 1, 3, 4, 5, 6, 8, 9]
    assert found.through.heads[-1] == [len(each.heads) for each in found.groups]
    for step, counts in zip(found.through.steps, found.through.heads, strict=True):
        then: Any = ViT(12, 3, channels=1, classes=3, width=16, heads=8, layers=2, attention=name, groups=4, **options)
        explorer.memory.at(step).load_into(then.eval())
        with torch.no_grad():
            tokens = then.blocks[1].norm1(then.blocks[0](then.embed(pictures[4:5])))
            assert then.blocks[1].attn.allocate(tokens)[0].tolist() == counts
    with serving(explorer) as served:
        page = served.get("/attention/test/4?layer=blocks.1.attn").text
        assert "Which heads share keys and values" in page and "Through training" in page


def test_a_text_is_seen_from_its_last_token_and_words_name_its_windows(tmp_path):
    torch.manual_seed(0)
    model = TransformerLM(11, 10, width=8, heads=2, layers=1, hidden=8, attention="sh", scales=[1, 4])
    rows = torch.randint(11, (20, 9), generator=torch.Generator().manual_seed(1))

    class LastWord(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens)[:, -1]

    few_steps(LastWord(), tmp_path / "memory", (rows,), rows[:, 0], 3)
    examples = Examples(rows, None, WordVocabulary([f"w{i}" for i in range(11)], " "))
    explorer = Explorer(open_memory(tmp_path / "memory"), LastWord(), examples, examples)
    view = attention(explorer, FOURTH, AttentionQuestion(head=1))
    assert view.looking.token == 8 and view.support is not None
    names = {each.tokens: each.name for each in view.support.largest}
    words = "".join(view.shown.tokens[:4]).strip()
    assert names[0, 1, 2, 3] == f"tokens 0–3 ‘{words}’" and names[8,] == f"token 8 ‘{view.shown.tokens[8].strip()}’"
    assert sum(each.mass for each in view.support.largest) == pytest.approx(1.0, abs=1e-5)


# ---------------------------------------------------------------- what is recalled, and the page


def test_examples_are_recalled_beside_the_support(series_explorer):
    view = attention(series_explorer, FOURTH, AttentionQuestion())
    assert view.looking.recalled == "blocks.0.attn.out" and isinstance(view.recalled, PredictionView)
    assert view.recalled.question.per == "example" and len(view.recalled.examples or ()) == 6
    assert len({each.index for each in view.recalled.examples or ()}) == 6


def test_a_row_of_a_pooling_projection_is_a_window_of_tokens(series_explorer):
    explorer = series_explorer
    assert explorer.tokens("blocks.0.attn.key.4", 2) == (8, 4) and explorer.tokens("blocks.0.attn.out", 2) == (2, 1)
    assert explorer.tokens("blocks.0.attn.value.1", 2) == (2, 1) and explorer.tokens("head", 0) == (0, 1)
    shown = explorer.trained_on(3, "blocks.0.attn.key.4", 1)
    assert shown is not None and (shown.mark, shown.span) == (4, 4)


def test_what_makes_no_sense_is_refused(series_explorer):
    for looking in (
        AttentionQuestion("embed"),
        AttentionQuestion(head=4),
        AttentionQuestion(token=15),
        AttentionQuestion(recalled="head"),
    ):
        with pytest.raises(QueryError):
            attention(series_explorer, FOURTH, looking)


@pytest.mark.parametrize("fixture", ["series_explorer", "patches_explorer", "attention_explorer"])
def test_the_json_is_the_page(fixture, request):
    with serving(request.getfixturevalue(fixture)) as served:
        whole = served.get("/attention/test/4.json").json
        assert whole == as_plain(attention(served.explorer, FOURTH, AttentionQuestion()))
        for head in range(whole["heads"]):
            for token in ("all", 2):
                path = f"?head={head}&token={token}&by=mass"
                found, page = served.get(f"/attention/test/4.json{path}").json, served.get(f"/attention/test/4{path}")
                assert all(sum(line) == pytest.approx(1.0, abs=1e-5) for line in found["weights"])
                support = found["support"]
                assert sum(each["mass"] for each in support["largest"]) + support["others_mass"] == pytest.approx(1.0)
                assert sum(each["share"] for each in support["largest"]) + support["others_share"] == pytest.approx(1.0)
                assert math.isfinite(support["largest"][0]["log_dual"]) and page.status == 200
                assert "style=" not in page.text and support["largest"][0]["name"].split("‘")[0] in page.text
        for path in ("token=x", "token=99", "head=-1", "by=luck", "layer=head"):
            assert served.get(f"/attention/test/4?{path}").status == 400
