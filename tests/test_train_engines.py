"""Rollouts by servers: what a scripted vLLM that fails, hangs, forgets or serves other weights costs (never a
move).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from msgrpo.agent import Completion, Sampling
from msgrpo.episode import Episode, read_episodes
from msgrpo.errors import EndpointError, RunError, UsageError
from msgrpo.games import get_scenario
from msgrpo.loops import InThread
from msgrpo.models.generation import Row
from msgrpo.models.loading import load_adapted, load_base
from msgrpo.models.local import LocalModel
from msgrpo.prompt import ChatFormat, Prompt, PromptTemplate
from msgrpo.run_log import read_rows
from msgrpo.serve.preflight import failure
from msgrpo.serve.vllm_command import Request as Request_
from msgrpo.serve.vllm_command import build
from msgrpo.train import checkpoint, loop
from msgrpo.train.backends import Servers
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.display import Quiet
from msgrpo.train.engines import pool, vllm
from msgrpo.train.engines.vllm import VllmEngine
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE
from msgrpo.train.rollouts import Players, RolloutSource
from msgrpo.train.sinks import Measured
from tests.fake_server import Behaviour, FakeServer, Request, hang, reply, reset, time_that_jumps
from tests.near import use_near_lakes
from tests.train_helpers import Told

LAKE = get_scenario("frozen-lake")
pytestmark = pytest.mark.usefixtures("near", "patient")
TINY = [
    "minibatches=2",
    "groups=2",
    "group_size=4",
    "select=aaw(keep=2)",
    "evaluation=4(every=2, film=0)",
    "checkpoint_every=1",
]


class FakeVllm:
    """Serves nano and the adapters that are loaded, as vLLM does; `faults` stand before single requests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models: dict[str, LocalModel] = {}
        self.base = LocalModel("nano", *load_base("nano"))
        self.faults: list[Behaviour | None] = []  # of the next completions
        self.broken: Behaviour | None = None  # of all completions
        self.serves: Callable[[str], str] = lambda name: name
        self.hot = False  # samples, and reports, at temperature 1
        self.loses_answers = False  # to loads, which it does nevertheless
        self.hides_loads = 0  # a shared disk that lags
        self.versions: set[str] = set()

    async def __call__(self, request: Request, writer: Any) -> None:
        body = request.body
        if request.path == "/v1/load_lora_adapter":
            if self.hides_loads:
                self.hides_loads -= 1
                await reply(400, {"error": "no adapter folder"})(request, writer)
                return
            if body["lora_name"] in self.models:
                await reply(400, {"error": "has already been loaded"})(request, writer)
                return
            folder = self.root / body["lora_path"]
            self.models[body["lora_name"]] = LocalModel(body["lora_name"], *load_adapted(folder))
            self.versions.add(body["lora_name"])
            await (reset if self.loses_answers else reply(200, "ok"))(request, writer)
        elif request.path == "/v1/unload_lora_adapter":
            self.models.pop(body["lora_name"], None)
            await reply(200, "ok")(request, writer)
        elif request.path == "/v1/models":
            await reply(200, {"data": [{"id": name} for name in ["nano", *self.models]]})(request, writer)
        else:
            await self._complete(request, writer)

    async def _complete(self, request: Request, writer: Any) -> None:
        body = request.body
        fault = self.faults.pop(0) if self.faults else self.broken
        if fault is not None:
            await fault(request, writer)
            return
        name = self.serves(body["model"])
        model = self.base if name == "nano" else self.models.get(name)
        if model is None:
            await reply(404, {"error": "no such model"})(request, writer)
            return
        temperature = 1.0 if self.hot else body["temperature"]
        sampling = Sampling(temperature=temperature, max_tokens=body["max_tokens"])
        row = Row(body["prompt"], body["seed"], body["max_tokens"])
        model.answer_rows([row], sampling)
        choice = {
            "text": model.tokenizer.decode(row.tokens, skip_special_tokens=True),
            "token_ids": row.tokens,
            "logprobs": {"token_logprobs": row.logprobs},
            "finish_reason": "stop" if row.tokens[-1] in model.stop_ids else "length",
        }
        await reply(200, {"model": body["model"], "choices": [choice]})(request, writer)


@contextmanager
def serving(*behaviours: Behaviour) -> Iterator[list[str]]:
    """Servers in a thread of their own, since an engine runs loops of its own; their URLs without /v1."""
    loop_, stop, ready, urls = asyncio.new_event_loop(), asyncio.Event(), threading.Event(), []

    async def main() -> None:
        servers = [FakeServer(then=behaviour) for behaviour in behaviours]
        for server in servers:
            await server.__aenter__()
            urls.append(server.url.removesuffix("/v1"))
        ready.set()
        await stop.wait()
        for server in servers:
            await server.stop()

    def run() -> None:
        try:
            loop_.run_until_complete(main())
        finally:
            loop_.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield urls
    finally:
        loop_.call_soon_threadsafe(stop.set)
        thread.join(60)


def config_for(urls: list[str], adapters: Path, **given: Any) -> TrainConfig:
    ahead = given.pop("ahead", 0)
    rollouts = f"servers(at={' '.join(urls)}, adapters={adapters}, ahead={ahead})"
    return make_config(settings=TINY, given={"steps": 2, "rollouts": rollouts, **given})


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers late, as on a busy machine, is none that is gone."""
    monkeypatch.setattr(pool, "LIST_S", 60.0)
    monkeypatch.setattr(vllm, "QUICK_S", 60.0)
    monkeypatch.setattr(vllm, "UNLOAD_S", 60.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@contextmanager
def engine_at(
    urls: list[str], root: Path, told: Told | None = None, **given: Any
) -> Iterator[tuple[VllmEngine, Policy, TrainConfig]]:
    config = config_for(urls, root, **given)
    policy = Policy(config)
    engine = VllmEngine(policy, LAKE, config, root.parent / "run", ALONE, told or Told())
    try:
        yield engine, policy, config
    finally:
        engine.close()


def move(policy: Policy, by: float = 0.02) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(policy.parameters):
            parameter.add_(by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))


def answers(
    model: pool.VersionModel, count: int, beside: Coroutine[Any, Any, None] | None = None
) -> list[Completion]:
    prompt = PromptTemplate().render(LAKE, LAKE.new(1, 1).observe("player"))

    async def all_at_once() -> list[Completion]:
        meanwhile = None if beside is None else asyncio.create_task(beside)
        try:
            asked = (model.complete(prompt, Sampling(max_tokens=24), seed) for seed in range(count))
            return await asyncio.gather(*asked)
        finally:
            if meanwhile is not None:
                meanwhile.cancel()
            await model.close()

    return asyncio.run(all_at_once())


def test_a_version_has_a_name_and_a_folder_of_its_own_and_both_go_when_nobody_reads_them(root: Path) -> None:
    server = FakeVllm(root)
    with serving(server) as urls, engine_at(urls, root) as (engine, policy, _):
        names = []
        for version in range(4):
            names.append(engine.load(version).name)
            move(policy)
            assert {found.model for found in answers(engine._models[-1], 2)} == {names[-1]}
        assert len(set(names)) == 4
        assert [name.rpartition("-")[2] for name in names] == ["v000000", "v000001", "v000002", "v000003"]
        assert set(server.models) == set(names[-2:]) == {folder.name for folder in root.iterdir()}
    assert server.models == {}
    assert list(root.iterdir()) == []


def test_tokens_and_log_probabilities_are_the_servers_own(root: Path) -> None:
    server = FakeVllm(root)
    with serving(server) as urls, engine_at(urls, root) as (engine, policy, _):
        move(policy)
        found = answers(engine.load(0), 3)
        prompt_ids = ChatFormat(policy.tokenizer).ids(
            [PromptTemplate().render(LAKE, LAKE.new(1, 1).observe("player"))]
        )[0]
        for answer in found:
            assert list(answer.prompt_ids) == prompt_ids
            pair = (prompt_ids, list(answer.token_ids))
            with torch.no_grad():
                logprobs, _ = policy.logprobs([], [pair])
            torch.testing.assert_close(torch.tensor(answer.logprobs), logprobs[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "fault", [reset, reply(500, "sorry"), reply(503, "busy"), reply(200, "no JSON"), reply(200, {"choices": []})]
)
def test_a_failed_request_is_a_retry_and_never_a_move(root: Path, fault: Behaviour) -> None:
    server = FakeVllm(root)
    with serving(server) as urls, engine_at(urls, root) as (engine, _, _):
        model = engine.load(0)
        whole = answers(model, 4)
        server.faults = [None, fault, None, fault]
        again = answers(model, 4)
    assert [found.token_ids for found in again] == [found.token_ids for found in whole]
    assert sum(found.retries for found in again) == 2


def test_turns_go_to_the_server_with_the_fewest_in_flight(root: Path) -> None:
    quick, slow = FakeVllm(root), FakeVllm(root)

    async def slowly(request: Request, writer: Any) -> None:
        await asyncio.sleep(0.5)
        await slow(request, writer)

    with serving(quick, slowly) as urls, engine_at(urls, root) as (engine, _, _):
        answers(engine.load(0), 6)
        one, other = engine._pool.remotes
        assert one.answered + other.answered == 6
        assert other.answered > 0
        assert (one.in_flight, other.in_flight) == (0, 0)


@pytest.mark.parametrize("fault", [reset, reply(500, "sorry"), reply(404, {"error": "no such model"})])
def test_a_server_that_dies_in_a_rollout_leaves_and_comes_back(root: Path, fault: Behaviour) -> None:
    """Every answer is there, from the other; with the next version it is proved again, and plays."""
    good, bad, told = FakeVllm(root), FakeVllm(root), Told()
    with serving(good, bad) as urls, engine_at(urls, root, told) as (engine, policy, _):
        whole = answers(engine.load(0), 8)  # half of them asked of each at once, more than its patience
        bad.broken = fault
        again = answers(engine._models[-1], 8)
        assert [found.token_ids for found in again] == [found.token_ids for found in whole]
        assert [remote.url for remote in engine._pool.playing] == urls[:1]
        assert any(text.startswith(f"{urls[1]} plays no more") for text in told.said)
        bad.broken = None
        move(policy)
        engine.load(1)
        assert len(engine._pool.playing) == 2
        assert f"{urls[1]} plays again" in told.said


def test_a_server_that_hangs_costs_a_timeout(root: Path) -> None:
    good, bad = FakeVllm(root), FakeVllm(root)
    with serving(good, bad) as urls, engine_at(urls, root) as (engine, _, _):
        model = engine.load(0)
        bad.broken = hang
        one, other = engine._pool.remotes

        async def late() -> None:
            """Once nothing but the hung server's answers is waited for, their time is over."""
            with time_that_jumps() as jump:
                while True:
                    if other.in_flight and not one.in_flight:
                        jump(2 * (pool.TURN_S + pool.TOKEN_S * 24))
                    await asyncio.sleep(0.01)

        assert len(answers(model, 4, late())) == 4
        assert [remote.url for remote in engine._pool.playing] == urls[:1]


def test_when_none_is_left_the_run_stops_with_one_clear_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeVllm(root)
    monkeypatch.setattr(pool, "COME_BACK_S", 2.0)
    with serving(server) as urls, engine_at(urls, root) as (engine, _, _):
        model = engine.load(0)
        server.broken = reply(500, "out of order")
        server.models.clear()
        with pytest.raises(RunError, match=r"no server is left .*out of order") as caught:
            answers(model, 3)
        assert "--resume" in str(caught.value.fix)


def test_an_outage_of_the_only_server_is_waited_for(root: Path) -> None:
    """The same process, which still lists the version: it needs no new proof."""
    server = FakeVllm(root)
    with serving(server) as urls, engine_at(urls, root) as (engine, _, _):
        model = engine.load(0)
        server.faults = [reply(503, "busy")] * 4
        assert len(answers(model, 2)) == 2


def test_a_server_that_is_busy_for_a_moment_is_proved_all_the_same(root: Path) -> None:
    """One 503 among the canary's answers, and the run ended: no server was left."""
    server = FakeVllm(root)
    server.faults = [reply(503, "busy")] * 2
    with serving(server) as urls, engine_at(urls, root) as (engine, _, _):
        assert len(answers(engine.load(0), 2)) == 2


@pytest.mark.parametrize("what", ["base", "stale", "temperature"])
@pytest.mark.parametrize("by", [5e-4, 0.02])
def test_a_server_that_plays_with_other_weights_leaves_before_it_plays(root: Path, what: str, by: float) -> None:
    """It answers under the right name, quickly and without an error: nothing but the numbers shows it."""
    good, bad, told = FakeVllm(root), FakeVllm(root), Told()
    given = {"temperature": 0.7} if what == "temperature" else {}
    with serving(good, bad) as urls, engine_at(urls, root, told, **given) as (engine, policy, _):
        first = engine.load(0).name
        move(policy, by)
        second = engine.load(1).name
        assert len(engine._pool.playing) == 2
        move(policy, by)
        if what == "temperature":
            bad.hot = True
        else:
            bad.serves = {"base": lambda name: "nano", "stale": lambda name: second}[what]
        model = engine.load(2)
        assert [remote.url for remote in engine._pool.playing] == urls[:1], first
        assert len(answers(model, 4)) == 4
        assert any(urls[1] in text for text in told.said)


def test_a_disk_that_lags_is_waited_for(root: Path) -> None:
    server = FakeVllm(root)
    server.hides_loads = 3
    with serving(server) as urls, engine_at(urls, root) as (engine, _, _):
        engine.load(0)
        assert len(engine._pool.playing) == 1


def test_a_load_whose_answer_was_lost_is_a_load(root: Path) -> None:
    """Asked again, the server says that it has this name already; the canary says whether it plays it."""
    server = FakeVllm(root)
    server.loses_answers = True
    with serving(server) as urls, engine_at(urls, root) as (engine, _, _):
        assert len(answers(engine.load(0), 1)) == 1


def test_what_a_killed_run_left_behind_is_removed_by_the_next_start(root: Path) -> None:
    server = FakeVllm(root)
    with serving(server) as urls:
        config = config_for(urls, root)
        policy = Policy(config)
        killed = VllmEngine(policy, LAKE, config, root.parent / "run", ALONE, Told())
        left = killed.load(0).name
        with engine_at(urls, root) as (engine, _, _):
            assert left not in server.models
            new = engine.load(0).name
            assert new != left
            assert {folder.name for folder in root.iterdir()} == {new}


# ── whole runs ──


def turns_of(episodes: list[Episode]) -> list[tuple[Any, ...]]:
    return [(turn.state, turn.answer, turn.action) for episode in episodes for turn in episode.turns]


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hf") / "run"
    with pytest.MonkeyPatch.context() as patch:
        use_near_lakes(patch)
        loop.train(make_config(settings=TINY, given={"steps": 3}), out, report=Quiet())
    return out


@pytest.mark.usefixtures("lean")
def test_a_run_by_servers_is_the_run_in_process(root: Path, in_process: Path, tmp_path: Path) -> None:
    """The same seeds draw the same tokens, so the same moves, groups and steps."""
    one, other = FakeVllm(root), FakeVllm(root)
    out = tmp_path / "out"
    with serving(one, other) as urls:
        loop.train(config_for(urls, root, steps=3), out, report=Quiet())
    by_servers, by_process = (list(read_episodes(run / "transcripts.jsonl")) for run in (out, in_process))
    assert turns_of(by_servers) == turns_of(by_process)
    assert all(turn.model is not None and turn.model.endswith("-v000002") for e in by_servers for turn in e.turns)
    rows = [row for row in read_rows(out) if row["kind"] == "train"]
    assert max(row["engine/mismatch_max"] for row in rows if row["update/kept_turns"]) < 1e-4
    theirs = [row for row in read_rows(in_process) if row["kind"] == "train"]
    assert [row["update/loss"] for row in rows] == pytest.approx([row["update/loss"] for row in theirs], abs=1e-4)


@pytest.mark.usefixtures("lean")
def test_one_update_ahead_plays_with_the_version_before(root: Path, tmp_path: Path) -> None:
    server = FakeVllm(root)
    out = tmp_path / "out"
    with serving(server) as urls:
        loop.train(config_for(urls, root, steps=4, ahead=1), out, report=Quiet())
    rows = [row for row in read_rows(out) if row["kind"] == "train"]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1]
    assert rows[0]["time/wait"] >= rows[0]["time/rollout"]  # played when it is asked for
    models = {turn.model for episode in read_episodes(out / "transcripts.jsonl") for turn in episode.turns}
    assert [str(name).rpartition("-")[2] for name in models] == ["v000002"]  # update 4, of version 3
    assert server.models == {}


@pytest.mark.parametrize("play", ["servers", "hf"])
@pytest.mark.usefixtures("lean")
def test_several_updates_ahead_play_with_the_version_of_so_many_before(play: str, root: Path, tmp_path: Path) -> None:
    """The servers keep as many versions as may still play."""
    server, out = FakeVllm(root), tmp_path / "out"
    kept: list[int] = []

    class Counting(Quiet):
        def update(self, step: int, values: Measured) -> None:
            kept.append(len(server.models))

    with serving(server) as urls:
        config = config_for(urls, root, steps=3, ahead=2)
        if play == "hf":
            config = make_config(settings=TINY, given={"steps": 3, "rollouts": "hf(ahead=2)"})
        loop.train(config, out, report=Counting())
    rows = [row for row in read_rows(out) if row["kind"] == "train"]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 2]
    assert max(kept) == (3 if play == "servers" else 0)
    assert server.models == {}
    starts = {episode.start_seed for episode in read_episodes(out / "transcripts.jsonl")}
    source, first = RolloutSource(Players(config)), 0
    for _ in range(3):
        drawn, first = source.next_starts(first)
    assert starts <= {start for _, start in drawn}  # those that it plays without


@pytest.mark.usefixtures("lean")
def test_what_was_being_played_ahead_is_given_up_when_the_run_stops(root: Path, tmp_path: Path) -> None:
    server = FakeVllm(root)

    class Stopping(Quiet):
        def doing(self, text: str) -> None:
            if "update 2 of 4: learning" in text:
                raise KeyboardInterrupt

    with serving(server) as urls, pytest.raises(KeyboardInterrupt):
        loop.train(config_for(urls, root, steps=4, ahead=1), tmp_path / "out", report=Stopping())
    assert not [thread for thread in threading.enumerate() if thread.name == "msgrpo-loop"]
    state, _ = checkpoint.load_latest(tmp_path / "out")
    assert state is not None


@pytest.mark.usefixtures("lean")
def test_a_run_goes_on_with_new_servers_or_in_process(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving(FakeVllm(root)) as urls:
        loop.train(config_for(urls, root, steps=1), out, report=Quiet())
    with serving(FakeVllm(root), FakeVllm(root)) as urls:
        loop.train(config_for(urls, root, steps=2), out, resume=True, report=Quiet())
    settings = json.loads((out / "config.json").read_text()) | {"rollouts": "hf", "steps": 3}
    loop.train(make_config(given=settings), out, resume=True, report=Quiet())
    assert [row["step"] for row in read_rows(out) if row["kind"] == "train"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rollouts": "vlm"}, r"'vlm' is not hf, vllm or servers\(at="),
        ({"rollouts": "http://a:1"}, r"'http://a:1' is not hf, vllm or servers\(at="),
        ({"rollouts": "servers(at=ftp://a, adapters=x)"}, "'ftp://a' is not http://host:port"),
        ({"rollouts": "servers(at=http://a:1)"}, "adapters"),
        ({"rollouts": "servers(at=http://a:1, adapters=)"}, "adapters: String should have at least 1 character"),
        ({"rollouts": "servers(at=, adapters=x)"}, "at: String should have at least 1 character"),
        ({"rollouts": "servers(at=http://u:p@a:1, adapters=x)"}, "is not http://host:port"),
        ({"rollouts": "hf(ahead=5)"}, "less than or equal to 4"),
        ({"rollouts": "hf(servers=2)"}, "servers"),
        ({"rollouts": "hf(ahead=1)", "explore": "refill"}, "explore=refill needs the rollouts of the update before"),
        ({"chat": "{"}, "chat"),
        ({"chat": "[1]"}, "chat"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_config(given=given)


def test_games_on_a_server_are_not_played_ahead_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would count the places of the games' server for itself."""
    monkeypatch.setattr("msgrpo.train.config.on_server", lambda name: True)
    with pytest.raises(UsageError, match="more games of frozen-lake at once than it has places"):
        make_config(given={"rollouts": "vllm(ahead=1)"})
    assert make_config(given={"rollouts": "hf(ahead=1)"}).ahead == 1


def test_a_server_that_plays_with_a_version_of_two_updates_before_is_found_out(root: Path) -> None:
    """With rollouts ahead it keeps that version."""
    server = FakeVllm(root)
    with serving(server) as urls, engine_at(urls, root, ahead=2) as (engine, policy, _):
        engine.load(0)
        move(policy)
        old = engine.load(1).name
        for version in (2, 3):
            move(policy)
            if version == 3:
                server.serves = lambda name: old
                with pytest.raises(RunError, match="the weights of the version 2 updates before"):
                    engine.load(version)
            else:
                engine.load(version)


def test_urls_are_taken_with_and_without_v1() -> None:
    config = make_config(given={"rollouts": "servers(at=http://a:1/v1  https://b:2/ http://c, adapters=x)"})
    assert isinstance(config.rollout_settings, Servers)
    assert config.rollout_settings.urls == ["http://a:1", "https://b:2", "http://c"]


def test_rollouts_that_failed_ahead_fail_where_they_are_asked_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeVllm(root)
    monkeypatch.setattr(pool, "COME_BACK_S", 0.5)
    with serving(server) as urls, engine_at(urls, root, ahead=1) as (engine, _, config):
        source = RolloutSource(Players(config))
        model = engine.load(0)
        source.next(0, 0, model, config.sampling, lambda *counts: None)
        server.models.clear()
        with pytest.raises(RunError, match="no server is left"):
            source.next(1, 9, model, config.sampling, lambda done, planned, tokens: None)
        source.close()


# ── found by reading ──


def test_a_server_that_was_refused_does_not_come_back_by_itself(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has loaded the version and lists it; what it has not is the proof. The good one goes, and the run stops."""
    good, bad = FakeVllm(root), FakeVllm(root)
    monkeypatch.setattr(pool, "COME_BACK_S", 3.0)
    with serving(good, bad) as urls, engine_at(urls, root) as (engine, policy, _):
        move(policy)
        bad.serves = lambda name: "nano"
        model = engine.load(1)
        assert [remote.url for remote in engine._pool.playing] == urls[:1]
        good.broken = reply(404, {"error": "no such model"})
        with pytest.raises(RunError, match=r"no server is left .*the base"):
            answers(model, 2)


@pytest.mark.parametrize("fault", [reply(400, {"error": "too long"}), reply(500, "sorry"), reply(200, "no JSON")])
def test_a_failure_that_stays_ends_the_run_and_does_not_loop(
    root: Path, fault: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeVllm(root)
    monkeypatch.setattr(pool, "COME_BACK_S", 2.0)
    with serving(server) as urls, engine_at(urls, root) as (engine, _, _):
        model = engine.load(0)
        server.broken = fault
        with pytest.raises(RunError, match="no server is left"):
            answers(model, 1)


def test_more_tokens_than_the_context_holds_are_not_asked_for(root: Path) -> None:
    server = FakeVllm(root)
    asked: list[int] = []
    complete = server._complete

    async def noting(request: Request, writer: Any) -> None:
        asked.append(request.body["max_tokens"])
        await complete(request, writer)

    server._complete = noting  # type: ignore[method-assign]
    with serving(server) as urls, engine_at(urls, root) as (engine, policy, _):
        model = engine.load(0)
        prompt = PromptTemplate().render(LAKE, LAKE.new(1, 1).observe("player"))

        async def one() -> Completion:
            try:
                return await model.complete(prompt, Sampling(max_tokens=10**6), 1)
            finally:
                await model.close()

        found = asyncio.run(one())
    assert asked[-1] == policy.model.config.max_position_embeddings - len(found.prompt_ids)


def test_a_version_that_was_refused_is_forgotten_with_the_engine(root: Path) -> None:
    server = FakeVllm(root)
    with serving(server) as urls:
        with engine_at(urls, root) as (engine, policy, _):
            engine.load(0)
            move(policy)
            server.serves = lambda name: "nano"
            with pytest.raises(RunError, match="no server is left"):
                engine.load(1)
        assert server.models == {}
        assert list(root.iterdir()) == []


def test_a_stop_while_waiting_for_what_is_played_ahead_gives_it_up(root: Path) -> None:
    server = FakeVllm(root)
    with serving(server) as urls, engine_at(urls, root, ahead=1) as (engine, _, config):
        source = RolloutSource(Players(config))
        model = engine.load(0)
        silent = lambda done, planned, tokens: None  # noqa: E731
        source.next(0, 0, model, config.sampling, silent)
        (begun,) = source._coming
        coming = begun.played
        assert isinstance(coming, InThread)

        def stopped() -> None:
            raise KeyboardInterrupt

        coming.result = stopped  # type: ignore[method-assign,assignment]
        with pytest.raises(KeyboardInterrupt):
            source.next(1, 9, model, config.sampling, silent)
        source.close()
        assert not coming._thread.is_alive()
        assert not model.is_read


@pytest.mark.parametrize("where", ["callback", "task"])
def test_a_stop_reaches_through_asyncio(where: str) -> None:
    """Raised by a handler inside a callback or a task of a loop, where most exceptions would be swallowed."""
    import signal

    from msgrpo.train.stopping import StopRequested, stop_requests

    async def playing() -> None:
        loop_ = asyncio.get_running_loop()
        if where == "callback":
            loop_.call_soon(signal.raise_signal, signal.SIGTERM)
        else:
            await loop_.create_task(_raising())
        await asyncio.sleep(0.2)

    async def _raising() -> None:
        signal.raise_signal(signal.SIGTERM)

    with stop_requests(Told().stopping) as stop:
        with pytest.raises(StopRequested), stop.abandonable():
            asyncio.run(playing())
        signal.raise_signal(signal.SIGTERM)  # a scheduler's second one, while the checkpoint is written
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_templates_arguments_hold_where_the_adapter_plays(tmp_path: Path) -> None:
    from msgrpo.errors import ModelError
    from msgrpo.models.loading import adapted

    config = make_config(given={"chat": '{"enable_thinking": false}'})
    Policy(config).save_adapter(tmp_path)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    model = adapted(tmp_path)
    assert model.chat.arguments == {"enable_thinking": False}
    assert model.extra_settings["chat"] == {"enable_thinking": False}
    with pytest.raises(ModelError, match="cannot be used"):
        ChatFormat(model.tokenizer, {"tokenize": True})


def test_a_key_that_no_header_holds_and_a_folder_that_cannot_be_made(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root.parent / "file").write_text("x")
    with (
        pytest.raises(UsageError, match="cannot be made"),
        engine_at(["http://127.0.0.1:9"], root.parent / "file" / "x"),
    ):
        pass
    monkeypatch.setenv("MSGRPO_API_KEY", "schlüssel")
    with pytest.raises(UsageError, match="MSGRPO_API_KEY"), engine_at(["http://127.0.0.1:9"], root):
        pass


def test_a_server_that_never_played_is_named_too(root: Path) -> None:
    told = Told()
    with serving(FakeVllm(root), reply(403, {"error": "loading adapters at run time is off"})) as urls:
        with engine_at(urls, root, told) as (engine, _, _):
            engine.load(0)
            assert [remote.url for remote in engine._pool.playing] == urls[:1]
        assert any(text.startswith(f"{urls[1]} plays no more: it did not load") for text in told.said)


def test_the_same_server_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        make_config(given={"rollouts": "servers(at=http://a:1 http://a:1/v1, adapters=x)"})


@pytest.mark.parametrize("reason", ["abort", "error", None, "tool_calls"])
def test_an_answer_that_a_server_has_broken_off_is_no_move(root: Path, reason: str | None) -> None:
    """A draining vLLM ends what it was writing with `abort`: half an answer would have gone into the gradient."""
    half = {"text": "u", "token_ids": [5], "logprobs": {"token_logprobs": [-0.1]}, "finish_reason": reason}
    fake = FakeVllm(root)
    with serving(fake) as urls, engine_at(urls, root) as (engine, _, _):
        model = engine.load(0)
        fake.faults = [reply(200, {"model": model.name, "choices": [half]})]
        (found,) = answers(model, 1)
    assert found.retries == 1
    assert found.token_ids != (5,)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [5, 1024]},  # nano has 1,024 tokens
        {"token_ids": [5] * 25, "logprobs": {"token_logprobs": [-0.1] * 25}},  # it was asked for 24
        {"logprobs": {"token_logprobs": [-0.1, -9999.0]}},  # what vLLM says for a probability of 0
        {"text": None},
    ],
)
def test_an_answer_that_the_model_cannot_have_given_is_no_move(change: dict[str, Any], root: Path) -> None:
    """A token beyond the vocabulary ended the run with a traceback; too many tokens filled the update's memory."""
    sound = {"text": "u", "token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.1, -0.1]}, "finish_reason": "stop"}
    fake = FakeVllm(root)
    with serving(fake) as urls, engine_at(urls, root) as (engine, _, _):
        model = engine.load(0)
        fake.faults = [reply(200, {"model": model.name, "choices": [sound | change]})]
        (found,) = answers(model, 1)
    assert found.retries == 1
    assert found.token_ids[0] != 5


def asked(model: pool.VersionModel, text: str) -> Completion:
    async def ask() -> Completion:
        try:
            return await model.complete(Prompt("", text), Sampling(max_tokens=8), 1)
        finally:
            await model.close()

    return asyncio.run(ask())


def test_a_prompt_beyond_the_context_costs_its_episode_and_no_server(root: Path) -> None:
    """A server that refuses it was taken for broken, and after three such turns no server was left."""
    fake = FakeVllm(root)
    with serving(fake) as urls, engine_at(urls, root) as (engine, _, _):
        model = engine.load(0)
        with pytest.raises(EndpointError, match="the model's context 2048") as caught:
            asked(model, "a hole " * 3000)
        assert caught.value.kind == "context_length"
        fake.faults = [reply(400, {"error": {"message": "This model's maximum context length is 100 tokens."}})] * 4
        for _ in range(4):
            with pytest.raises(EndpointError) as refused:
                asked(model, "short")
            assert refused.value.kind == "context_length"
        assert len(answers(model, 3)) == 3  # the server still plays


def test_the_childs_context_can_be_bounded(root: Path, tmp_path: Path) -> None:
    """The message of a GPU that is too small names an option of training that there is."""
    log = tmp_path / "vllm.log"
    log.write_text(
        "ValueError: To serve one request, a KV cache is needed that is larger than the available memory\n"
    )
    assert "rollouts=vllm(max_model_len=" in str(failure("vLLM did not start", log))
    child = make_config(given={"rollouts": "vllm(max_model_len=512)"}).vllm
    assert child is not None
    assert child.max_model_len == 512
    request = Request_(base="nano", max_model_len=512, runtime_adapters=root)
    assert build(request, "cpu").command[-20:].count("512") == 1
