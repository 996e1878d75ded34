import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.text import as_cell, from_cell, starts_formula


@pytest.mark.parametrize("text", ["=cmd|'/c calc'!A1", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "-x.jpg", "=", "-"])
def test_what_could_be_a_formula_stands_behind_an_apostrophe(text: str) -> None:
    assert as_cell(text) == f"'{text}"
    assert starts_formula(text)


@pytest.mark.parametrize("text", ["", "-1", "+1", "-0.5", "1e-3", "-1.5e+30", "a=b", "'quoted'", " =1", "nan"])
def test_everything_else_stays(text: str) -> None:
    assert as_cell(text) == text


@given(st.text(st.sampled_from("='+-@1.e\t ")))
def test_a_cell_reads_as_it_was(text: str) -> None:
    assert from_cell(as_cell(text)) == text
