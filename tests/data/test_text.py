"""Texts and their parts."""

import lzma

import pytest

from dualform.data import aesop, wikitext2
from dualform.errors import DataNotFound


@pytest.mark.parametrize("split", ["ordinary", "reference"])
def test_the_parts_of_the_fables_make_up_the_whole(split):
    try:
        text = aesop(split=split)
    except DataNotFound as error:
        pytest.skip(str(error))
    assert aesop("train", split=split) + aesop("test", split=split) == text
    assert text.startswith("ÆSOP’S FABLES")
    assert "Project Gutenberg" not in text
    assert len(aesop("test", split=split)) == (17_763 if split == "reference" else len(text) // 10)
    assert "THE WOLF AND THE LAMB" in aesop("train", split=split)


@pytest.mark.parametrize("packed", [True, False], ids=["xz", "plain"])
def test_wikitext_is_read_packed_or_plain(tmp_path, monkeypatch, packed):
    monkeypatch.setenv("DUALFORM_DATA", str(tmp_path))
    (tmp_path / "wikitext-2").mkdir()
    text = " = Title = \n a <unk> line – of words \n"
    if packed:
        (tmp_path / "wikitext-2" / "test.txt.xz").write_bytes(lzma.compress(text.encode()))
    else:
        (tmp_path / "wikitext-2" / "test.txt").write_text(text, encoding="utf-8")
    assert wikitext2("test") == text


@pytest.mark.parametrize(("part", "tokens"), [("train", 2_088_628), ("valid", 217_646), ("test", 245_569)])
def test_wikitext_has_its_published_numbers_of_tokens(part, tokens):
    try:
        lines = wikitext2(part).splitlines()
    except DataNotFound as error:
        pytest.skip(str(error))
    assert sum(len(line.split()) + 1 for line in lines) == tokens
