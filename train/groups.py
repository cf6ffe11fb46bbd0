"""Groups: episodes that share their start, compared with each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from msgrpo.agent import Completion
from msgrpo.episode import Episode, Turn
from msgrpo.game import Game, Scenario
from msgrpo.train.msgrpo import composite_returns, group_advantages

PerTurn = list[list[float]]  # [j][t], of turn t of episode j: its return to go, its value, its credit


@dataclass(frozen=True)
class Step:
    """What credit needs of a turn: the state that it was decided in, the action, and the reward (with shaping)."""

    state: Hashable
    action: str | None
    reward: float


Trajectories = Sequence[Sequence[Step]]


@dataclass(frozen=True)
class Group:
    """G trajectories from one state: for each, the turns of one player; and what they are worth.

    Episodes in which the player had no turn (the other lost before) are not among them: nothing in them was this
    player's doing; nor are those that the game's own fault ended. `origin(j)` is a game of its own in the state in
    which trajectory j began, with the luck ahead that it had. `place` is the start's number in the update: groups of
    one start may share their episodes.

    In a game of several players the policy plays all of them, and each player's trajectories are a group: in a
    zero-sum game the mean over both seats is always 0 and says nothing.
    """

    origin: Callable[[int], Game]
    turns: list[list[Turn]]
    returns_G: Tensor
    advantages_G: Tensor
    place: int = 0
    episodes: Sequence[Episode] = ()  # that the trajectories are of

    @classmethod
    def of(
        cls, origin: Callable[[Episode], Game], episodes: Sequence[Episode], player: str, place: int
    ) -> Group | None:
        """None where fewer than two episodes can be compared."""
        whole = [one for one in episodes if one.error is None and one.turns_of(player)]
        if len(whole) < 2:
            return None
        turns = [episode.turns_of(player) for episode in whole]
        returns = composite_returns(
            [[turn.paid for turn in one] for one in turns], [[turn.shaping for turn in one] for one in turns]
        )
        return cls(lambda j: origin(whole[j]), turns, returns, group_advantages(returns), place, whole)

    def copy(self) -> Group:
        """A copy for a person's own function: what that changes reaches neither the record nor the update."""
        copies = {id(turn): _copied(turn) for turns in self.turns for turn in turns}
        episodes = [
            episode.model_copy(update={"turns": []}).model_copy(
                update={"turns": [copies.get(id(turn)) or _copied(turn) for turn in episode.turns]}, deep=True
            )
            for episode in self.episodes
        ]
        return replace(
            self,
            turns=[[copies[id(turn)] for turn in turns] for turns in self.turns],
            returns_G=self.returns_G.clone(),
            advantages_G=self.advantages_G.clone(),
            episodes=episodes,
        )

    def trajectories(self) -> list[list[Step]]:
        """The turns of each episode, as credit sees them."""
        return [[Step(_asked(turn), turn.action, turn.paid + turn.shaping) for turn in turns] for turns in self.turns]

    def of_episodes(self, scale: str) -> list[float]:
        """A_j = (C_j − mean C) / std C of each episode; with scale=update in units of reward, C_j − mean C."""
        advantages = self.advantages_G
        if scale == "update":
            advantages = advantages * self.returns_G.std(correction=0)
        return advantages.tolist()

    @property
    def is_flat(self) -> bool:
        """All returns equal: no episode was better than another, so there is nothing to learn from."""
        return not bool(self.advantages_G.any())


@dataclass(frozen=True)
class Sample:
    """One turn as an update sees it: token ids, the log-probabilities that they were sampled with, and advantages.

    `weights` says how much of the advantage each token has; it is empty where all have the whole of it [P]. Tokens
    that nobody sampled have NaN for a log-probability: their ratio is 1. `observed` are the tokens of what the player
    saw next, where the loss asks for them (`rivals/echo.py`).
    """

    completion: Completion
    advantage: float
    weights: tuple[float, ...] = ()
    observed: tuple[int, ...] = ()

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.completion.prompt_ids

    @property
    def answer_ids(self) -> tuple[int, ...]:
        return self.completion.token_ids

    @property
    def old_logprobs(self) -> tuple[float, ...]:
        return self.completion.logprobs

    @property
    def was_sampled(self) -> bool:
        """Whether the policy gave this answer, and no teacher."""
        return not any(map(math.isnan, self.old_logprobs))

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids) + len(self.observed)

    @property
    def advantages(self) -> tuple[float, ...]:
        """The advantage of every token."""
        return tuple(self.advantage * weight for weight in self.weights or (1.0,) * len(self.answer_ids))


@dataclass(frozen=True)
class Lesson:
    """A kept turn: what the returns make of it, and the episode that it is from."""

    sample: Sample
    turn: Turn
    episode: Episode | None


def _copied(turn: Turn) -> Turn:
    chances = turn.action_probabilities
    return turn.model_copy(update={"action_probabilities": None if chances is None else dict(chances)})


def _asked(turn: Turn) -> Hashable:
    """What the policy was asked: with a history in the prompt the state alone would not tell two moments apart."""
    return turn.completion.prompt_ids if turn.completion is not None else turn.state


def groups_of(scenario: Scenario, episodes: Sequence[Episode], seats: Sequence[str], place: int) -> list[Group]:
    """The groups of one start, one for each seat in which episodes can be compared."""
    groups = (Group.of(beginning(scenario), episodes, player, place) for player in seats)
    return [group for group in groups if group is not None]


def beginning(scenario: Scenario) -> Callable[[Episode], Game]:
    """The game of an episode as it began."""
    return lambda episode: scenario.new(episode.start_seed, episode.chance_seed)
