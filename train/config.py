"""TrainConfig: the settings of a run, with their sources; and the presets.

[P] arXiv 2508.10839, [V] Verlog, [ours] a choice that no source gives, with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from msgrpo.agent import Sampling
from msgrpo.errors import UsageError, nearest
from msgrpo.game import Scenario
from msgrpo.games import get_scenario
from msgrpo.models.paths import NANO, parameters_of
from msgrpo.prompt import PromptTemplate, make_template
from msgrpo.text import Clean
from msgrpo.train.credit import Credit, Scale
from msgrpo.train.msgrpo import Aggregate
from msgrpo.train.nano.words import has_words
from msgrpo.train.objectives import OBJECTIVES, Weights
from msgrpo.train.selection import Selection

MANY = 100_000  # above this a number of episodes or passes is a slip of the keyboard, and would not fit in memory
OPPONENTS = ("base", "random", "optimal", "nano")


class TrainConfig(BaseModel):
    """One training run. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    scenario: Clean = Field("frozen-lake", description="what is played; several with commas: a mixture")
    mixture: Clean | None = Field(None, description="shares of the scenarios, 0.7,0.3; without: equal ones")
    base: Clean = Field(
        "nano", description="`nano`, a folder, a GGUF file, or a hub name of a causal LM with a chat template"
    )
    seed: int = Field(0, ge=0, lt=2**32, description="of starts, luck, sampling, selection and LoRA's first weights")
    steps: int = Field(60, ge=1, le=10**9, description="updates")

    groups: int = Field(16, ge=1, le=MANY, description="groups (starts) an update; [P] has one")
    group_size: int = Field(24, ge=2, le=MANY, description="G, episodes of a group")
    keep: int = Field(8, ge=1, description="G′, episodes of a group that the update sees")
    selection: Selection = Field(
        "aaw", description="how the G′ are chosen: aaw [P], or a rival of `msgrpo.train.selection`"
    )
    credit: Credit = Field(
        "episode", description="a turn's advantage: episode [P], or a rival of `msgrpo.train.credit`"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount of returns to go; `episode` has none")
    lam: float = Field(0.95, ge=0, le=1, description="λ of credit=lambda and credit=critic")
    scale: Scale = Field("group", description="credit is divided by its group's spread [P], or by the update's")
    state_weight: float = Field(1.0, ge=0, description="of the advantage within a state, in credit=state")
    branch: int = Field(
        0, ge=0, le=MANY, description="episodes more from the state each group disagrees about; train.branch"
    )
    drop_groups: float = Field(0.0, ge=0, lt=1, description="share of groups passed over: least variance of returns")
    objectives: dict[str, float] = Field(
        {}, description="beside the return, as JSON, name and weight; train.objectives"
    )
    objective_weights: Weights = Field("fixed", description="of the objectives: as set, or DVAO's")
    words_weight: float = Field(1.0, ge=0, description="of the tokens before the action; below 1: ActFocus")
    gate: Clean | None = Field(None, description="module:function that accepts or rejects groups: msgrpo.train.gates")
    opponent: Clean | None = Field(
        None,
        description="who has the other seats: random, optimal, base, adapter:DIR; the policy's seat alternates",
    )
    format_penalty: float = Field(0.1, ge=0, description="Φ of an answer without a legal action is minus this")

    temperature: float = Field(1.0, gt=0, description="of rollouts and evaluations; 1 [ours]: unbiased ratios")
    entropy: float | None = Field(None, gt=0, description="nats a token that the rollouts' temperature aims at")
    max_tokens: int = Field(48, ge=1, description="of one answer")

    learning_rate: float = Field(
        1e-3, gt=0, le=1, description="AdamW's at its highest: see `msgrpo.train.update.learning_rate`"
    )
    epochs: int = Field(1, ge=1, le=MANY, description="passes over the kept episodes of an update")
    minibatches: int = Field(6, ge=1, le=MANY, description="optimizer steps a pass")
    clip_low: float = Field(0.2, gt=0, lt=1, description="ε_low")
    clip_high: float = Field(0.28, gt=0, description="ε_up; larger than ε_low keeps rare tokens alive (DAPO)")
    kl_coef: float = Field(0.1, ge=0, description="β, penalty on the divergence from the model without adapter")
    aggregate: Aggregate = Field("token", description="mean over tokens, or over turns of their tokens' mean")
    max_grad_norm: float = Field(0.2, gt=0, description="a rare k3 spike must not steer AdamW for long")
    lora_rank: int = Field(16, ge=1, le=512, description="of every linear layer's adapter [P: all linear layers]")
    lora_alpha: int = Field(32, ge=1, description="the adapter's output is scaled by lora_alpha / lora_rank")

    rollouts: Clean = Field("hf", description="hf: in this process; vllm: a child; or URLs of servers, with commas")
    ahead: int = Field(0, ge=0, le=1, description="updates that rollouts run ahead: 1 plays while the trainer learns")
    adapters: Clean | None = Field(None, description="folder shared with the servers of `rollouts`, for its versions")
    gpu_share: float = Field(0.45, gt=0, lt=1, description="of the GPU's memory, for the vLLM child")
    max_model_len: int | None = Field(None, ge=1, description="tokens of prompt and answer, of the vLLM child")
    chat: dict[str, Any] = Field({}, description="the chat template's arguments, as JSON (Qwen3: enable_thinking)")
    prompt: PromptTemplate = Field(PromptTemplate(), description="how the model is asked: a preset's name, or a file")

    eval_every: int = Field(15, ge=1, description="updates between evaluations")
    eval_episodes: int = Field(
        200, ge=1, le=MANY, description="validation starts: no update plays them, no leaderboard either"
    )
    checkpoint_every: int = Field(5, ge=1, description="updates between checkpoints")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: float32 on CPU, bfloat16 on GPU")
    micro_batch_tokens: int = Field(16_384, ge=1, description="turns' own tokens of one forward and backward")
    gradient_checkpointing: bool = Field(False, description="less memory, more time")

    @field_validator("chat", "objectives", mode="before")
    @classmethod
    def _read_json(cls, value: Any) -> Any:
        return from_json(value) if isinstance(value, str) else value

    @field_validator("prompt", mode="before")
    @classmethod
    def _read_prompt(cls, value: Any) -> Any:
        return make_template(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ids = [scenario.id for scenario in self.scenarios]
        if len(set(ids)) < len(ids):
            raise ValueError(f"scenario names one twice: {self.scenario}")
        if len(self.shares) != len(ids):
            raise ValueError(f"mixture has {len(self.shares)} shares for {len(ids)} scenarios")
        if unknown := set(self.objectives) - set(OBJECTIVES):
            raise ValueError(f"no objective is named {unknown.pop()!r}: {', '.join(OBJECTIVES)}")
        if self.opponent is not None:
            self._check_opponent(self.opponent)
        if "words" in self.objectives or self.gate == "msgrpo.train.gates:true_words":
            for scenario in self.scenarios:
                if not has_words(scenario):
                    raise ValueError(f"nano's words say nothing of {scenario.id}: no true words there")
        if self.objective_weights == "variance" and any(scale < 0 for scale in self.objectives.values()):
            raise ValueError("objective_weights=variance divides by a sum, so every objective must be 0 or more")
        if len(ids) > 1 and (self.drop_groups or self.credit == "critic" or self.scale == "update"):
            raise ValueError(
                "drop_groups, credit=critic and scale=update compare returns of one game; scenario names several"
            )
        if self.branch and self.prompt.history:
            raise ValueError("branch begins in mid-game, where a prompt with history lacks the turns before")
        if self.branch == 1:
            raise ValueError("branch is 1: one episode has none to be compared with")
        if self.ahead and (self.branch or self.entropy):
            raise ValueError("ahead=1 plays before branch and entropy have what they need: the update's own rollouts")
        if self.rollouts not in ("hf", "vllm") and not self.urls:
            raise ValueError(f"rollouts is {self.rollouts!r}: hf, vllm, or http://host:port,http://…")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"rollouts names a server twice: {self.rollouts}")
        if self.urls and self.adapters is None:
            raise ValueError("rollouts by servers need --set adapters=DIR, the folder that trainer and servers share")
        if self.ahead and self.rollouts == "hf":
            raise ValueError("ahead=1 needs rollouts by vLLM: in this process both would wait for the same cores")
        if self.keep > self.group_size:
            raise ValueError(f"keep (G′) is {self.keep}, more than group_size (G), {self.group_size}")
        return self

    def _check_opponent(self, opponent: str) -> None:
        if any(len(scenario.players) == 1 for scenario in self.scenarios):
            raise ValueError(f"opponent is {opponent!r}, and {self.scenario} has one player")
        if opponent not in OPPONENTS and opponent.partition(":")[0] not in ("nano", "adapter", "base", "dqn"):
            known = f"{', '.join(OPPONENTS)}, nano:SCENARIO, adapter:DIR, base:DIR, dqn:DIR"
            raise ValueError(f"opponent is {opponent!r}, and must play in this process: {known}")
        if opponent == "optimal" and (without := [one.id for one in self.scenarios if one.reference is None]):
            raise ValueError(f"opponent is 'optimal', and {without[0]} has no reference player")

    @property
    def scenarios(self) -> list[Scenario]:
        """What is played; the first is the one that a run's evaluations look at."""
        return [get_scenario(name) for name in names_of(self.scenario)]

    @property
    def shares(self) -> list[float]:
        """The share of each scenario among the starts."""
        if self.mixture is None:
            return [1 / len(self.scenarios)] * len(self.scenarios)
        try:
            found = [float(share) for share in self.mixture.split(",")]
        except ValueError as error:
            raise ValueError(f"mixture is {self.mixture!r}: shares with commas, 0.7,0.3") from error
        if not all(0 < share < 1e9 for share in found):
            raise ValueError(f"mixture is {self.mixture!r}: every share must be above 0")
        return [share / sum(found) for share in found]

    @property
    def urls(self) -> list[str]:
        """The servers of `rollouts`; none for hf and vllm."""
        found = [part.strip().rstrip("/").removesuffix("/v1") for part in self.rollouts.split(",")]
        return found if all(re.fullmatch(r"https?://[^/\s@?#]+", url) for url in found) else []

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, max_tokens=self.max_tokens)


PRESETS: dict[str, dict[str, Any]] = {
    # Two CPU cores, minutes. All values ours; several were compared in single trial runs only.
    "nano": {},
    # A model of up to a billion parameters on a CPU, where an update of nano's 384 episodes would take an hour. All
    # values ours. Without KL the reference's forward pass, a fifth of the update, is saved.
    "small": {
        "groups": 4,
        "group_size": 16,
        "keep": 8,
        "steps": 30,
        "eval_episodes": 50,
        "eval_every": 10,
        "checkpoint_every": 1,
        "learning_rate": 5e-4,
        "kl_coef": 0.0,
        "minibatches": 2,
    },
    # The paper's run. [P]: base, G, G′, 700 updates, one group, evaluation on the same 50 episodes, LoRA on all
    # linear layers. Ours, because no source gives them: learning rate, rank, alpha, KL, clip range, temperature,
    # token limit, format penalty, passes and minibatches.
    "paper": {
        "base": "Qwen/Qwen2.5-3B-Instruct",
        "groups": 1,
        "group_size": 100,
        "keep": 25,
        "steps": 700,
        "eval_episodes": 50,
        "eval_every": 50,
        "max_tokens": 200,
        "learning_rate": 2e-5,
        "lora_rank": 32,
        "lora_alpha": 64,
        "minibatches": 1,
        "gradient_checkpointing": True,
    },
}


# Parameters up to which a base has nano's settings, and those of `small` on a CPU.
NANO_SIZED, SMALL = 20_000_000, 1_200_000_000


def preset_for(base: str) -> str:
    """The preset of a base that none was named for: by its size, and by whether there is a GPU.

    `nano` for models of nano's size (nano taught a game is one), `small` for those that a CPU can train, else
    `paper`; that too where the size cannot be seen, since nothing of a hub's model lies here yet.
    """
    size = parameters_of(base)
    if size is not None and size <= NANO_SIZED:
        return "nano"
    return "small" if size is not None and size <= SMALL and not torch.cuda.is_available() else "paper"


# What `msgrpo train SCENARIO` begins with for nano, so that it ends in time on two cores. Those of `frozen-lake` and
# `snake` come from trial runs, looked at on validation starts only; the others were chosen for their time alone
# (`benchmarks/default_runs.py`), and nothing is known of what they reach. A game that is not here takes the preset.
FEW: dict[str, Any] = {"groups": 2, "group_size": 12, "keep": 6, "steps": 40, "eval_episodes": 50}  # long episodes
CHOSEN: dict[str, dict[str, Any]] = {
    "frozen-lake": {"steps": 40},
    "frozen-lake-big-slippery": {"groups": 8},
    "frozen-lake-4x4": {"groups": 8, "eval_episodes": 100},
    "frozen-lake-8x8": FEW,
    "snake": {  # several rewards an episode: what comes much later is not a turn's doing, and dying must be named
        "credit": "to-go",
        "gamma": 0.6,
        "groups": 8,
        "group_size": 12,
        "keep": 12,
        "minibatches": 24,
        "kl_coef": 0.05,
        "steps": 40,
        "eval_every": 10,
        "eval_episodes": 100,
    },
    "snake-poison-apple": {"groups": 4, "steps": 40, "eval_episodes": 100},
    "snake-poison-apple-and-banana": {"groups": 4, "steps": 40, "eval_episodes": 100},
    "snake-solo": FEW,
    "snake-duel": {"groups": 2, "steps": 40, "eval_episodes": 100},
}


def names_of(scenario: str) -> list[str]:
    """The names of a mixture; a comma within parentheses belongs to a game's own parameters."""
    return [name.strip() for name in re.split(r",(?![^(]*\))", scenario)]


def make_config(
    preset: str | None = None,
    *,
    file: Path | None = None,
    settings: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
    held: TrainConfig | None = None,
) -> TrainConfig:
    """The settings of the run that goes on (`held`), preset (without: `preset_for` the base, nano's with what was
    chosen for the scenario), JSON file, `key=value` settings, and the options given by name: later ones win.

    Raises UsageError for an unknown preset, key or value, naming the nearest right one.
    """
    values: dict[str, Any] = {} if held is None else held.model_dump()
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"no preset is named {preset!r}", fix=nearest(preset, PRESETS))
    said = said_settings(file=file, settings=settings, given=given)
    if held is None or preset:
        base = str(said.get("base", NANO))
        chosen = preset or preset_for(base)
        values |= PRESETS[chosen]
        if chosen == "nano" and base == NANO:
            named = said.get("scenario", TrainConfig.model_fields["scenario"].default)
            values |= CHOSEN.get(names_of(str(named))[0], {})
    values |= said
    for key in values:
        if key not in TrainConfig.model_fields:
            raise UsageError(f"no setting is named {key!r}", fix=nearest(key, TrainConfig.model_fields))
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(first_fault(error, "settings")) from error


def said_settings(
    *, file: Path | None = None, settings: Sequence[str] = (), given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a person says of a run: JSON file, `key=value` settings, and the options given by name; later ones win."""
    said: dict[str, Any] = _read(file) if file is not None else {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting!r} is not key=value", fix="for example --set learning_rate=1e-3")
        said[key.strip()] = value.strip()
    return said | {key: value for key, value in (given or {}).items() if value is not None}


def first_fault(error: ValidationError, whole: str) -> str:
    """The first thing that is wrong, where it stands, and the value seen; `whole` names what has no place of its
    own.
    """
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or whole
    seen = f" (seen: {first['input']!r})" if first["loc"] and first["type"] != "missing" else ""
    return f"{where}: {first['msg'].removeprefix('Value error, ')}{seen}"


def _read(file: Path) -> dict[str, Any]:
    try:
        values = from_json(file.read_bytes())
    except OSError as error:
        raise UsageError(f"--config {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--config {file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"--config {file} must hold one JSON object, not {type(values).__name__}")
    return values
