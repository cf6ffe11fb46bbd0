"""teacher="optimal(weight=0.3)": the reference player says what it would have done in each state that was met.

With q(a|s) the reference player's moves, its best ones with equal chances, and p(a|s, x) the probability of the
answer that names action a after the policy's own words x:

    cross-entropy   adds  w Σ_a q(a|s) log p(a|s, x)  to what is maximised. A best action that the policy did not
                    choose gets a row of its own: the policy's words, then that action.
    reverse-kl      adds  w (log q(a|s) − log p(a|s, x))  to the advantage of the tokens of the action that the policy
                    chose: the gradient of −KL(p ‖ q), estimated from what was sampled. With smoothing ε,
                    q = (1 − ε) / |best| + ε / |legal|, since an action that q never plays would weigh −∞.

Only the tokens of the action are taught, not the words before it; an answer without an action teaches nothing.
Sources: on-policy distillation as in GKD (arXiv 2306.13649); states from the learner and actions from the expert as
in DAgger (arXiv 1011.0686).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from msgrpo.episode import Episode
from msgrpo.games import get_scenario
from msgrpo.judge import decided
from msgrpo.parse import action_span
from msgrpo.references import best_actions
from msgrpo.train.groups import Lesson, Sample
from msgrpo.train.rivals.actfocus import token_weights
from msgrpo.train.rivals.contract import Learner, Settings, Teacher


class Optimal(Teacher):
    """The scenario's reference player."""

    name = "optimal"
    divergence: Literal["cross-entropy", "reverse-kl"] = "cross-entropy"
    smooth: float = Field(0.05, gt=0, lt=1, description="ε, how often q plays any legal action (reverse-kl)")

    def check(self, config: Settings) -> None:
        if without := [scenario.id for scenario in config.scenarios if scenario.reference is None]:
            raise ValueError(f"teacher={self.name}: {without[0]} has no reference player")
        if config.explore is not None and config.explore.name == "branch":
            raise ValueError(
                f"teacher={self.name} plays episodes again from their start; explore=branch begins later"
            )

    def taught(self, lessons: Sequence[Lesson], learner: Learner) -> tuple[list[Sample], dict[str, float]]:
        advice = advised(lessons)
        samples = [
            sample
            for lesson, said in zip(lessons, advice, strict=True)
            for sample in self._samples(lesson, said, learner.policy.tokenizer)
        ]
        agreed = sum(lesson.turn.action in said.best for lesson, said in zip(lessons, advice, strict=True))
        return samples, {"teacher/agreement": agreed / max(len(lessons), 1)}

    def _samples(self, lesson: Lesson, said: Advice, tokenizer: Any) -> Iterator[Sample]:
        completion = lesson.sample.completion
        of_action = token_weights(completion, tokenizer, 0.0)
        own = [self.returns * advantage for advantage in lesson.sample.advantages]
        if self.divergence == "reverse-kl":
            p = math.fsum(old * part for old, part in zip(completion.logprobs, of_action, strict=True))
            more = math.log(self._chance(lesson.turn.action, said)) - p
        else:
            more = (lesson.turn.action in said.best) / len(said.best)
        if any(of_action):
            own = [value + self.weight * more * part for value, part in zip(own, of_action, strict=True)]
        if self.returns or any(own):
            yield Sample(completion, 1.0, tuple(own))
        if self.divergence == "cross-entropy" and any(of_action):
            for action in said.best:
                if action != lesson.turn.action:
                    yield self._instead(lesson, action, of_action, len(said.best), tokenizer)

    def _chance(self, action: str | None, said: Advice) -> float:
        """q(a|s)."""
        return (1 - self.smooth) * (action in said.best) / len(said.best) + self.smooth / said.legal

    def _instead(self, lesson: Lesson, action: str, of_action: Sequence[float], best: int, tokenizer: Any) -> Sample:
        """The policy's words with another action behind them."""
        completion = lesson.sample.completion
        ids = completion.token_ids
        words = ids[: of_action.index(1.0)]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        span = action_span(text)
        assert span is not None
        begun = len(tokenizer.decode(words, skip_special_tokens=True))
        rest = tokenizer(f"{text[begun : span[0]]}{action}</action>", add_special_tokens=False)["input_ids"]
        end = [ids[-1]] if ids[-1] == tokenizer.eos_token_id else []
        row = (*words, *rest, *end)
        taught = self.weight / best
        return Sample(
            replace(completion, token_ids=row, logprobs=(math.nan,) * len(row)),
            1.0,
            (0.0,) * len(words) + (taught,) * (len(row) - len(words)),
        )


@dataclass(frozen=True)
class Advice:
    """What the reference player would have done in a turn's state, and how many actions were legal there."""

    best: Sequence[str]
    legal: int


def advised(lessons: Sequence[Lesson]) -> list[Advice]:
    """The advice for every lesson's turn, from its episode played again."""
    episodes = {id(lesson.episode): lesson.episode for lesson in lessons}
    advice: dict[int, Advice] = {}
    for episode in episodes.values():
        assert episode is not None
        advice |= _of_episode(episode)
    return [advice[id(lesson.turn)] for lesson in lessons]


def _of_episode(episode: Episode) -> Mapping[int, Advice]:
    scenario = get_scenario(episode.scenario)
    return {
        id(turn): Advice(best_actions(scenario, game, turn.player), len(game.legal(turn.player)))
        for turn, game in decided(scenario, episode)
    }
