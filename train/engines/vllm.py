"""Rollouts by vLLM servers: a child of this run, servers that run already, or actors on a cluster (`fleet.py`).

Each version of the adapter gets a folder and a model name of its own, so no cache of an older one can answer for it,
and the `model` field of every request says which weights are meant. Before a version plays anywhere, the canary
proves it there; a server that fails leaves and is tried again with the next version.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import time
from collections import deque
from pathlib import Path

from msgrpo.agent import Completion
from msgrpo.errors import RunError
from msgrpo.files import expanded, replace_text
from msgrpo.game import Scenario
from msgrpo.loops import run_async
from msgrpo.models.http import Client
from msgrpo.models.local import stop_ids
from msgrpo.prompt import ChatFormat
from msgrpo.serve.guard import LOAD, UNLOAD
from msgrpo.serve.terminal import check_key
from msgrpo.serve.vllm_command import KEY_VARIABLE
from msgrpo.train.backends import Servers
from msgrpo.train.config import TrainConfig
from msgrpo.train.engines import contract
from msgrpo.train.engines.fleet import Child, Fleet, Listed, check_one_machine
from msgrpo.train.engines.pool import NEW, PATIENCE, Pool, Remote, RemoteError, VersionModel, ask, post, still_has
from msgrpo.train.policy import AdapterState, Policy
from msgrpo.train.ranks import Ranks
from msgrpo.train.sinks import Reporter

SILENCE_TRIES = 3  # at a server that played until now and does not answer at all
LOAD_TRIES = 8  # a disk that is shared may show a new folder seconds later
QUICK_S = 15.0  # for a server that had left
UNLOAD_S = 5.0  # for a server that is to forget a version
FIRST_ANSWER_S = 120.0  # a server that compiles its kernels answers late, once
OWNER = "versions-of"  # the name that this run's versions have in common, for the next start to clean up
Answers = list[Completion] | str  # a server's, to the canary's prompts; or why there are none


class VllmEngine:
    def __init__(
        self,
        policy: Policy,
        scenario: Scenario,
        config: TrainConfig,
        out: Path,
        ranks: Ranks,
        report: Reporter,
        fleet: Fleet | None = None,
    ) -> None:
        self._policy, self._ranks, self._report = policy, ranks, report
        self._chat = ChatFormat(policy.tokenizer, config.chat)
        self._stop_ids = sorted(stop_ids(policy.model, policy.tokenizer))
        self._prompts = contract.canary_prompts(scenario)
        self._vocabulary = int(policy.model.get_input_embeddings().num_embeddings)
        positions = getattr(policy.model.config, "max_position_embeddings", None) or sys.maxsize
        longest = config.vllm.max_model_len if config.vllm is not None else None
        self._context = min(positions, longest or sys.maxsize)
        key = os.environ.get(KEY_VARIABLE)
        check_key(key)
        if fleet is None:
            check_one_machine(config)
        self._models: list[VersionModel] = []
        self._kept = 1 + max(1, config.ahead)
        self._previous: deque[AdapterState] = deque(maxlen=max(1, config.ahead))  # that a server may still have
        self._fleet = (fleet or self._own_fleet(config, out)) if ranks.first else None
        self._pool = Pool([], key, report.note, self._fleet.failure if self._fleet is not None else lambda: None)
        self._name = ""
        if self._fleet is not None:
            try:
                self._pool.follow(self._fleet.urls())
                self._clean_up(self._fleet, out)
            except BaseException:
                self.close()
                raise

    def _own_fleet(self, config: TrainConfig, out: Path) -> Fleet:
        plays = config.rollout_settings
        if isinstance(plays, Servers):
            return Listed(plays.urls, expanded(plays.adapters))
        return Child(config, str(self._policy.model.dtype).removeprefix("torch."), out, self._report)

    def load(self, version: int) -> VersionModel:
        """Give every server the version, and prove it there; the older ones are forgotten."""
        name = self._ranks.broadcast(f"{self._name}-v{version:06d}")
        model = VersionModel(name, self._pool, self._chat, self._stop_ids, self._context, self._vocabulary)
        self._models.append(model)  # before it is loaded: whatever happens now, it is forgotten in the end
        answers = self._ranks.broadcast({} if self._fleet is None else self._loaded(self._fleet, name))
        self._pool.follow(list(answers))
        for url, why in self._proved(answers):
            remote = self._pool.at(url)
            if why is None:
                self._pool.joined(remote, name)
            else:
                self._pool.failed(remote, RemoteError(why, final=True))
        if not self._pool.playing:
            raise self._pool.none_left()
        self._previous.append(self._policy.adapter_state())
        self._forget(self._models[: -self._kept])  # of the versions before, rollouts may be on their way
        return model

    def close(self) -> None:
        if self._fleet is None:
            return
        try:
            self._forget(self._models)
        finally:
            self._fleet.close()

    def _clean_up(self, fleet: Fleet, out: Path) -> None:
        """Remove what an earlier start of this run left in the folders and on the servers; choose a new name."""
        owner = out / OWNER
        old = owner.read_text(errors="replace").strip() if owner.is_file() else ""
        if re.fullmatch(r"\S+-[0-9a-f]{6}", old):
            earlier = re.compile(rf"\.?{re.escape(old)}-v\d{{6,}}(\.\w+)*")
            run_async(self._unload(fleet, [name for name in fleet.versions() if earlier.fullmatch(name)]))
        # The name of a model, and a part of a URL.
        called = re.sub(r"[^A-Za-z0-9_.]+", "-", out.resolve().name).strip("-.") or "run"
        self._name = f"{called}-{secrets.token_hex(3)}"
        out.mkdir(parents=True, exist_ok=True)
        replace_text(owner, self._name)

    def _loaded(self, fleet: Fleet, name: str) -> dict[str, Answers]:
        """Load the version at every server there is; what each answers to the canary's prompts."""
        self._pool.follow(fleet.urls())
        without = fleet.publish(name, self._policy.adapter_files())
        return without | run_async(self._load_everywhere(name, without))

    async def _load_everywhere(self, name: str, without: dict[str, str]) -> dict[str, Answers]:
        async with self._pool.client(FIRST_ANSWER_S) as client:
            remotes = [remote for remote in self._pool.remotes if remote.url not in without]
            answers = await asyncio.gather(
                *(self._tried_at(client, remote, name) for remote in remotes), return_exceptions=True
            )
        found: dict[str, Answers] = {}
        for remote, answer in zip(remotes, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, RemoteError):
                raise answer
            found[remote.url] = str(answer) if isinstance(answer, RemoteError) else answer
        return found

    async def _tried_at(self, client: Client, remote: Remote, name: str) -> list[Completion]:
        """One that has left gets one quick chance with each version: it must not slow the others down."""
        left = remote.out not in (None, NEW)
        try:
            seconds = QUICK_S if left else None
            return await asyncio.wait_for(self._load_at(client, remote, name, 1 if left else LOAD_TRIES), seconds)
        except TimeoutError as error:
            raise RemoteError(f"it did not answer within {QUICK_S:g} s") from error

    async def _load_at(self, client: Client, remote: Remote, name: str, tries: int) -> list[Completion]:
        """Load the version at one server and let it answer the canary's prompts."""
        body = {"lora_name": name, "lora_path": name}  # below the folder that the server was started with
        for trial in range(tries):
            try:
                response = await post(client, remote, LOAD, body)
            except RemoteError:
                if trial == min(tries, SILENCE_TRIES) - 1:
                    raise
            else:
                if response.status == 200 or await still_has(client, remote, name):
                    break  # listed though refused: an answer was lost on the way, or two URLs lead to one server
                if response.status in (401, 403) or trial == tries - 1:
                    raise RemoteError(f"it did not load {name}: status {response.status}: {response.text}")
            await asyncio.sleep(min(0.25 * 2**trial, 4.0))
        asked = [
            self._answer_at(client, remote, name, ids, seed, min(tries, PATIENCE))
            for ids, seed in zip(self._chat.ids(self._prompts), contract.SEEDS, strict=True)
        ]
        return list(await asyncio.gather(*asked))

    async def _answer_at(
        self, client: Client, remote: Remote, name: str, ids: list[int], seed: int, tries: int
    ) -> Completion:
        """A canary's answer. A failure that comes at once is tried again: in play, too, it is one of PATIENCE."""
        sampling, began = contract.canary_sampling(self._policy.temperature), time.monotonic()
        try:
            return await ask(client, remote, name, ids, sampling, seed, self._stop_ids, self._vocabulary)
        except RemoteError as error:
            if error.final or tries == 1 or time.monotonic() - began > QUICK_S:
                raise
        await asyncio.sleep(0.25 * 2 ** (PATIENCE - tries))
        return await self._answer_at(client, remote, name, ids, seed, tries - 1)

    def _proved(self, answers: dict[str, Answers]) -> list[tuple[str, str | None]]:
        """Why each server must not play, None where it may.

        The proofs are shared out among the ranks; of a sharded base all compute each of them together.
        """
        together, servers = self._policy.is_sharded, list(answers.items())
        own = servers if together else self._ranks.share(servers)
        verdicts = [(url, self._verdict(url, found)) for url, found in own]
        return self._ranks.broadcast(verdicts) if together else self._ranks.gather(verdicts)

    def _verdict(self, url: str, answers: Answers) -> str | None:
        if isinstance(answers, str):
            return answers
        try:
            contract.check(self._policy, url, answers, self._previous)
        except RunError as error:
            return error.message
        return None

    def _forget(self, models: list[VersionModel]) -> None:
        unread = [model for model in models if not model.is_read]
        self._models = [model for model in self._models if model not in unread]
        if unread and self._fleet is not None:
            run_async(self._unload(self._fleet, [model.name for model in unread]))

    async def _unload(self, fleet: Fleet, names: list[str]) -> None:
        """From every server that can be reached; then the folders. A server that is gone has forgotten them."""
        async with self._pool.client(UNLOAD_S) as client:

            async def at(remote: Remote) -> None:
                try:
                    for name in names:
                        await post(client, remote, UNLOAD, {"lora_name": name})
                except RemoteError as error:
                    self._report.doing(f"{remote.url} was not told to unload: {error}")

            await asyncio.gather(*(at(remote) for remote in self._pool.remotes))
        fleet.forget(names)
