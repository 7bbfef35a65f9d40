"""The page about models says what there is."""

from __future__ import annotations

from tests.tools import model_table


def test_the_page_has_the_table() -> None:
    """If not: `python -m tests.tools.model_table`."""
    assert model_table.within(model_table.PAGE.read_text("utf-8")) == model_table.table()
