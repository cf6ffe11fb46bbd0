"""A service that speaks Tinker's protocol, as the loop asks it: tokens in, tokens and log-probabilities out.

Everything that knows the SDK is here. Two of its generations are in use: hosted Tinker wants 0.38, servers that
people run themselves (SkyRL, TuFT) pin 0.25, in which a client is returned where 0.38 returns a future of one, and
weights are downloaded as an archive. The SDK asks again by itself; what it then raises, or an answer that does not
come within `PATIENCE_S`, ends the run with one clear error. What a service says is data: token ids, log-probabilities
and paths are checked, texts are cut and cleaned.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from msgrpo.agent import Sampling
from msgrpo.errors import EndpointError, MsgrpoError, RunError, UsageError, first_line
from msgrpo.extras import needs
from msgrpo.models.endpoint_failures import speaks_of_context
from msgrpo.text import printable
from msgrpo.train.config import TrainConfig
from msgrpo.train.tinker.cost import HOST, KINDS, Meter

PATIENCE_S = 900.0  # for one answer, the SDK's own tries included
REACH_S = 10.0  # for the first sign of life
KEPT_S = 30 * 24 * 3600  # how long a service keeps a checkpoint that a run can be resumed from
KEY = "TINKER_API_KEY"
_PATH = re.compile(r"tinker://[\w.:/-]{1,300}")
SEED_BITS = 31


@dataclass(frozen=True)
class TrainingRow:
    """A turn as it is trained on: each token of `answer` has a log-probability with which it was sampled, and an
    advantage.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    logprobs: Sequence[float] = ()
    advantages: Sequence[float] = ()

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


class Service:
    """The service that TINKER_BASE_URL names, or Tinker's own. The key goes to its host and to no other."""

    def __init__(self, config: TrainConfig, meter: Meter) -> None:
        self.meter = meter
        self._config = config
        self.url = _url()
        self.host = _host()
        check_usable()
        os.environ.setdefault("TINKER_TELEMETRY", "0")  # errors are told here, and to nobody else
        import tinker

        logging.getLogger("tinker").setLevel(logging.ERROR)  # its tries: what they end in is told here
        self._sdk: Any = tinker
        self._reach()
        with self.asked("opening a session"):
            self._client = tinker.ServiceClient(user_metadata={"program": "msgrpo"})
        self._training: Any = None
        self.steps = 0  # of the optimizer, in this process
        self.proof = dict.fromkeys(KINDS, 0)  # the most tokens that the canary of a version takes

    def _reach(self) -> None:
        """One request without the key: the SDK would try for minutes where nobody answers."""
        if not self.url:
            return
        try:
            httpx.get(f"{self.url}/api/v1/healthz", timeout=REACH_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UsageError(
                f"nobody answers at TINKER_BASE_URL={self.url}: {first_line(error)}",
                fix="start the server, or correct the address",
            ) from error

    @contextmanager
    def asked(self, what: str) -> Iterator[None]:
        """Turn whatever the SDK raises into one error that says what was asked, of whom, and how to go on."""
        try:
            yield
        except MsgrpoError:
            raise
        except TimeoutError as error:
            raise self._failed(what, f"no answer within {PATIENCE_S:g} s") from error
        except Exception as error:  # an SDK, and all that lies under it, raises nearly anything
            raise self._failed(what, str(error) or type(error).__name__) from error

    def _failed(self, what: str, why: str) -> RunError:
        key = os.environ.get(KEY, "")
        why = re.sub(r" for self\.request_id=.*", "", why.replace(key, "…") if key else why)  # the SDK's own affairs
        why = " ".join(printable(why).split())[:300]
        return RunError(
            f"the service at {self.host} failed at {what}: {why}",
            fix="the last checkpoint is kept: once the service answers, the same command with --resume",
        )

    def tokenizer(self) -> Any:
        """The tokenizer that the SDK offers for the base."""
        with self.asked("naming its tokenizer"):
            return self.training.get_tokenizer()

    @property
    def training(self) -> Any:
        """The client of the weights that are trained; new ones, with zero adapters, where none were loaded."""
        if self._training is None:
            with self.asked(f"making an adapter of {self._config.base}"):
                self._training = _here(
                    self._client.create_lora_training_client(
                        base_model=self._config.base,
                        rank=self._config.lora_rank,
                        seed=self._config.seed,
                        train_unembed=False,  # as our own adapters: every linear layer, not the output layer
                    )
                )
        return self._training

    def load(self, path: str) -> None:
        """Go on with weights and optimizer as they were saved."""
        with self.asked(f"loading {path}"):
            self._training = _here(self._client.create_training_client_from_state_with_optimizer(path))

    def save(self, name: str) -> str:
        """Keep weights and optimizer; returns the path from which `load` brings them back."""
        with self.asked("saving a checkpoint"):
            return _path(_result(self.training.save_state(name, ttl_seconds=KEPT_S)).path)

    def sampler(self) -> Any:
        """A client that samples from the weights as they are now."""
        with self.asked("publishing the weights"):
            return _here(self.training.save_weights_and_get_sampling_client())

    async def sample(
        self, sampler: Any, prompt_ids: Sequence[int], sampling: Sampling, seed: int, stop_ids: Sequence[int]
    ) -> tuple[list[int], list[float], str]:
        """An answer's token ids, the log-probabilities with which they were drawn, and why it ended."""
        types = self._sdk.types
        settings = types.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed % 2**SEED_BITS,
            stop=list(stop_ids) or None,
        )
        self.meter.reserve(prefill=len(prompt_ids), sample=sampling.max_tokens)
        prompt = types.ModelInput.from_ints(list(prompt_ids))
        try:
            with self.asked("sampling"):
                answer = (await _awaited(sampler.sample(prompt, 1, settings))).sequences[0]
        except RunError as error:
            if speaks_of_context(error.message):
                raise EndpointError(error.message, kind="context_length") from error
            raise
        with self.asked("sampling: its answer cannot be read"):
            ids, logprobs = list(map(int, answer.tokens)), list(map(float, answer.logprobs))
            self._check(ids, logprobs, sampling.max_tokens)
            reason = "stop" if answer.stop_reason == "stop" else "length"
        self.meter.unused(sample=sampling.max_tokens - len(ids))
        return ids, logprobs, reason

    def _check(self, ids: Sequence[int], logprobs: Sequence[float], most: int) -> None:
        """Raise ValueError unless these are tokens with log-probabilities (up to rounding)."""
        if not 0 < len(ids) <= most or len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} token ids with {len(logprobs)} log-probabilities, of {most} asked")
        if min(ids) < 0 or max(ids) >= 2**31 or not _are_logprobs(logprobs):
            raise ValueError("token ids or log-probabilities that are none")

    async def logprobs(self, sampler: Any, row: TrainingRow) -> list[float]:
        """log p of an answer's tokens, by the weights that the sampler has."""
        self.meter.reserve(prefill=row.tokens, sample=1)
        prompt = self._sdk.types.ModelInput.from_ints([*row.prompt, *row.answer])
        with self.asked("computing log-probabilities"):
            values = await _awaited(sampler.compute_logprobs(prompt))
            return _tail(values, row)

    def forward(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        """log p of each answer's tokens, by the weights that are trained."""
        self.meter.reserve(train=sum(row.tokens for row in rows))
        data = [
            self._datum(row, {"weights": [0.0] * (len(row.prompt) - 1) + [1.0] * len(row.answer)}) for row in rows
        ]
        with self.asked("computing log-probabilities"):
            return _tails(_result(self.training.forward(data, "cross_entropy")), rows)

    def step(
        self, rows: Sequence[TrainingRow], clip: tuple[float, float], adam: dict[str, float]
    ) -> tuple[list[list[float]], float | None]:
        """Sum the clipped loss of these turns and take one step of AdamW; the caller has reserved their tokens.

        Returns log p of each answer's tokens before the step, and the gradient's norm where the service says it.
        """
        low, high = clip
        data = [
            self._datum(row, {"logprobs": _padded(row, row.logprobs), "advantages": _padded(row, row.advantages)})
            for row in rows
        ]
        bounds = {"clip_low_threshold": 1 - low, "clip_high_threshold": 1 + high}
        self.steps += 1
        with self.asked("an update"):
            gradient = self.training.forward_backward(data, "ppo", bounds)
            taken = self.training.optim_step(self._sdk.types.AdamParams(**adam))  # both are on their way at once
            logprobs = _tails(_result(gradient), rows)
            return logprobs, _norm(_result(taken).metrics)

    def _datum(self, row: TrainingRow, inputs: dict[str, list[float]]) -> Any:
        """Position i of the input predicts token i + 1, so inputs and targets are the turn shifted by one."""
        types, whole = self._sdk.types, [*row.prompt, *row.answer]
        tensors = {
            name: types.TensorData(data=values, dtype="float32", shape=[len(values)])
            for name, values in inputs.items()
        }
        targets = types.TensorData(data=whole[1:], dtype="int64", shape=[len(whole) - 1])
        return types.Datum(
            model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs={"target_tokens": targets} | tensors
        )

    def export(self, name: str) -> str:
        """Keep the weights for good, as an adapter; returns its path at the service."""
        with self.asked("exporting the adapter"):
            if hasattr(self.training, "save_weights_external"):
                return _path(_result(self.training.save_weights_external(name)).path)
            return _path(_result(self.training.save_weights_for_sampler(name)).path)

    def urls(self, path: str) -> dict[str, str]:
        """File → URL of an exported adapter; an archive of all its files is called `archive`."""
        with self.asked("offering the adapter for download"):
            if hasattr(self.training, "save_weights_external"):
                # without both it is the first service that this process has asked, and its key
                rest = self._sdk.RestClient(base_url=self.url or None, api_key=os.environ[KEY])
                return dict(_result(rest.get_external_weights_urls(path)).urls)
            run, _, checkpoint = path.removeprefix("tinker://").partition("/")
            rest = self._client.create_rest_client()
            return {"archive": str(_result(rest.get_checkpoint_archive_url(run, checkpoint)).url)}

    def close(self) -> None:
        """End the session, and write down what was spent."""
        self.meter.write()
        close = getattr(self._client, "close", None)  # 0.25 has none: a session ends without its heartbeat
        if close is not None:
            try:
                close("success").result(timeout=REACH_S)
            except Exception:  # the run's own end is what counts; without its heartbeat the session ends by itself
                return


def _url() -> str:
    return os.environ.get("TINKER_BASE_URL", "").strip().rstrip("/")


def _host() -> str:
    return urlsplit(_url()).netloc or HOST


def check_usable() -> None:
    """Raise MsgrpoError where this machine lacks what a service is asked with: the SDK, or the key."""
    with needs("--backend tinker", "tinker"):
        import tinker  # noqa: F401
    if not os.environ.get(KEY):
        raise UsageError(
            f"backend=tinker needs the key of {_host()}, and {KEY} is not set",
            fix=f"export {KEY}=tml-…   (a server of your own says which keys it takes)",
        )


def _result(future: Any) -> Any:
    return future.result(timeout=PATIENCE_S)


def _here(client: Any) -> Any:
    """A client: 0.25 returns it, 0.38 a future of it."""
    return _result(client) if hasattr(client, "result") else client


async def _awaited(future: Any) -> Any:
    """0.38 returns what can be awaited, 0.25 a future of another thread."""
    plain = future.future() if hasattr(future, "future") else future
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.wrap_future(plain)


def _padded(row: TrainingRow, values: Sequence[float]) -> list[float]:
    """Values of the answer's tokens, with zeros where the prompt's are predicted."""
    return [0.0] * (len(row.prompt) - 1) + list(values)


def _path(path: Any) -> str:
    """Raises ValueError for what is no path at a service."""
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise ValueError(f"it names the path {str(path)[:100]!r}, which is none")
    return path


def _tails(output: Any, rows: Sequence[TrainingRow]) -> list[list[float]]:
    outputs = output.loss_fn_outputs
    if len(outputs) != len(rows):
        raise ValueError(f"{len(outputs)} outputs for {len(rows)} turns")
    return [_tail(one["logprobs"].data, row) for one, row in zip(outputs, rows, strict=True)]


def _tail(values: Sequence[Any], row: TrainingRow) -> list[float]:
    """The values of the answer's tokens, at the end of those of the whole turn."""
    if not row.tokens - 1 <= len(values) <= row.tokens:
        raise ValueError(f"{len(values)} log-probabilities for {row.tokens} tokens")
    logprobs = [float(value) for value in values[-len(row.answer) :]]
    if not _are_logprobs(logprobs):
        raise ValueError("log-probabilities that are none")
    return logprobs


def _are_logprobs(values: Sequence[float]) -> bool:
    return math.isfinite(math.fsum(values)) and max(values) <= 1e-3


def _norm(metrics: Any) -> float | None:
    """The gradient's norm, under whatever name a service gives it."""
    named = [value for name, value in (metrics or {}).items() if "grad_norm" in str(name)]
    return float(named[0]) if named and isinstance(named[0], (int, float)) and math.isfinite(named[0]) else None
