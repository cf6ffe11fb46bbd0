"""Textual's list of options, for which a page key may come before its lines are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from textual.widgets import OptionList


@contextmanager
def laid_out() -> Iterator[None]:
    """Pass over a page key of a list without lines: Textual looks its first line up and raises KeyError."""
    try:
        yield
    except KeyError as error:
        if not isinstance(error.args[0], int):
            raise


class Options(OptionList):
    """`pagedown` and `pageup` do nothing in a list that was not laid out yet."""

    def action_page_down(self) -> None:
        with laid_out():
            super().action_page_down()  # type: ignore[no-untyped-call]

    def action_page_up(self) -> None:
        with laid_out():
            super().action_page_up()  # type: ignore[no-untyped-call]
