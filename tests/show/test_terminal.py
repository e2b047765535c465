"""Pictures, texts and bars in a terminal."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dualform.data.reading import WordVocabulary
from dualform.show.examples import Examples
from dualform.show.text.terminal import bar, examples_view, passage, picture, spark


def drawn(text, colour: bool = False) -> str:
    console = Console(width=100, force_terminal=True, color_system="truecolor" if colour else None)
    with console.capture() as capture:
        console.print(text)
    return capture.get()


def test_a_picture_is_light_where_it_is_light():
    pixels = torch.zeros(20, 20, dtype=torch.uint8)
    pixels[:, 10:] = 255
    for line in picture(pixels, 10, coloured=False).plain.splitlines():
        assert line == " " * 5 + "█" * 5
    coloured = drawn(picture(pixels, 10), colour=True)
    assert "255;255;255" in coloured and "0;0;0" in coloured and coloured.count("▀") == 50


@given(st.tuples(st.integers(1, 40), st.integers(1, 40)), st.booleans(), st.booleans())
def test_any_picture_can_be_shown(shape, colours, coloured):
    pixels = torch.randint(0, 256, (*shape, 3) if colours else shape, dtype=torch.uint8)
    lines = picture(pixels, 8, coloured).plain.splitlines()
    assert lines and all(len(line) == 8 for line in lines)


def test_the_token_that_is_meant_stands_out():
    stream = Examples(torch.arange(100) % 26, None, WordVocabulary([chr(97 + i) for i in range(26)]), 10)
    text = passage(stream.shown(50, position=2))
    marked = [text.plain[span.start : span.end] for span in text.spans if "reverse" in str(span.style)]
    assert marked == [chr(97 + 52 % 26)] and text.plain.startswith("… ")


@given(st.floats(-1, 1), st.floats(0.01, 1))
def test_a_bar_goes_to_the_side_of_its_sign(value, largest):
    text = bar(value, max(largest, abs(value)))
    before, after = text.split("│")
    assert len(before) == 10 and (not before.strip() or value < 0) and (not after or value > 0)


def test_several_are_shown_side_by_side_or_below_each_other():
    images, rows = Examples(torch.rand(5, 28, 28)), Examples(torch.rand(5, 3))
    assert "+1.00" in drawn(examples_view(images, [0, 1], ["+1.00", "-2.00"], [None, None], False))
    assert drawn(examples_view(rows, [0, 1], ["+1.00", "-2.00"], [None, None], False)).count("\n") == 2


def test_a_series_is_a_line_a_channel():
    assert spark([0.0, 1.0, 2.0, 3.0, 9.0], 0.0, 7.0) == "▁▂▃▄█" and spark([5.0], 5.0, 5.0) == "▁"
    series = Examples(torch.arange(12.0).reshape(1, 6, 2), series=True, others={"padding": torch.arange(6)[None] > 3})
    assert "▁▃▅▇  ▂▄▆█" in drawn(examples_view(series, [0], ["+1.0"], [None], False))
