"""What people look at: examples of every kind, and what they bring themselves."""

import json
from io import BytesIO

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from dualform.data import read
from dualform.data.reading import ByteVocabulary, WordVocabulary
from dualform.errors import DataNotFound, QueryError
from dualform.models import SeriesClassifier
from dualform.show.examples import Examples, is_series, load_examples, load_vocabulary, png, read_picture
from dualform.show.inputs import together

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")


def pictures(*shape: int, seed: int = 0) -> torch.Tensor:
    """Some pictures in a range of their own, in which black and white do occur."""
    x = torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
    x[0].view(-1)[0], x[0].view(-1)[1] = 0, 1
    return x


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        (torch.rand(3, 28, 28), "image"), (torch.rand(3, 784), "image"), (torch.rand(3, 3, 32, 32), "image"),
        (torch.rand(3, 32, 32, 3), "image"), (torch.rand(3, 1, 9, 9), "image"), (torch.rand(3, 13), "numbers"),
        (torch.rand(3, 4, 4), "numbers"), (torch.arange(40), "text"),
    ],
)  # fmt: skip
def test_the_kind_of_an_example_is_seen_from_its_shape(inputs, kind):
    examples = Examples(inputs, length=10)
    assert examples.kind == kind
    shown = examples.shown(1)
    assert shown.kind == kind and "1" in shown.alt
    assert bool(shown.picture) == (kind == "image") and bool(shown.tokens) == (kind == "text")


@pytest.mark.parametrize("shape", [(5, 28, 28), (5, 784), (5, 3, 32, 32), (5, 32, 32, 3), (5, 1, 10, 10)])
@pytest.mark.parametrize("scale", [(0, 1), (-2.5, 4.0), (10, 255)])
def test_a_picture_that_is_brought_is_what_the_network_would_have_seen(shape, scale):
    """As bytes and back, in whatever range the training examples are."""
    low, high = scale
    x = (pictures(*shape) * 255).round() / 255
    x[1], x[2] = 0, 1  # both ends in every channel
    examples = Examples(low + x * (high - low))
    pixels = examples.pixels(examples.row(3)[0])
    file = png(pixels)
    again = read_picture(file, examples.grid, examples.channels, False)
    torch.testing.assert_close(examples.from_pixels(again), examples.row(3)[0], atol=1e-4 * (high - low), rtol=0)
    with Image.open(BytesIO(file)) as opened:
        assert np.array_equal(np.asarray(opened), pixels.numpy())


def test_writing_on_paper_is_inverted_and_other_pictures_are_not():
    paper = torch.full((20, 20), 255, dtype=torch.uint8)
    paper[8:12, 8:12] = 0
    assert read_picture(png(paper), (10, 10), 1, None)[5, 5, 0] == 1
    assert read_picture(png(255 - paper), (10, 10), 1, None)[5, 5, 0] == 1
    assert read_picture(png(paper), (10, 10), 1, False)[5, 5, 0] == 0
    assert read_picture(png(paper), (10, 10), 3, None).shape == (10, 10, 3)


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", b"<svg onload=alert(1)>", b"\x89PNG\r\n\x1a\n" + b"\0" * 50, b"MZ" * 99]
)
def test_what_is_no_picture_is_refused(data):
    with pytest.raises(QueryError, match="cannot be read as a picture"):
        read_picture(data, (8, 8), 1, None)


def test_a_picture_that_would_fill_the_memory_is_refused():
    huge = BytesIO()
    Image.new("1", (30_000, 30_000)).save(huge, "PNG")
    assert len(huge.getvalue()) < 1_000_000
    with pytest.raises(QueryError):
        read_picture(huge.getvalue(), (8, 8), 1, None)


def test_a_row_of_a_layer_is_a_place_in_the_picture():
    examples = Examples(pictures(2, 28, 28))
    assert examples.shown(0, position=5, positions=16).patch == (0.25, 0.25, 0.25, 0.25)
    assert examples.shown(0, position=6, positions=17).patch == (0.25, 0.25, 0.25, 0.25)  # after a class token
    assert examples.shown(0, position=3, positions=15).patch is None
    assert examples.shown(0, position=0, positions=1).patch is None


def test_a_place_in_a_long_text_is_shown_with_what_is_around_it():
    text = "the quick brown fox jumps over the lazy dog " * 9
    tokens = sorted(set(text))
    stream = Examples(torch.tensor([tokens.index(c) for c in text]), None, WordVocabulary(tokens), 30)
    assert len(stream) == len(text) - 29 and stream.stride == 30
    shown = stream.shown(100, position=16)
    assert shown.mark is not None and shown.tokens[shown.mark] == text[116]
    assert "".join(shown.tokens) == text[76:156]
    assert "".join(stream.shown(100).tokens) == text[100:130]
    assert "".join(stream.shown(0, position=2).tokens).startswith("the")


@given(st.text(min_size=1, max_size=40))
def test_what_is_written_is_read_again(text):
    assert "".join(ByteVocabulary().decode(ByteVocabulary().encode(text))) == text
    tokens = WordVocabulary(sorted(set(text)))
    assert "".join(tokens.decode(tokens.encode(text))) == text
    assert len(ByteVocabulary().decode(ByteVocabulary().encode(text))) == len(ByteVocabulary().encode(text))


@given(st.lists(st.integers(0, 255), max_size=30))
def test_any_bytes_can_be_shown(ids):
    assert len(ByteVocabulary().decode(ids)) == len(ids)


def test_words_that_are_not_known():
    assert WordVocabulary(["a", "<unk>"], " ").encode("a b") == [0, 1]
    with pytest.raises(QueryError, match="'b' is not in the vocabulary of 1 tokens"):
        WordVocabulary(["a"], " ").encode("a b")


def test_vocabularies_come_from_files(tmp_path):
    (tmp_path / "words.txt").write_text("the\ncat\n")
    (tmp_path / "words.json").write_text(json.dumps(["the", "cat"]))
    (tmp_path / "characters.json").write_text(json.dumps(list("abc")))
    (tmp_path / "other.json").write_text("{}")
    for name in ("words.txt", "words.json"):
        vocabulary = load_vocabulary(str(tmp_path / name))
        assert vocabulary is not None and vocabulary.encode("cat the") == [1, 0]
    characters = load_vocabulary(str(tmp_path / "characters.json"))
    assert characters is not None and characters.decode([2, 0]) == ["c", "a"]
    assert load_vocabulary(None) is None and isinstance(load_vocabulary("bytes"), ByteVocabulary)
    for name, error in (("nothing.json", DataNotFound), ("other.json", QueryError)):
        with pytest.raises(error):
            load_vocabulary(str(tmp_path / name))


def test_a_tokenizer_of_hugging_face(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "<unk>": 2}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(str(tmp_path / "tokenizer.json"))
    assert vocabulary is not None and vocabulary.encode("the cat dog") == [0, 1, 2]
    assert "".join(vocabulary.decode([0, 1])) == "the cat"


MODEL = nn.Linear(784, 3)
X, Y = pictures(6, 28, 28), torch.arange(6) % 3


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    return X, Y


def dataset() -> TensorDataset:
    return TensorDataset(X, Y)


def only() -> torch.Tensor:
    return X


def nothing() -> dict:
    return {}


def test_examples_come_from_files_factories_and_data_sets(tmp_path, monkeypatch):
    np.savez(tmp_path / "both.npz", inputs=X.numpy(), labels=Y.numpy())
    np.save(tmp_path / "x.npy", X.numpy())
    save_file({"inputs": X, "labels": Y}, tmp_path / "both.safetensors")
    here = f"{__name__}"
    names = [str(tmp_path / name) for name in ("both.npz", "both.safetensors", "x.npy")]
    for name in [*names, f"{here}:pairs", f"{here}:dataset", f"{here}:only", f"{here}:pairs()"]:
        examples = load_examples(name, MODEL)
        assert len(examples) == 6 and examples.kind == "image"
        torch.testing.assert_close(examples.rows([2, 4]), X[[2, 4]])
        labelled = "both" in name or "pairs" in name or "dataset" in name
        assert examples.label(2) == (2 if labelled else None)
    with pytest.raises(DataNotFound):
        load_examples(str(tmp_path / "missing.npz"), MODEL)
    with pytest.raises(QueryError, match="holds no examples"):
        load_examples(f"{here}:nothing", MODEL)
    with pytest.raises(QueryError, match="no example 6"):
        load_examples(f"{here}:only", MODEL).row(6)


WAVES, ENDED = torch.rand(6, 9, 4), torch.arange(9) >= torch.tensor([9, 4, 2, 9, 9, 1]).unsqueeze(1)


def frame():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    return pandas.DataFrame({"a": [1.0, 2.0], "b": [0.5, 3.0], "label": ["x", "y"]})


def test_a_factory_may_return_a_table_and_its_rows_are_shown_as_they_stand_there():
    examples = load_examples(f"{__name__}:frame", nn.Linear(2, 2))
    assert examples.kind == "numbers" and examples.shown(1).words == ("a 2", "b 3") and examples.label(1) == 1
    columns = read(frame(), scale=True).columns
    scaled = load_examples(frame(), nn.Linear(2, 2).double(), columns=columns, rows=[1])
    assert scaled.inputs.tolist() == [[1.0, 1.0]] and scaled.shown(0).words == ("a 2", "b 3")
    assert scaled.shown(0).alt.endswith("a 2, b 3") and scaled.shown(0).numbers == (2.0, 3.0)


class Tagger(nn.Module):
    """Takes tokens as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 2)

    def forward(self, input_ids, attention_mask=None):
        return self.embedding(input_ids)


def test_texts_of_a_table_come_with_the_mask_that_the_model_takes():
    texts = pa.table({"text": ["ab", "abcd"], "label": [0, 1]})
    examples = load_examples(texts, Tagger(), vocabulary=ByteVocabulary())
    assert examples.others["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert examples.shown(0).tokens == ("a", "b"), "padding is not shown"
    bare = load_examples(texts, nn.Embedding(256, 2), vocabulary=ByteVocabulary())
    assert not bare.others and bare.shown(0).tokens == ("a", "b") and bare.only([1, 0]).shown(1).tokens == ("a", "b")


def test_columns_of_whole_numbers_are_tokens_for_an_embedding():
    table = pa.table({"t0": [1, 2], "t1": [3, 0]})
    assert load_examples(table, nn.Embedding(4, 2)).inputs.dtype == torch.int64
    assert load_examples(table, nn.Linear(2, 2)).inputs.dtype == torch.float32


def test_some_examples_are_those_rows(tmp_path):
    examples = load_examples(f"{__name__}:pairs", MODEL)
    some = examples.only([4, -1])
    torch.testing.assert_close(some.rows([0, 1]), X[[4, 5]])
    assert [some.label(i) for i in range(2)] == [1, 2] and len(examples.only(slice(0, 4))) == 4
    stream = Examples(torch.arange(50), length=10).only([7])
    assert not stream.is_stream and stream.rows([0]).tolist() == [list(range(7, 17))]
    with pytest.raises(QueryError, match="no row 6: it holds 6 rows"):
        examples.only([6])


def by_name() -> dict:
    return {"inputs": WAVES, "labels": Y, "padding": ENDED, "unknown": Y + 1}


def too_few() -> dict:
    return {"inputs": WAVES, "padding": ENDED[:2]}


def test_what_a_model_takes_beside_its_inputs_comes_by_name(tmp_path):
    model = SeriesClassifier(4, 9, 3, width=8, heads=2, hidden=8, layers=1).double()
    np.savez(tmp_path / "x.npz", **{name: each.numpy() for name, each in by_name().items()})
    save_file(by_name(), tmp_path / "x.safetensors")
    for name in (str(tmp_path / "x.npz"), str(tmp_path / "x.safetensors"), f"{__name__}:by_name"):
        examples = load_examples(name, model)
        assert examples.kind == "series" and examples.label(2) == 2 and list(examples.others) == ["padding"]
        assert torch.equal(examples.beside([1, 3])["padding"], ENDED[[1, 3]]) and examples.unpadded_length(1) == 4
        given = together(examples.rows([1, 3]), examples.beside([1, 3]), model)
        assert torch.equal(model.eval()(**given), model(WAVES[[1, 3]].double(), ENDED[[1, 3]]))
    with pytest.raises(QueryError, match="6 inputs, but 2 rows of 'padding'"):
        load_examples(f"{__name__}:too_few", model)


@pytest.mark.parametrize(
    ("shape", "padded", "model", "series"),
    [
        ((20, 6), False, nn.Linear(6, 3), True), ((20, 12), False, nn.LSTM(12, 3), True),
        ((20, 12), False, nn.Linear(240, 3), False), ((28, 28), False, nn.Linear(28, 3), False),
        ((28, 28), True, nn.Linear(28, 3), True), ((12,), False, nn.Linear(12, 3), False),
        ((3, 32, 32), False, nn.Conv2d(3, 8, 3), False), ((30, 20), False, nn.Conv2d(1, 8, 3), False),
    ],
)  # fmt: skip
def test_a_series_is_what_a_model_takes_step_by_step(shape, padded, model, series):
    assert is_series(shape, {"padding": ENDED} if padded else {}, model) == series


def test_a_series_is_shown_as_lines_up_to_its_end():
    examples = Examples(WAVES, series=True, others={"padding": ENDED})
    shown = examples.shown(1, position=2)
    assert shown.lines is not None and shown.mark == 2 and "4 steps in 4 channels" in shown.alt
    torch.testing.assert_close(torch.tensor(shown.lines.values), WAVES[1, :4].T)
    low, high = WAVES[~ENDED].min(), WAVES[~ENDED].max()
    assert (shown.lines.low, shown.lines.high) == (float(low), float(high))
    assert examples.shown(1, position=8).mark is None
    for point, value in zip(shown.lines.points(0).split(), WAVES[1, :4, 0], strict=True):
        assert float(point.split(",")[1]) == pytest.approx(1 - float((value - low) / (high - low)), abs=1e-3)
    long = Examples(torch.rand(1, 1000, 20), series=True).shown(0)
    assert long.lines is not None and len(long.lines.values) == 12 and "of which 12 are drawn" in long.alt
    assert len(long.lines.values[0]) <= 256 and long.lines.points(0).split()[-1].startswith("996.5,")


def test_nothing_is_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([object()], dtype=object), allow_pickle=True)
    with pytest.raises(QueryError):
        load_examples(str(tmp_path / "x.npy"), MODEL)
