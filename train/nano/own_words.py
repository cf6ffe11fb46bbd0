"""teacher=own-words: the actions that follow from what the policy itself has just said, in nano's form of thought.

The teacher sees the words x of an answer and not the game. Of the actions, q(a|x) are those that are best for
somebody who knows nothing but x (`words.following`), with equal chances. What is taught, and how, is as for
`teacher=optimal` (`rivals/optimal.py` has the equations), with q(a|x) in the place of q(a|s). The chances that nano
foretells on slippery ice are not listened to, since they are mostly wrong; what lies beside it is.

So nothing is taught that the words do not hold, and what can be learnt in this way ends where they are wrong. An
answer whose words cannot be read is taught nothing; where that is every answer of an update, and returns=0, the run
ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgrpo.errors import RunError
from msgrpo.games import get_scenario
from msgrpo.games.snake import DELTA
from msgrpo.train.groups import Lesson
from msgrpo.train.nano.gate import check_words
from msgrpo.train.nano.words import Sight, Words, following
from msgrpo.train.rivals.contract import Settings
from msgrpo.train.rivals.optimal import ActionTeacher, Advice


class OwnWords(ActionTeacher):
    """The actions that follow from what the policy has just said."""

    name = "own-words"

    def check(self, config: Settings) -> None:
        super().check(config)
        check_words(config)

    def advice(self, lessons: Sequence[Lesson]) -> dict[int, Advice]:
        sights: dict[str, Sight] = {}
        advice: dict[int, Advice] = {}
        for lesson in lessons:
            words = Words.read(lesson.turn.answer or "")
            if words is None or lesson.episode is None:
                continue
            name = lesson.episode.scenario
            if name not in sights:
                sights[name] = Sight(get_scenario(name).new(0, 0), lesson.turn.player)
            best = following(replace(words, chances=None), sights[name].values, sights[name].slippery)
            advice[id(lesson.turn)] = Advice(dict.fromkeys(best, 1 / len(best)), len(DELTA))
        if lessons and not advice and not self.returns:
            raise RunError(
                f"teacher={self.name} can read none of this update's {len(lessons)} answers and would teach nothing: "
                f"they do not have nano's form of thought, like {(lessons[0].turn.answer or '')[:80]!r}",
                fix="leave returns=0 out; or teach the base this form first: msgrpo teach",
            )
        return advice
