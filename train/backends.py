"""What plays and what computes: the settings `rollouts` and `backend`, and what each of their choices takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from msgrpo.errors import first_fault
from msgrpo.text import Clean
from msgrpo.train.rivals import parsed

Kind = TypeVar("Kind", bound=BaseModel)
MOST_SERVERS = 100_000  # more are a slip of the keyboard


class RolloutSettings(BaseModel):
    """What every kind of rollouts takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ahead: int = Field(0, ge=0, le=4, description="updates that they run ahead, while the trainer learns")


class Hf(RolloutSettings):
    """This process plays."""


class Vllm(RolloutSettings):
    """vLLM plays: a child of this process, or servers that --ray starts."""

    gpu_share: float = Field(0.45, gt=0, lt=1, description="of the GPU's memory")
    max_model_len: int | None = Field(None, ge=1, description="tokens of prompt and answer")
    servers: int = Field(
        0, ge=0, le=MOST_SERVERS, description="that --ray starts; without: one that ends with this process"
    )
    tensor_parallel: int = Field(1, ge=1, le=1024, description="GPUs of one node for each of these servers")

    @model_validator(mode="after")
    def _of_servers(self) -> Self:
        if self.tensor_parallel > 1 and not self.servers:
            raise ValueError(f"tensor_parallel={self.tensor_parallel} is for servers that --ray starts: servers=1")
        return self


class Servers(RolloutSettings):
    """vLLM servers play that run already."""

    at: Clean = Field(
        min_length=1, description="URLs of vLLM servers that run already, spaces between: http://a:8000 http://b:8000"
    )
    adapters: Clean = Field(
        min_length=1, description="folder that they and the trainer share, for the adapter's versions"
    )

    @property
    def urls(self) -> list[str]:
        """Each without its path."""
        return [url.rstrip("/").removesuffix("/v1") for url in self.at.split()]

    @model_validator(mode="after")
    def _has_urls(self) -> Self:
        for url in self.urls:
            if not re.fullmatch(r"https?://[^/\s@?#]+", url):
                raise ValueError(f"{url!r} is not http://host:port")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"at names a server twice: {self.at}")
        return self


ROLLOUTS: Mapping[str, type[RolloutSettings]] = {"hf": Hf, "vllm": Vllm, "servers": Servers}


class Tinker(BaseModel):
    """A service computes, which TINKER_BASE_URL names; prices are US$ for a million tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: float | None = Field(None, ge=0, lt=1e6, description="of prompts that are read")
    sample: float | None = Field(None, ge=0, lt=1e6, description="of answers")
    train: float | None = Field(None, ge=0, lt=1e6, description="of turns that are trained on")
    max_cost: float | None = Field(None, gt=0, description="US$ that a run may spend, all resumptions together")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len({price is None for price in self._prices}) > 1:
            raise ValueError("a price has three parts: prefill=0.1, sample=0.3, train=0.3")
        return self

    @property
    def _prices(self) -> tuple[float | None, float | None, float | None]:
        return self.prefill, self.sample, self.train

    @property
    def prices(self) -> tuple[float, float, float] | None:
        """What a million tokens of each kind cost, where a person gave the prices."""
        prefill, sample, train = self._prices
        return None if prefill is None or sample is None or train is None else (prefill, sample, train)


class Local(BaseModel):
    """This machine computes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


BACKENDS: Mapping[str, type[Local | Tinker]] = {"local": Local, "tinker": Tinker}


def read_rollouts(rollouts: str) -> RolloutSettings:
    """What plays. Raises ValueError for what is no choice, or does not take what stands in parentheses."""
    return _chosen("rollouts", rollouts, ROLLOUTS, "hf, vllm or servers(at=http://host:port, adapters=DIR)")


def read_backend(backend: str) -> Local | Tinker:
    """What computes. Raises ValueError as `read_rollouts` does."""
    return _chosen("backend", backend, BACKENDS, "local, or tinker(max_cost=…)")


def _chosen(key: str, text: str, kinds: Mapping[str, type[Kind]], known: str) -> Kind:
    """What `name(key=value, …)` makes; `none` is nothing, as `--settings` lists it."""
    name = text.partition("(")[0].strip()
    if name not in kinds:
        raise ValueError(f"{key}: {text!r} is not {known}")
    fields = kinds[name].model_fields
    nothing = {part for part, field in fields.items() if field.default is None}
    try:
        given = parsed(text)[1]
        return kinds[name].model_validate({k: None if k in nothing and v == "none" else v for k, v in given.items()})
    except ValidationError as error:
        takes = ", ".join(fields) or "nothing"
        raise ValueError(f"{key}={name}: {first_fault(error, 'its settings')}; it takes {takes}") from error
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
