"""The interfaces of the method's choices. A choice is one class: its fields are what it takes in parentheses.

    credit       what each turn of a group's episodes is worth
    select       which episodes of a group the update sees
    gate         which whole groups the update sees
    objectives   what else than the return is compared
    teacher      a training signal beside the return
    explore      which starts the rollouts play, and what they try beyond G episodes from each
    loss         the loss of a micro-batch

A group's trajectories are lists of `Step`. R_jt = Σ_{k≥t} γ^{k−t} r_jk is the return to go, r the reward with its
shaping. Turns are in the same *state* if their prompts are equal: a prompt holds all that the policy sees, the number
of the step included.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from msgrpo.agent import LanguageAgent
from msgrpo.episode import Episode
from msgrpo.game import MOST_POINTS, Game, Scenario
from msgrpo.prompt import PromptTemplate

if TYPE_CHECKING:  # settings are read, and refused, without the seconds in which torch is loaded
    import torch
    from torch import Tensor

    from msgrpo.train.groups import Group, Lesson, PerTurn, Sample
    from msgrpo.train.ranks import Ranks


class Settings(Protocol):
    """The settings of a run that a choice may have to fit."""

    @property
    def scenarios(self) -> list[Scenario]: ...
    @property
    def group_size(self) -> int: ...
    @property
    def ahead(self) -> int: ...
    @property
    def prompt(self) -> PromptTemplate: ...
    @property
    def seed(self) -> int: ...
    @property
    def explore(self) -> Explore | None: ...


class Trained(Protocol):
    """The policy, as far as a choice may look into it."""

    @property
    def model(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def temperature(self) -> float: ...
    def logprobs(self, prefix: list[int], pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        """log p (N, T) of every answer token, and the mask; answers end together."""
        ...

    def hidden(self, prefix: list[int], rests: Sequence[list[int]]) -> Tensor:
        """The trunk's last hidden state (N, D) at the end of each prompt."""
        ...


class Playing(Protocol):
    """One update's rollouts: what a choice needs to play more of them (`msgrpo.train.rollouts.Playing`)."""

    @property
    def config(self) -> Settings: ...
    @property
    def step(self) -> int: ...
    @property
    def memory(self) -> dict[str, Tensor]: ...
    @property
    def next_start(self) -> int: ...
    def fresh(self, count: int) -> Playing: ...
    def played(self) -> list[Episode]: ...
    def groups(self, episodes: Sequence[Episode]) -> list[Group]: ...
    def flat(self, episodes: Sequence[Episode]) -> list[bool]: ...
    def by_start(
        self, episodes: Sequence[Episode]
    ) -> Iterator[tuple[Scenario, int, tuple[str, ...], Sequence[Episode]]]: ...
    def gathered(
        self, begins: Sequence[Callable[[LanguageAgent], Coroutine[Any, Any, Episode]]]
    ) -> list[Episode]: ...
    async def go_on(
        self,
        agent: LanguageAgent,
        scenario: Scenario,
        game: Callable[[], Game],
        seats: Sequence[str],
        start: int,
        parts: Sequence[object],
    ) -> Episode: ...


@dataclass(frozen=True)
class Learner:
    """What a choice may use beside the groups: the policy, the processes of the run, and the update's generator.

    `memory` is what choices keep from one update to the next, each under its own name, the same on every rank; it is
    in the checkpoint. `note` tells a person.
    """

    policy: Trained
    ranks: Ranks
    generator: torch.Generator
    memory: dict[str, Tensor] = field(default_factory=dict)
    note: Callable[[str], None] = lambda text: None


class Choice(BaseModel):
    """A choice with its settings. `name` is what it is called in a setting."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    asks_policy: ClassVar[bool] = False  # it computes with the policy, each rank by itself
    copies_games: ClassVar[bool] = False  # it goes on in copies of games in mid-play, with new luck
    one_game: ClassVar[bool] = False  # it compares the returns of different starts, so they must be of one game

    @field_validator("*")
    @classmethod
    def _is_bounded(cls, value: Any) -> Any:
        """Of larger numbers the loss is not finite, and a smaller learning rate would be advised."""
        if isinstance(value, int | float) and abs(value) > MOST_POINTS:
            raise ValueError(f"a number of up to {MOST_POINTS:g}")
        return value

    def check(self, config: Settings) -> None:
        """Raise ValueError if this choice does not fit the other settings of the run."""

    def prepare(self) -> None:
        """Load what the choice needs. Raise UsageError if it cannot be loaded."""

    def __str__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.model_dump().items())
        return f"{self.name}({settings})" if settings else self.name


class Credit(Choice):
    """What each turn is worth.

    Each estimator divides by a spread of its own group, as the paper does: then a start where nearly all episodes end
    alike weighs as much as any other. With `scale=update` estimators stay in units of reward, and all groups of an
    update are divided by one root of the mean square, as PPO does: the spread of a group is no part of its gradient
    (Dr. GRPO, arXiv 2503.20783).
    """

    scale: Literal["group", "update"] = Field("group", description="whose spread the credit is divided by")
    words: float = Field(1.0, ge=0, description="weight of the tokens before the action; below 1: ActFocus")

    @abstractmethod
    def of_groups(self, groups: Sequence[Group], learner: Learner) -> list[PerTurn]:
        """The credit of every turn, [group][j][t]; in units of reward if `scale=update`."""


class Select(Choice):
    """Which episodes of a group the update sees."""

    @abstractmethod
    def kept(self, group: Group, learner: Learner) -> list[int]:
        """The indices of the kept episodes, the same on every rank; those that are drawn come in the order drawn."""


class Sampled(Select):
    """A part of each group."""

    keep: int = Field(8, ge=1, description="G′, episodes of a group that the update sees")

    def check(self, config: Settings) -> None:
        if self.keep > config.group_size:
            raise ValueError(
                f"select keeps {self.keep} episodes (G′), more than group_size (G), {config.group_size}: "
                f"take 'select={self.name}(keep={max(1, config.group_size // 3)})', or select=all"
            )


class Gate(Choice):
    """Which whole groups the update sees: what is rejected teaches nothing, however well it scored."""

    @abstractmethod
    def passing(self, groups: Sequence[Group]) -> list[int]:
        """The places of the groups that pass, in their order."""


class Objectives(Choice):
    """What counts besides the return, compared within the group."""

    @abstractmethod
    def combined(self, credit: PerTurn, group: Group) -> PerTurn:
        """The advantages of all objectives together, [j][t]; `credit` is what the return says."""


class Teacher(Choice):
    """A training signal for each turn beside its return: on-policy distillation.

    The policy plays, and the teacher speaks of the states that it came to. What is learnt from a teacher who knows
    the best moves is no evidence of what reinforcement can learn.
    """

    weight: float = Field(1.0, gt=0, description="of what the teacher says")
    returns: float = Field(1.0, ge=0, description="of what the returns say; 0: the teacher alone")

    @abstractmethod
    def taught(self, lessons: Sequence[Lesson], learner: Learner) -> tuple[list[Sample], dict[str, float]]:
        """What the update sees in place of the lessons' own samples; and figures for the metrics, `teacher/…`."""


@dataclass(frozen=True)
class Further:
    """What was played beyond the G episodes of each start."""

    groups: list[Group]
    episodes: list[Episode]  # with those that have no result
    next_start: int = 0  # where the next update's starts begin, if more of them were taken


class Explore(Choice):
    """Which starts the rollouts play, and what they try beyond G episodes from each."""

    def check(self, config: Settings) -> None:
        if config.ahead:
            raise ValueError(
                f"explore={self.name} needs the rollouts of the update before, and ahead={config.ahead} plays "
                "without: ahead=0, or explore=none"
            )

    def worthwhile(self, scenario: Scenario, starts: Iterator[int], memory: dict[str, Tensor]) -> Iterator[int]:
        """Those of a scenario's training starts that are played, in their order; `memory` is the learner's."""
        return starts

    def further(self, playing: Playing, episodes: Sequence[Episode]) -> Further:
        """Play more, once the G episodes of each start have ended."""
        return Further([], [])

    def temperature(self, current: float, entropy: float, usual: float) -> float:
        """The temperature of the next update's rollouts, after rollouts with this entropy in nats a token."""
        return current


class Loss(Choice):
    """The loss of a micro-batch of N turns, (N, T) tokens."""

    by_token: ClassVar[bool] = True  # each token's advantage is its own; else a turn's tokens share one ratio
    kl: float = Field(0.1, ge=0, description="β, penalty on the divergence from the model without adapter")
    over: Literal["token", "turn"] = Field("token", description="mean over tokens, or over turns of their mean")
    echo: float = Field(0.0, ge=0, description="weight of the cross-entropy on the next observation: ECHO")

    def prepared(
        self, samples: Sequence[Sample], learner: Learner, tokens: int
    ) -> tuple[list[Sample], dict[str, float]]:
        """The update's turns as a loss takes them that computes with the policy before the first step, `tokens` at
        once; and figures for the metrics. Only asked where `asks_policy`.
        """
        return list(samples), {}

    @abstractmethod
    def __call__(
        self, logprobs_NT: Tensor, old_NT: Tensor, reference_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and detached means over tokens: `kl`, `clip_share`, `ratio`."""
