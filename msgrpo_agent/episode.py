"""Turn and Episode: what happened, and its append-only record (one JSON line an episode)."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from msgrpo.agent import Completion, FinishReason
from msgrpo.errors import RecordError, first_fault
from msgrpo.game import Outcome
from msgrpo.parse import ParseFailure
from msgrpo.text import Clean, CleanData

SCHEMA = 1
ENGINES = ("torch", "transformers", "peft", "aiohttp", "stable_baselines3", "minigrid", "open_spiel")  # what answers
MOST_TOKENS = 2**53  # counts beyond it are no counts: JSON's numbers end there
Finite = Annotated[float, Field(allow_inf_nan=False, ge=-1e15, le=1e15)]  # sums of them are numbers, too
Name = Annotated[Clean, Field(max_length=4096)]
Count = Annotated[int, Field(ge=0, le=MOST_TOKENS)]


class Turn(BaseModel):
    """One answer of one player and what came of it. Players that move at once have turns with the same `step`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    step: int
    player: Clean
    state: Clean  # the observation; the prompt is the episode's `prefix` and this
    answer: Clean | None = None  # the text; None for players that are no language model
    action: Clean | None = None
    failure: ParseFailure | None = None
    reward: Finite = 0.0
    late: Finite = 0.0  # reward that came later, while only others moved
    shaping: Finite = 0.0
    regret: Annotated[Finite, Field(ge=0)] | None = None  # lost against the best action, where somebody judged it
    finish_reason: FinishReason | None = None
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    latency_s: Finite = 0.0
    retries: Count = 0
    reasoning: Clean | None = None
    action_probabilities: dict[Clean, Finite] | None = None
    model: Clean | None = None  # which weights answered: the version of a policy in training
    completion: Completion | None = Field(None, exclude=True, repr=False)  # with token ids, for training

    @property
    def paid(self) -> float:
        """The reward that followed, up to the player's next turn."""
        return self.reward + self.late


class Episode(BaseModel):
    """One play of a scenario, complete enough to be simulated again without any model."""

    schema_version: int = Field(SCHEMA, ge=SCHEMA, le=SCHEMA)
    scenario: Clean
    start_seed: int = Field(ge=0)
    chance_seed: int = Field(ge=0)
    sampling_seed: int = Field(ge=0)
    agents: dict[Clean, Name]  # player -> agent spec
    settings: dict[Clean, CleanData]  # player -> model, sampling, template hash
    prefix: dict[Clean, Clean] = {}  # player -> the fixed part of every prompt
    turns: list[Turn] = []
    outcome: Outcome = Outcome.PLAYING
    success: bool | None = None
    returns: dict[Clean, Finite] = {}
    error: Clean | None = None  # kind of the failure that ended it; such an episode has no result
    error_message: Clean | None = None
    versions: dict[Clean, Clean] = {}

    @property
    def score(self) -> float:
        """Success, as 0 or 1, where the game has a goal; else the return, of several players their mean."""
        if self.success is not None:
            return float(self.success)
        return sum(self.returns.values()) / len(self.returns)

    def turns_of(self, player: str) -> list[Turn]:
        return [turn for turn in self.turns if turn.player == player]


def versions() -> dict[str, str]:
    """The versions a record needs to be reproduced: of what every game uses, and of what is loaded beside it."""
    packages = ("msgrpo", "gymnasium", "numpy", *(name for name in ENGINES if name in sys.modules))
    return {"python": platform.python_version()} | {package: _version(package) for package in packages}


@cache
def _version(package: str) -> str:
    """The version of a package, looked up once, since that takes longer than playing an episode."""
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "source"


def read_episodes(path: Path) -> Iterator[Episode]:
    """Every complete line of a record. A torn last line (a killed writer) is passed over; any other fault raises."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would be read for ever
            raise RecordError(f"{path} is no file")
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    episode = Episode.model_validate_json(line)
                except ValidationError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise RecordError(f"{path}:{number} is no episode: {first_fault(error, 'the line')}") from error
                yield episode
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
