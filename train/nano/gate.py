"""gate=true-words: whether the first thoughts of a group are true, in nano's form of thought.

A rubric as a gate and not as a reward (DRO: "rubrics as gates") cannot be traded against the return.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgrpo.episode import Turn
from msgrpo.game import Game
from msgrpo.train.groups import Group
from msgrpo.train.nano.words import Words, has_words, truth
from msgrpo.train.rivals.contract import Gate, Settings


class TrueWords(Gate):
    """Passes a group if more than half of the first thoughts of its episodes are true.

    All episodes of a group begin in the same state, so their first thoughts speak of one and the same board.
    """

    name = "true-words"

    def check(self, config: Settings) -> None:
        check_words(config)

    def passing(self, groups: Sequence[Group]) -> list[int]:
        return [place for place, group in enumerate(groups) if true_words(group)]


def true_words(group: Group) -> bool:
    """Whether more than half of the first thoughts are true."""
    true = sum(is_true(turns[0], group.origin(j)) for j, turns in enumerate(group.turns))
    return 2 * true > len(group.turns)


def is_true(turn: Turn, game: Game) -> bool:
    """Whether the thought of an answer is true of the game that it was about."""
    return truth(Words.read(turn.answer or ""), game, turn.player).whole


def check_words(config: Settings) -> None:
    """Raise ValueError if nano's form of thought says nothing about a scenario of the run."""
    for scenario in config.scenarios:
        if not has_words(scenario):
            raise ValueError(
                f"nano's words say nothing of {scenario.id}: no true words there; leave out what asks for them, "
                "gate=true-words, teacher=own-words or the words=… of objectives"
            )
