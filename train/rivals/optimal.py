"""teacher="optimal(weight=0.3)": the reference player says what it would have done in each state that was met.

With w the teacher's `weight`, q(a|s) the reference player's moves, its best ones with equal chances, and p(a|s, x)
the probability of the answer that names action a after the policy's own words x (with soft=τ, q(a|s) ∝ exp(Q(s,a) /
τ) by the scenario's judge instead: moves that are worth nearly the same are taught nearly alike; chances below 0.05
are left out):

    cross-entropy   adds  w Σ_a q(a|s) log p(a|s, x)  to what is maximised. A best action that the policy did not
                    choose gets a row of its own: the policy's words, then that action.
    reverse-kl      adds  w (log q(a|s) − log p(a|s, x))  to the advantage of the tokens of the action that the policy
                    chose: the gradient of −KL(p ‖ q), estimated from what was sampled. With smoothing ε,
                    q = (1 − ε) / |best| + ε / |legal|, since an action that q never plays would weigh −∞.

Taught are the tokens of the action. With reverse-kl and whole=true the words before it are taught too: all tokens get
w (log q(a|s) − log p(a|s, x) − b), b the mean over the update's turns. That is the gradient of the expectation over
the words, −E_x KL(p(·|s, x) ‖ q(·|s)). An answer without a tag teaches nothing; one whose tag names no legal action
is taught by cross-entropy alone. A turn in which reference player, judge or game fails keeps what the returns say.

The rows that the teacher adds count in the mean of the loss, so the returns weigh less beside them. Nobody sampled
them, so their ratio is 1 and no clip ends them; the policy's own rows are clipped as always.
Sources: on-policy distillation as in GKD (arXiv 2306.13649); states from the learner and actions from the expert as
in DAgger (arXiv 1011.0686).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from msgrpo.agent import Completion, action_span
from msgrpo.episode import Episode
from msgrpo.errors import RunError
from msgrpo.game import Game, Scenario
from msgrpo.games import get_scenario
from msgrpo.judge import decided, judgement_of
from msgrpo.limits import games_code, passing_faults
from msgrpo.references import best_actions
from msgrpo.train.groups import Lesson, Sample
from msgrpo.train.rivals.actfocus import token_weights
from msgrpo.train.rivals.contract import Learner, Settings, Teacher

LEAST = 0.05  # chance below which the judge's action gets no row


@dataclass(frozen=True)
class Advice:
    """How likely the teacher would have chosen each action in a turn's state, and how many were legal there."""

    chances: Mapping[str, float]
    legal: int

    @property
    def best(self) -> list[str]:
        return [action for action, chance in self.chances.items() if chance > max(self.chances.values()) - 1e-9]


class ActionTeacher(Teacher):
    """One who says how likely each action should be in the state of a turn."""

    divergence: Literal["cross-entropy", "reverse-kl"] = Field("cross-entropy", description="of policy and teacher")
    smooth: float = Field(0.05, gt=0, lt=1, description="ε, how often q plays any legal action (reverse-kl)")
    whole: bool = Field(False, description="teach the words before the action too (reverse-kl)")

    def check(self, config: Settings) -> None:
        if self.whole and self.divergence != "reverse-kl":
            raise ValueError(f"teacher={self.name}: whole=true is for divergence=reverse-kl")

    @abstractmethod
    def advice(self, lessons: Sequence[Lesson]) -> dict[int, Advice]:
        """What it says of the lessons' turns, by their `id`; nothing of a turn of which it knows nothing."""

    def taught(self, lessons: Sequence[Lesson], learner: Learner) -> tuple[list[Sample], dict[str, float]]:
        """By the first of several processes for all: a teacher need not be a pure function."""
        ranks = learner.ranks
        return ranks.broadcast(self._taught(lessons, learner.policy.tokenizer) if ranks.first else ([], {}))

    def _taught(self, lessons: Sequence[Lesson], tokenizer: Any) -> tuple[list[Sample], dict[str, float]]:
        advice = self.advice(lessons)
        known = [
            (lesson, advised_here, action_tokens(lesson.sample.completion, tokenizer))
            for lesson in lessons
            if (advised_here := advice.get(id(lesson.turn))) is not None
        ]
        if self.divergence == "reverse-kl":
            samples = self._scored(known)
        else:
            samples = [sample for one in known for sample in self._corrected(*one, tokenizer)]
        agreed = sum(lesson.turn.action in advised_here.best for lesson, advised_here, _ in known)
        figures = {"teacher/turns": len(lessons), "teacher/failed": len(lessons) - len(known)}
        # All that is left of a turn of which it knows nothing: what the returns say, and what was observed.
        unknown = [lesson.sample for lesson in lessons if id(lesson.turn) not in advice]
        samples += [
            replace(sample, advantage=self.returns * sample.advantage)
            for sample in unknown
            if self.returns or sample.observed
        ]
        share = {"teacher/agreement": agreed / len(known)} if known else {}
        return samples, {name: float(value) for name, value in figures.items()} | share

    def _scored(self, taught: Sequence[tuple[Lesson, Advice, Sequence[float]]]) -> list[Sample]:
        """reverse-kl: each turn with what the teacher thinks of its action."""
        further = [
            math.log(self._chance(lesson.turn.action, advice)) - _log_chance(lesson, of_action)
            for lesson, advice, of_action in taught
        ]
        acted = [more for more, (lesson, *_) in zip(further, taught, strict=True) if lesson.turn.action is not None]
        mean = math.fsum(acted) / max(len(acted), 1) if self.whole else 0.0
        return [
            sample
            for (lesson, _, of_action), more in zip(taught, further, strict=True)
            if (sample := self._more(lesson, more - mean, [1.0] * len(of_action) if self.whole else of_action))
        ]

    def _corrected(
        self, lesson: Lesson, said: Advice, of_action: Sequence[float], tokenizer: Any
    ) -> Iterator[Sample]:
        """cross-entropy: each turn, and its words with every action of the teacher's that it did not choose."""
        if own := self._more(lesson, said.chances.get(lesson.turn.action or "", 0.0), of_action):
            yield own
        if any(of_action):
            for action, share in said.chances.items():
                if action != lesson.turn.action:
                    yield self._instead(lesson, action, of_action, share, tokenizer)

    def _more(self, lesson: Lesson, more: float, parts: Sequence[float]) -> Sample | None:
        """The turn's own sample, with `more` times its part added to each token's advantage; None where nothing would
        be learnt from it.
        """
        if lesson.turn.action is None:
            parts = [0.0] * len(parts)
        pairs = zip(lesson.sample.advantages, parts, strict=True)
        own = [self.returns * advantage + self.weight * more * part for advantage, part in pairs]
        learnt = self.returns or any(own) or lesson.sample.observed
        return replace(lesson.sample, advantage=1.0, weights=tuple(own)) if learnt else None

    def _chance(self, action: str | None, advice: Advice) -> float:
        """q(a|s), smoothed."""
        return (1 - self.smooth) * advice.chances.get(action or "", 0.0) + self.smooth / advice.legal

    def _instead(
        self, lesson: Lesson, action: str, of_action: Sequence[float], share: float, tokenizer: Any
    ) -> Sample:
        """The policy's words with another action behind them."""
        completion = lesson.sample.completion
        ids = completion.token_ids
        first, after = of_action.index(1.0), len(of_action) - of_action[::-1].index(1.0)
        words = ids[:first]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        span = action_span(text)
        assert span is not None
        begun = len(tokenizer.decode(words, skip_special_tokens=True))
        rest = tokenizer(f"{text[begun : span[0]]}{action}</action>", add_special_tokens=False)["input_ids"]
        end = [ids[after - 1]] if ids[after - 1] == tokenizer.eos_token_id else []
        row = (*words, *rest, *end)
        taught = self.weight * share
        return Sample(
            replace(completion, token_ids=row, logprobs=(math.nan,) * len(row)),
            1.0,
            (0.0,) * len(words) + (taught,) * (len(row) - len(words)),
        )


class Optimal(ActionTeacher):
    """The scenario's reference player."""

    name = "optimal"
    soft: float = Field(0.0, ge=0, description="τ, points: moves by exp(Q/τ) of the judge; 0: the best ones alike")

    def check(self, config: Settings) -> None:
        super().check(config)
        if without := [scenario.id for scenario in config.scenarios if scenario.reference is None]:
            raise ValueError(f"teacher={self.name}: {without[0]} has no reference player: teacher=none")
        if self.soft and (without := [scenario.id for scenario in config.scenarios if scenario.judge is None]):
            raise ValueError(f"teacher={self.name}: {without[0]} has no judge, so soft must be 0")
        if config.explore is not None and config.explore.name == "branch":
            raise ValueError(
                f"teacher={self.name} plays episodes again from their start; explore=branch begins later: take "
                "teacher=none or explore=none"
            )

    def advice(self, lessons: Sequence[Lesson]) -> dict[int, Advice]:
        advice = advised(lessons, self.soft)
        if lessons and not advice and not self.returns:
            who = "judge" if self.soft else "reference player"
            raise RunError(
                f"teacher={self.name}: the {who}, or the game itself, failed in all {len(lessons)} turns of this "
                "update, and with returns=0 nothing else is taught",
                fix="find the fault with: msgrpo games check SCENARIO; or leave returns=0 out",
            )
        return advice


def _log_chance(lesson: Lesson, of_action: Sequence[float]) -> float:
    """log p(a|s, x) of the action that was chosen."""
    pairs = zip(lesson.sample.completion.logprobs, of_action, strict=True)
    return math.fsum(logprob * part for logprob, part in pairs)


def action_tokens(completion: Completion, tokenizer: Any) -> list[float]:
    """1 for the tokens of `<action>…</action>` and for an end that follows at once, 0 for all others."""
    weights = list(token_weights(completion, tokenizer, 0.0))
    if 1.0 not in weights:
        return weights
    ids = list(completion.token_ids)
    span = action_span(tokenizer.decode(ids, skip_special_tokens=True))
    assert span is not None
    closed = span[1] + len("</action>")
    after = weights.index(1.0)
    while after < len(ids) and len(tokenizer.decode(ids[:after], skip_special_tokens=True)) < closed:
        after += 1
    if after < len(ids) and ids[after] == tokenizer.eos_token_id:
        after += 1
    return [weight if i < after else 0.0 for i, weight in enumerate(weights)]


def advised(lessons: Sequence[Lesson], soft: float = 0.0) -> dict[int, Advice]:
    """The advice for the lessons' turns, by their `id`, from their episodes played again."""
    turns = {id(lesson.turn) for lesson in lessons}
    episodes = {id(lesson.episode): lesson.episode for lesson in lessons}
    advice: dict[int, Advice] = {}
    for episode in episodes.values():
        assert episode is not None
        advice |= _of_episode(episode, turns, soft)
    return advice


def _of_episode(episode: Episode, turns: Container[int], soft: float) -> dict[int, Advice]:
    """Of those turns in which neither reference player nor game fails. Raises GameFaultError where that is fatal."""
    scenario, advice = get_scenario(episode.scenario), dict[int, Advice]()
    with passing_faults():
        for turn, game in decided(scenario, episode):
            if id(turn) in turns:
                with passing_faults(), games_code(scenario.id):
                    chances = _chances(scenario, game, turn.player, soft)
                    advice[id(turn)] = Advice(chances, len(game.legal(turn.player)))
    return advice


def _chances(scenario: Scenario, game: Game, player: str, soft: float) -> dict[str, float]:
    """q(·|s), of the actions that are taught."""
    if not soft:
        best = best_actions(scenario, game, player)
        return dict.fromkeys(best, 1 / len(best))
    judgement = judgement_of(scenario, game, player)
    most = max(q for action, q in judgement.values.items() if action is not None)
    worth = {a: math.exp((q - most) / soft) for a, q in judgement.values.items() if a is not None}
    taught = {action: x for action, x in worth.items() if x >= LEAST * math.fsum(worth.values())}
    whole = math.fsum(taught.values())
    return {action: x / whole for action, x in taught.items()}
