"""ψ: text → A ∪ {⊥}, the parser of a language-agent policy. Total: any text gives an action or a named failure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgrpo.text import printable

_TAG = re.compile(r"</?action>", re.IGNORECASE | re.ASCII)
START_OF_REASONING, END_OF_REASONING = "<think>", "</think>"


class ParseFailure(StrEnum):
    """Why a text holds no legal action (⊥)."""

    EMPTY = "empty"  # nothing but white space
    NO_TAG = "no_tag"  # no closed <action>…</action>
    ILLEGAL = "illegal"  # a tag, but what it holds is no action of the game
    NOT_NOW = "not_now"  # an action of the game that is not legal in this state


@dataclass(frozen=True)
class Parsed:
    """`action` is None exactly when `failure` is not."""

    action: str | None
    failure: ParseFailure | None


def parse_action(text: str, actions: Sequence[str], legal: Sequence[str] | None = None) -> Parsed:
    """The last closed `<action>…</action>` outside of reasoning; case and surrounding space do not matter.

    The last one counts, because a model that reasons aloud may quote the tag before it decides. A tag that is not
    closed is no answer: in `<action>up</action> then <action>left` the action is `up`. Reasoning is what stands
    before the last `</think>`, and what stands after a `<think>` that is never closed: a model that was cut off
    while it thought has not answered. `legal` are the actions of this state, where they are not all. Time is linear
    in the length of the text.
    """
    if not text[slice(*_answer_span(text))].strip():
        return Parsed(None, ParseFailure.EMPTY)
    span = action_span(text)
    if span is None:
        return Parsed(None, ParseFailure.NO_TAG)
    tag_text = text[slice(*span)].strip()
    known = actions or legal or ()
    for action in (
        (tag_text,) if tag_text in known else known
    ):  # where names differ only in case (chess), the case counts
        if tag_text.casefold() == action.casefold():
            if legal is not None and action not in legal:
                return Parsed(None, ParseFailure.NOT_NOW)
            return Parsed(action, None)
    return Parsed(None, ParseFailure.ILLEGAL)


def _answer_span(text: str) -> tuple[int, int]:
    """(start, end) of the text without its reasoning."""
    closed = text.rfind(END_OF_REASONING)
    start = 0 if closed < 0 else closed + len(END_OF_REASONING)
    unclosed = text.find(START_OF_REASONING, start)
    return start, len(text) if unclosed < 0 else unclosed


def in_reasoning(text: str) -> bool:
    """Whether a text ends within reasoning that it has not closed."""
    return _answer_span(text)[1] < len(text)


def action_span(text: str) -> tuple[int, int] | None:
    """(start, end) of what the last closed action tag outside of reasoning holds; None without one."""
    start: int | None = None
    span: tuple[int, int] | None = None
    for tag in _TAG.finditer(text, *_answer_span(text)):
        if not tag.group().startswith("</"):
            start = tag.end()
        elif start is not None:
            span, start = (start, tag.start()), None
    return span


def thought(text: str) -> str:
    """The text of an answer before its last action tag, for a screen."""
    span = action_span(text)
    return printable(text[: span[0] - len("<action>")] if span else text).strip()
