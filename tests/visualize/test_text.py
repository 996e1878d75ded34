"""Text that fits."""

from __future__ import annotations

from paceline.visualize.text import load_font, to_ascii, truncate, wrap


def test_text_is_truncated_to_the_width_there_is() -> None:
    font = load_font(12)
    assert truncate("Bag", font, 100) == "Bag"
    shortened = truncate("an unreasonably long class name", font, 80)
    assert shortened.endswith("…")
    assert font.getlength(shortened) <= 80


def test_captions_take_two_lines_at_most() -> None:
    font = load_font(12)
    assert wrap("Bag", font, 96) == ["Bag"]
    assert wrap("", font, 96) == []
    assert wrap("Ankle boot, not Pullover", font, 96) == ["Ankle boot, not", "Pullover"]
    lines = wrap("one two three four five six seven eight nine ten eleven twelve", font, 96)
    assert len(lines) == 2
    assert all(font.getlength(line) <= 96 for line in lines)


def test_letters_that_the_font_lacks_are_replaced() -> None:
    assert to_ascii("café × naïve – 猫…") == "cafe x naive - ?..."
