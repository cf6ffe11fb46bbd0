"""ψ: text → A ∪ {⊥}, the parser of a language-agent policy. Total: any text gives an action or a named failure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

ACTION_TAG = re.compile(r"<action>(.*?)</action>", re.IGNORECASE | re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
END_OF_REASONING = "</think>"


class ParseFailure(StrEnum):
    """Why a text is ⊥."""

    EMPTY = "empty"  # nothing but white space
    NO_TAG = "no_tag"  # no closed <action>…</action>
    ILLEGAL = "illegal"  # a tag, but what it holds is no action of the game


@dataclass(frozen=True)
class Parsed:
    """`action` is None exactly when `failure` is not."""

    action: str | None
    failure: ParseFailure | None


def parse_action(text: str, actions: Sequence[str]) -> Parsed:
    """The last `<action>…</action>` of the text after any `</think>`; case and surrounding space do not matter.

    The last one counts, because a model that reasons aloud may quote the tag before it decides.
    """
    answer = text.rpartition(END_OF_REASONING)[2]
    if not answer.strip():
        return Parsed(None, ParseFailure.EMPTY)
    found = ACTION_TAG.findall(answer)
    if not found:
        return Parsed(None, ParseFailure.NO_TAG)
    named = found[-1].strip().casefold()
    for action in actions:
        if named == action.casefold():
            return Parsed(action, None)
    return Parsed(None, ParseFailure.ILLEGAL)


def thought(text: str) -> str:
    """What an answer says before its last action tag: the agent's words, for a screen."""
    tags = list(ACTION_TAG.finditer(text))
    return printable(text[: tags[-1].start()] if tags else text).strip()


def printable(text: str) -> str:
    """The text with a mark for each control character but tab and newline: an answer must not drive a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
