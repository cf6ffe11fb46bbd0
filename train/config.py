"""TrainConfig: the settings of a run, with their sources; and how they come together.

[P] arXiv 2508.10839, [V] Verlog, [ours] a choice that no source gives, with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from msgrpo.agent import Sampling
from msgrpo.errors import UsageError, check_given, first_fault, nearest
from msgrpo.files import read_regular
from msgrpo.game import MOST_POINTS, Scenario
from msgrpo.games import get_scenario
from msgrpo.games.outside import on_server
from msgrpo.mixture import names_of, weights_of
from msgrpo.models.asked import taught_as
from msgrpo.models.gguf_file import is_gguf
from msgrpo.models.paths import NANO
from msgrpo.prompt import PromptTemplate, make_template
from msgrpo.text import Clean
from msgrpo.train.backends import BACKENDS, ROLLOUTS, Hf, RolloutSettings, Tinker, Vllm, read_backend, read_rollouts
from msgrpo.train.presets import CHOSEN, PRESETS, preset_for
from msgrpo.train.rivals import RIVALS, choose, is_outside, parsed, rival
from msgrpo.train.rivals.contract import Choice, Credit, Explore, Gate, Loss, Objectives, Select, Teacher
from msgrpo.train.rivals.paper import AAW, Clip, WholeReturn

MANY = 100_000  # above this a number of episodes or passes is a slip of the keyboard, and would not fit in memory
OPPONENTS = ("base", "random", "optimal", "nano")


def _named(kind: str) -> tuple[BeforeValidator, PlainSerializer]:
    """A choice is given by its name and settings, and written as it is given."""

    def read(value: Any) -> Any:
        if isinstance(value, str):
            return choose(kind, value)
        if value is None or isinstance(value, Choice):
            return value
        raise ValueError(f"give it as text: {kind}=name(key=value, …)")

    return BeforeValidator(read), PlainSerializer(str, return_type=str)


class Numbered(BaseModel):
    """A setting that is written as a number with more in parentheses; its first field is the number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    least: ClassVar[str] = ""  # a hint in the error for a person who wants none of it

    def __str__(self) -> str:
        """How it is written whole."""
        (_, number), *others = ((key, str(value).lower()) for key, value in self)
        return f"{number}({', '.join(f'{key}={value}' for key, value in others)})"

    @classmethod
    def read(cls, value: Any) -> Self:
        """What a text or a whole number says. Raises ValueError, which says how it is written."""
        if isinstance(value, cls):
            return value
        form = f"{cls.least}it is written {cls()}"
        text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
        if re.fullmatch(r"\s*-?\d+\s*(\(.*\))?\s*", text, re.DOTALL) is None:
            raise ValueError(form)
        first = next(iter(cls.model_fields))
        try:
            number, given = parsed(text)
            if first in given:
                raise ValueError(f"{first} is the number in front of the parentheses")
            return cls.model_validate({first: number} | given)
        except ValidationError as error:
            fault = error.errors()[0]
            key, unknown = str(fault["loc"][0])[:200], fault["type"] == "extra_forbidden"
            what = f"it does not take {key}" if unknown else f"{key}: {fault['msg']}, not {fault['input']!r:.200}"
            raise ValueError(f"{what}; {form}") from error
        except ValueError as error:
            raise ValueError(f"{error}; {form}") from error


class EvaluationSettings(Numbered):
    """What evaluation=200(every=15, film=3, film_share=0.018) says."""

    least = "it is played before and after every training, with the fewest as 1(every=1000000, film=0); "
    starts: int = Field(200, ge=1, le=MANY, description="validation starts: no update plays them, no leaderboard")
    every: int = Field(15, ge=1, description="updates between evaluations")
    film: int = Field(3, ge=0, le=20, description="of the starts, played again while it learns; 0: no film")
    film_share: float = Field(0.018, ge=0, le=1, description="of the time, for the film; 1: after every update")


class MicroBatching(Numbered):
    """What micro_batch=16384(checkpointing=true) says."""

    tokens: int = Field(16_384, ge=1, description="turns' own tokens of one forward and backward")
    checkpointing: bool = Field(False, description="activations are computed again: less memory, more time")


def _numbered(kind: type[Numbered]) -> tuple[BeforeValidator, PlainSerializer]:
    """A number with more in parentheses is given as text, or alone, and written whole."""
    return BeforeValidator(kind.read), PlainSerializer(str, return_type=str)


NUMBERED: Mapping[str, type[Numbered]] = {"evaluation": EvaluationSettings, "micro_batch": MicroBatching}


class TrainConfig(BaseModel):
    """One training run. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    scenario: Clean = Field("frozen-lake", description="what is played; a mixture: snake@0.7,frozen-lake@0.3")
    base: Clean = Field("nano", description="`nano`, a folder, a GGUF file, or a hub name of a causal LM")
    seed: int = Field(0, ge=0, lt=2**32, description="of starts, luck, sampling, selection and LoRA's first weights")
    steps: int = Field(60, ge=1, le=10**9, description="updates")

    groups: int = Field(16, ge=1, le=MANY, description="groups (starts) an update; [P] has one")
    group_size: int = Field(24, ge=2, le=MANY, description="G, episodes of a group")
    credit: Annotated[Credit, *_named("credit")] = Field(
        WholeReturn(), description="a turn's advantage: episode [P], or a rival of `msgrpo.train.rivals`"
    )
    select: Annotated[Select, *_named("select")] = Field(
        AAW(),
        description="which episodes of a group the update sees: aaw [P] (the paper keeps a quarter), or a rival",
    )
    gate: Annotated[Gate, *_named("gate")] | None = Field(None, description="which whole groups the update sees")
    objectives: Annotated[Objectives, *_named("objectives")] | None = Field(
        None, description="what is compared beside the return: fixed(brevity=0.2)"
    )
    teacher: Annotated[Teacher, *_named("teacher")] | None = Field(
        None, description="a training signal beside the return: optimal(weight=0.3), model(of=adapter:DIR)"
    )
    explore: Annotated[Explore, *_named("explore")] | None = Field(
        None, description="what rollouts try beyond G episodes: branch(episodes=8), entropy(target=0.1)"
    )
    loss: Annotated[Loss, *_named("loss")] = Field(Clip(), description="the loss of a token [P], KL included")
    opponent: Clean | None = Field(
        None,
        description="who has the other seats: random, optimal, base, adapter:DIR; the policy's seat alternates",
    )
    format_penalty: float = Field(
        0.1, ge=0, le=MOST_POINTS, description="Φ of an answer without a legal action is minus this"
    )

    # vLLM takes less for 0.01; far below, the numbers that are divided by it are no longer finite.
    temperature: float = Field(1.0, ge=0.01, description="of rollouts and evaluations; 1 [ours]: unbiased ratios")
    max_tokens: int = Field(48, ge=1, description="of one answer")

    learning_rate: float = Field(
        1e-3, gt=0, le=1, description="AdamW's at its highest: see `msgrpo.train.update.learning_rate`"
    )
    minibatches: int = Field(6, ge=1, le=MANY, description="optimizer steps an update")
    lora_rank: int = Field(
        16, ge=1, le=512, description="of the adapter on every linear layer [ours; the layers: P]; alpha is twice it"
    )

    backend: Clean = Field(
        "local",
        description="what computes: local, or tinker(max_cost=20), the service that TINKER_BASE_URL names",
    )
    rollouts: Clean = Field(
        "hf",
        description="what plays: hf, in this process; vllm, a child; vllm(servers=2), started by --ray; "
        "servers(at=URL URL, adapters=DIR); each with ahead=1: while the trainer learns",
    )
    trainers: Clean = Field("1", description="processes that --ray starts for the update; 2-8: as many as fit")
    chat: dict[str, Any] = Field({}, description="the chat template's arguments, as JSON (Qwen3: enable_thinking)")
    prompt: PromptTemplate = Field(
        PromptTemplate(), description="how the model is asked: a preset's name, a file, or its fields as JSON"
    )

    evaluation: Annotated[EvaluationSettings, *_numbered(EvaluationSettings)] = Field(
        EvaluationSettings(),
        description="validation starts, how often, and the film of `msgrpo play --run`: "
        "200(every=15, film=3, film_share=0.018)",
    )
    checkpoint_every: int = Field(5, ge=1, description="updates between checkpoints")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 where it is faster")
    micro_batch: Annotated[MicroBatching, *_numbered(MicroBatching)] = Field(
        MicroBatching(),
        description="turns' own tokens of one forward and backward; for less memory 2048(checkpointing=true)",
    )
    shard: bool = Field(False, description="share the base out among the ranks: for one that a GPU cannot hold")

    @field_validator("gate", "objectives", "teacher", "explore", "opponent", mode="before")
    @classmethod
    def _read_none(cls, value: Any) -> Any:
        return None if value == "none" else value

    @field_validator("chat", mode="before")
    @classmethod
    def _read_json(cls, value: Any) -> Any:
        given = from_json(value) if isinstance(value, str) else value
        return {} if given is None else given

    @field_validator("prompt", mode="before")
    @classmethod
    def _read_prompt(cls, value: Any) -> Any:
        return make_template(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ids = [scenario.id for scenario in self.scenarios]
        if len(set(ids)) < len(ids):
            raise ValueError(f"scenario names one twice: {self.scenario}")
        if not all(1e-9 < share < 1e9 for share in weights_of(self.scenario)):
            raise ValueError(f"scenario is {self.scenario!r}: every share must be above 0")
        if self.opponent is not None:
            self._check_opponent(self.opponent)
        for chosen in self.choices:
            if chosen.one_game and len(ids) > 1:
                said, without = self._said(chosen)
                raise ValueError(f"{said} compares returns of one game; scenario names several: {without}, or one")
            chosen.check(self)
        if self.credit.scale == "update" and len(ids) > 1:
            raise ValueError(
                f"credit={self.credit} compares returns of one game; scenario names several: "
                f"'credit={self.credit.name}(scale=group)', or one"
            )
        if not self.loss.by_token:
            self._check_one_ratio()
        _ = self.rollout_settings  # raises ValueError
        form = re.fullmatch(r"[1-9]\d{0,4}(-[1-9]\d{0,4})?", self.trainers)
        if form is None or self.trainers_range[0] > self.trainers_range[1]:
            raise ValueError(f"trainers is {self.trainers!r}: a number, or from-to like 2-8")
        if self.shard:
            self._check_sharded()
        if self.service is not None:
            self._check_remote()
        for name in filter(on_server, names_of(self.scenario)):
            for chosen in self.choices:
                if chosen.copies_games:
                    said, without = self._said(chosen)
                    raise ValueError(
                        f"{said} copies games in mid-play, and those of {name} are on a server: {without}"
                    )
            if self.ahead and not self.plays_here:  # each thread counts the server's places for itself
                raise ValueError(
                    f"rollouts={self.rollouts} would play more games of {name} at once than it has places: ahead=0"
                )
        return self

    def _said(self, chosen: Choice) -> tuple[str, str]:
        """How one of the run's choices is set, and the setting that takes it out."""
        kind = next(kind for kind in RIVALS if getattr(self, kind) is chosen)
        usual = type(self).model_fields[kind].default
        return f"{kind}={chosen}", f"take {kind}={'none' if usual is None else usual.name}"

    def _check_one_ratio(self) -> None:
        """What a loss cannot do that has one ratio for all tokens of a turn."""
        has = f"tells a turn's tokens apart, and loss={self.loss.name} has one ratio for all: take loss=clip, or"
        if self.teacher is not None:
            raise ValueError(f"teacher={self.teacher} {has} teacher=none")
        if self.credit.words != 1:
            raise ValueError(f"credit={self.credit} {has} 'credit={self.credit.name}(words=1)'")

    def _check_sharded(self) -> None:
        """What one rank alone computes cannot be, where each has a part of the base."""
        if self.plays_here:
            raise ValueError(
                "shard=true, with a part of the base in each process, needs others that play: rollouts=vllm"
            )
        if self.opponent is not None and self.opponent not in ("random", "optimal", "nano"):
            raise ValueError(
                f"opponent is {self.opponent!r}, and shard=true leaves no room for a second base: take random, "
                "optimal or nano"
            )
        for chosen in self.choices:
            if chosen.asks_policy:
                said, without = self._said(chosen)
                raise ValueError(
                    f"{said} computes with the policy on each rank by itself; shard=true cannot: {without}"
                )

    def _check_remote(self) -> None:
        """What cannot be where the weights are at a service that speaks Tinker's protocol."""
        at = "backend=tinker keeps the weights at a service"
        if not isinstance(self.loss, Clip):
            raise ValueError(f"loss is {self.loss}, and {at}, whose loss is that of clip: 'loss=clip(kl=0)'")
        if self.loss.kl > 0:
            raise ValueError(
                f"loss is {self.loss}, and {at}: it has no reference model for a KL penalty, so kl must be 0: "
                "'loss=clip(kl=0)'"
            )
        if self.loss.echo:
            raise ValueError(f"loss is {self.loss}, and {at}, which learns from answers alone: echo must be 0")
        if self.rollouts != "hf" or self.trainers != "1" or self.shard:
            raise ValueError(f"{at}, which also plays: leave rollouts, trainers and shard as they are")
        if self.temperature != 1 or (self.explore is not None and self.explore.name == "entropy"):
            raise ValueError(
                f"{at}, whose log-probabilities are those of temperature 1: no other, and no explore=entropy"
            )
        for chosen in self.choices:
            if chosen.asks_policy:
                said, without = self._said(chosen)
                raise ValueError(f"{said} computes with the policy, and {at}: {without}")
        if self.teacher is not None:
            raise ValueError(
                f"teacher is {self.teacher}, and {at}, which learns from sampled answers alone: teacher=none"
            )
        if self.opponent == "base":
            raise ValueError(f"opponent is 'base', and {at}, the base's too: random, optimal, nano, adapter:DIR")
        if is_gguf(self.base):
            raise ValueError(f"base is {self.base!r}, and {at}: name the model as the service does")

    def _check_opponent(self, opponent: str) -> None:
        if any(len(scenario.players) == 1 for scenario in self.scenarios):
            raise ValueError(f"opponent is {opponent!r}, and {self.scenario} has one player: opponent=none")
        if opponent not in OPPONENTS and opponent.partition(":")[0] not in ("nano", "adapter", "base", "dqn"):
            known = f"{', '.join(OPPONENTS)}, nano:SCENARIO, adapter:DIR, base:DIR, dqn:DIR"
            raise ValueError(f"opponent is {opponent!r}, and must play in this process: {known}")
        if opponent == "optimal" and (without := [one.id for one in self.scenarios if one.reference is None]):
            raise ValueError(f"opponent is 'optimal', and {without[0]} has no reference player: opponent=random")

    @property
    def choices(self) -> list[Choice]:
        """The run's choices from `msgrpo.train.rivals`."""
        chosen = (self.credit, self.select, self.gate, self.objectives, self.teacher, self.explore, self.loss)
        return [choice for choice in chosen if choice is not None]

    @property
    def scenarios(self) -> list[Scenario]:
        """What is played; the first is the one that a run's evaluations look at."""
        return [get_scenario(name) for name in names_of(self.scenario)]

    @property
    def shares(self) -> list[float]:
        """The share of each scenario among the starts."""
        weights = weights_of(self.scenario)
        return [weight / sum(weights) for weight in weights]

    @property
    def rollout_settings(self) -> RolloutSettings:
        """The settings of `rollouts`: what plays, and with what."""
        return read_rollouts(self.rollouts)

    @property
    def vllm(self) -> Vllm | None:
        """The settings of `rollouts=vllm`; None where something else plays."""
        return self.rollout_settings if isinstance(self.rollout_settings, Vllm) else None

    @property
    def plays_here(self) -> bool:
        """Whether the trainer's own process plays."""
        return isinstance(self.rollout_settings, Hf)

    @property
    def ahead(self) -> int:
        """Updates that rollouts run ahead of the trainer."""
        return self.rollout_settings.ahead

    @property
    def servers(self) -> int:
        """The vLLM servers that a cluster starts."""
        return 0 if self.vllm is None else self.vllm.servers

    @property
    def service(self) -> Tinker | None:
        """The settings of `backend=tinker`; None where this machine computes."""
        backend = read_backend(self.backend)
        return backend if isinstance(backend, Tinker) else None

    @property
    def trainers_range(self) -> tuple[int, int]:
        """The fewest and the most `trainers`."""
        few, _, many = self.trainers.partition("-")
        return int(few), int(many or few)

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, max_tokens=self.max_tokens)


def make_config(
    preset: str | None = None,
    *,
    file: Path | str | None = None,
    settings: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
    held: TrainConfig | None = None,
) -> TrainConfig:
    """The settings of the run that goes on (`held`), preset (without: `preset_for` the base, nano's with what was
    chosen for the scenario; and how the base was asked when it was taught), JSON file, `key=value` settings, and the
    options given by name: later ones win.

    Raises UsageError for an unknown preset, key or value, naming the nearest right one.
    """
    values: dict[str, Any] = {} if held is None else held.model_dump()
    check_given("preset", preset or "", str, fix="settings by their names are make_config(given={…})")
    check_given("given", given or {}, Mapping, fix="make_config(given={'steps': 20})")
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"no preset is named {preset!r}", fix=nearest(preset, PRESETS))
    by_person = settings_given(file=file, settings=settings, given=given)
    if held is None or preset:
        base = str(by_person.get("base", NANO))
        chosen = preset or preset_for(base)
        values |= PRESETS[chosen]
        if chosen == "nano" and base == NANO:
            named = by_person.get("scenario", TrainConfig.model_fields["scenario"].default)
            values |= CHOSEN.get(names_of(str(named))[0], {})
        if held is None and (taught := taught_as(base)) is not None:
            values |= {"prompt": taught.prompt, "chat": taught.chat}
    values |= _carried(values, by_person)
    if str(values.get("backend")).strip().startswith("tinker") and held is None and "loss" not in by_person:
        values["loss"] = "clip(kl=0)"  # a service has no reference model
    for key in values:
        if key not in TrainConfig.model_fields:
            raise UsageError(f"no setting is named {key!r}", fix=_where(key))
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(first_fault(error, "settings")) from error


# What TRL, veRL and papers call some of our settings.
ELSEWHERE = {
    "lr": "learning_rate",
    "G": "group_size",
    "num_generations": "group_size",
    "max_steps": "steps",
    "max_completion_length": "max_tokens",
    "beta": "kl",
    "kl_coef": "kl",
    "epsilon": "low",
    "clip_low": "low",
    "epsilon_high": "high",
    "clip_high": "high",
}


def _where(key: str) -> str:
    """The fix for a setting that does not exist: its name here, or what takes it in parentheses."""
    if key == "engine":  # as runs called it at first
        return "it is called backend: local, or tinker(max_cost=…)"
    if key == "preset":
        return (
            f"it is an option: --preset {' or '.join(PRESETS)}; a study and a file of settings write its values out"
        )
    key = ELSEWHERE.get(key, key)
    if key in TrainConfig.model_fields:
        return f"it is called {key}"
    for setting, kinds in {
        "rollouts": ROLLOUTS.values(),
        "backend": BACKENDS.values(),
        **{name: [kind] for name, kind in NUMBERED.items()},
    }.items():
        if any(key in kind.model_fields for kind in kinds):
            return f"it stands in the parentheses of {setting}: '{setting}=…({key}=…)'"
    if get_close_matches(key, TrainConfig.model_fields, n=1, cutoff=0.8):  # to ask all choices loads torch
        return nearest(key, TrainConfig.model_fields)
    takers = [
        f"{kind}={name}({key}=…)"
        for kind, names in RIVALS.items()
        for name in names
        if key in rival(kind, name).model_fields
    ]
    if takers:
        others = f" (also {', '.join(takers[1:])})" if takers[1:] else ""
        return f"it stands in the parentheses of a choice: '{takers[0]}'{others}"
    return nearest(key, TrainConfig.model_fields)


def _carried(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, where a choice takes over what the choice that stood there before has and it takes too, but does not
    name: that of the preset, of a file, or of the run that goes on.

    So select=uniform changes how episodes are drawn, and not also how many; and on --resume evaluation=100(film=0)
    how often it is played stays.
    """
    whole = dict(given)
    for kind in RIVALS.keys() & before.keys() & given.keys():
        texts = [one for one in (before[kind], given[kind]) if isinstance(one, str) and not is_outside(one)]
        if len(texts) < 2:
            continue
        try:
            takes = type(choose(kind, given[kind])).model_fields
            earlier = {key: value for key, value in parsed(before[kind])[1].items() if key in takes}
        except ValueError:  # TrainConfig refuses it as it was given
            continue
        name, own = parsed(given[kind])
        whole[kind] = _written(name, earlier | own)
    for key in NUMBERED.keys() & before.keys() & given.keys():
        try:
            for value in (before[key], given[key]):
                NUMBERED[key].read(value)
        except ValueError:  # TrainConfig refuses it as it was given
            continue
        number, own = parsed(str(given[key]))
        whole[key] = _written(number, parsed(str(before[key]))[1] | own)
    return whole


def _written(name: str, settings: Mapping[str, Any]) -> str:
    """`name(key=value, …)`; without settings `name`."""
    return f"{name}({', '.join(f'{key}={value}' for key, value in settings.items())})" if settings else name


def settings_given(
    *, file: Path | str | None = None, settings: Sequence[str] = (), given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a person says of a run: JSON file, `key=value` settings, and the options given by name; later ones win."""
    values: dict[str, Any] = _read(Path(file)) if file is not None else {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting!r} is not key=value", fix="for example --set learning_rate=1e-3")
        values |= _carried(values, {key.strip(): value.strip()})
    return values | {key: value for key, value in (given or {}).items() if value is not None}


def _read(file: Path) -> dict[str, Any]:
    try:
        values = from_json(read_regular(file))
    except OSError as error:
        raise UsageError(f"--config {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--config {file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"--config {file} must hold one JSON object, not {type(values).__name__}")
    return values
