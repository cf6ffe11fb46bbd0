"""Rollouts by vLLM: a child of this run, or servers that run already.

Each version of the adapter gets a folder and a model name of its own, so no cache of an older one can answer for it,
and the `model` field of every request says which weights are meant. Before a version plays anywhere, the canary
proves it there; a server that fails leaves and is tried again with the next version.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import socket
import sys
from pathlib import Path

from msgrpo.agent import Completion
from msgrpo.errors import MsgrpoError, RunError, UsageError
from msgrpo.files import replace_text
from msgrpo.game import Scenario
from msgrpo.models.chat import ChatFormat
from msgrpo.models.http import Client
from msgrpo.models.local import stop_ids
from msgrpo.serve.guard import LOAD, UNLOAD
from msgrpo.serve.server import Server
from msgrpo.serve.terminal import check_key, prepare
from msgrpo.serve.vllm_command import KEY_VARIABLE, Request
from msgrpo.train.config import TrainConfig
from msgrpo.train.engines import contract
from msgrpo.train.engines.pool import NEW, Pool, Remote, RemoteError, VersionModel, ask, post, still_has
from msgrpo.train.policy import Policy, State
from msgrpo.train.ranks import Ranks
from msgrpo.train.sinks import Reporter

SILENCE_TRIES = 3  # at a server that played until now and does not answer at all
LOAD_TRIES = 8  # a disk that is shared may show a new folder seconds later
QUICK_S = 15.0  # for a server that had left
FIRST_ANSWER_S = 120.0  # a server that compiles its kernels answers late, once
VERSIONS = "versions"  # the child's adapters, in the run's folder
OWNER = "versions-of"  # the name that this run's versions have in common, for the next start to clean up


class VllmEngine:
    def __init__(
        self,
        policy: Policy,
        scenario: Scenario,
        config: TrainConfig,
        out: Path,
        ranks: Ranks,
        report: Reporter,
    ) -> None:
        self._policy, self._config, self._ranks, self._report = policy, config, ranks, report
        self._chat = ChatFormat(policy.tokenizer, config.chat)
        self._stop_ids = sorted(stop_ids(policy.model, policy.tokenizer))
        self._prompts = contract.canary_prompts(scenario)
        positions = getattr(policy.model.config, "max_position_embeddings", None) or sys.maxsize
        longest = config.child.max_model_len if config.child is not None else None
        self._context = min(positions, longest or sys.maxsize)
        self._folder = Path(config.adapters).expanduser() if config.urls and config.adapters else out / VERSIONS
        key = os.environ.get(KEY_VARIABLE)
        check_key(key)
        check_one_machine(config)
        self._models: list[VersionModel] = []
        self._previous: State | None = None
        self._child: Server | None = None
        urls = config.urls
        if ranks.first:
            self._make_folder()
            if not urls:
                urls = [self._start_child(out)]
        self._pool = Pool([Remote(url) for url in ranks.broadcast(urls)], key, report.note, self._ended)
        self._name = ""
        if ranks.first:
            try:
                self._clean_up(out)
            except BaseException:
                self.close()
                raise

    def load(self, version: int) -> VersionModel:
        """Write the version in one move, load it on every server, prove it there; the older ones are forgotten."""
        name = self._ranks.broadcast(f"{self._name}-v{version:06d}")
        model = VersionModel(name, self._pool, self._chat, self._stop_ids, self._context)
        self._models.append(model)  # before it is loaded: whatever happens now, it is forgotten in the end
        if self._ranks.first:
            self._write(name)
            asyncio.run(self._load_everywhere(name))
            if not self._pool.playing:
                raise self._pool.none_left()
        self._follow(self._ranks.broadcast([remote.url for remote in self._pool.playing]), name)
        if self._ranks.first:
            self._previous = self._policy.adapter_state()
            self._forget(self._models[:-2])  # of the version before, rollouts may be on their way
        return model

    def close(self) -> None:
        if not self._ranks.first:
            return
        try:
            self._forget(self._models)
        finally:
            if self._child is not None:
                self._child.stop(at_once=True)
            if not self._config.urls:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _start_child(self, out: Path) -> str:
        """A vLLM server that ends with this process, whatever happens to it."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config, child = self._config, self._config.child
        assert child is not None
        request = Request(
            base=config.base,
            port=port,
            runtime_adapters=self._folder,
            runtime_rank=config.lora_rank,
            gpu_share=child.gpu_share,
            max_model_len=child.max_model_len,
            dtype=str(self._policy.model.dtype).removeprefix("torch."),
            key=os.environ.get(KEY_VARIABLE),
        )
        self._report.doing("starting vLLM")
        self._child = Server(prepare(request, self._report.note), out / "vllm.log")
        try:
            self._child.start()
            self._child.wait_ready(lambda stage: self._report.doing(f"starting vLLM: {stage}"))
        except BaseException:
            self._child.stop(at_once=True)
            raise
        return f"http://127.0.0.1:{port}"

    def _ended(self) -> MsgrpoError | None:
        """What the child's log says, when it is the child that ended."""
        return None if self._child is None else self._child.failure()

    def _clean_up(self, out: Path) -> None:
        """Remove what an earlier start of this run left in the folder and on the servers; choose a new name."""
        owner = out / OWNER
        old = owner.read_text(errors="replace").strip() if owner.is_file() else ""
        if re.fullmatch(r"\S+-[0-9a-f]{6}", old):
            left = [
                folder.name
                for folder in self._folder.iterdir()
                if re.fullmatch(rf"\.?{re.escape(old)}-v\d{{6,}}(\.part)?", folder.name)
            ]
            asyncio.run(self._unload(left))
        # The name of a model, and a part of a URL.
        called = re.sub(r"[^A-Za-z0-9_.]+", "-", out.resolve().name).strip("-.") or "run"
        self._name = f"{called}-{secrets.token_hex(3)}"
        out.mkdir(parents=True, exist_ok=True)
        replace_text(owner, self._name)

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the folder of versions {self._folder} cannot be made: {error.strerror}",
                fix="--set adapters=DIR, a folder that trainer and servers share",
            ) from error

    def _write(self, name: str) -> None:
        part = self._folder / f".{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            self._policy.save_adapter(part)
            os.replace(part, self._folder / name)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)  # on a full disk it would keep it full
            raise RunError(
                f"the folder of versions {self._folder} cannot be written: {error.strerror or error}",
                fix="make room there, then the same command with --resume",
            ) from error

    def _follow(self, urls: list[str], name: str) -> None:
        """Other ranks play where the first has proved the version."""
        for remote in self._pool.remotes if not self._ranks.first else ():
            if remote.url in urls:
                self._pool.joined(remote, name)
            else:
                self._pool.failed(remote, RemoteError("the first process left it out", final=True))

    async def _load_everywhere(self, name: str) -> None:
        async with self._pool.client(FIRST_ANSWER_S) as client:
            remotes = self._pool.remotes
            answers = await asyncio.gather(
                *(self._tried_at(client, remote, name) for remote in remotes), return_exceptions=True
            )
        for remote, found in zip(remotes, answers, strict=True):
            if isinstance(found, RemoteError):
                self._pool.failed(remote, RemoteError(str(found), final=True))
            elif isinstance(found, BaseException):
                raise found
            else:
                self._prove(remote, found, name)

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
        rows, sampling = self._chat.ids(self._prompts), contract.canary_sampling(self._policy.temperature)
        asked = [
            ask(client, remote, name, ids, sampling, seed, self._stop_ids)
            for ids, seed in zip(rows, contract.SEEDS, strict=True)
        ]
        return list(await asyncio.gather(*asked))

    def _prove(self, remote: Remote, answers: list[Completion], name: str) -> None:
        try:
            contract.check(self._policy, remote.url, answers, self._previous)
        except RunError as error:
            self._pool.failed(remote, RemoteError(error.message, final=True))
        else:
            self._pool.joined(remote, name)

    def _forget(self, models: list[VersionModel]) -> None:
        unread = [model for model in models if not model.is_read]
        self._models = [model for model in self._models if model not in unread]
        if unread:
            asyncio.run(self._unload([model.name for model in unread]))

    async def _unload(self, names: list[str]) -> None:
        """From every server that can be reached; then the folders. A server that is gone has forgotten them."""
        async with self._pool.client(5.0) as client:

            async def at(remote: Remote) -> None:
                try:
                    for name in names:
                        await post(client, remote, UNLOAD, {"lora_name": name})
                except RemoteError as error:
                    self._report.doing(f"{remote.url} was not told to unload: {error}")

            await asyncio.gather(*(at(remote) for remote in self._pool.remotes))
        for name in names:
            shutil.rmtree(self._folder / name, ignore_errors=True)


def check_one_machine(config: TrainConfig) -> None:
    """Raise UsageError for a child of one node that ranks on others would have to reach."""
    everywhere, here = (os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if config.child is not None and here is not None and everywhere != here:
        raise UsageError(
            f"rollouts=vllm starts a server for this machine's {here} processes; the run has {everywhere}",
            fix="start servers that all nodes reach, and --rollouts http://…,http://… --set adapters=DIR",
        )
