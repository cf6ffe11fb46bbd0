"""The pool of servers under a burst: places, the line before them, and who leaves."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from msgrpo.agent import LanguageAgent, Sampling
from msgrpo.episode import play_episode
from msgrpo.errors import RunError
from msgrpo.games import get_scenario
from msgrpo.models import http
from msgrpo.prompt import Prompt
from msgrpo.train.engines import pool as module
from msgrpo.train.engines.pool import Pool, Remote, RemoteError, VersionModel
from tests.fake_server import FakeServer, Request, reply

LAKE = get_scenario("frozen-lake")
TEXT = "<action>right</action>"
CHOICE = {"text": TEXT, "token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.1, -0.2]}, "finish_reason": "stop"}
ANSWER = json.dumps({"model": "v", "choices": [CHOICE]}).encode()


class Words:
    """A chat format: a token a prompt."""

    def ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [[7] for _ in prompts]


class Count:
    """Of a server: requests on their way, the most of them at once, and all."""

    def __init__(self) -> None:
        self.now = self.most = self.requests = 0


class Busy(asyncio.Protocol):
    """Answers each request two turns of the loop later."""

    def __init__(self, count: Count) -> None:
        self._count, self._held = count, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, _, body = self._held.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0] or -1)
        if len(body) == length:
            self._held = b""
            self._count.now += 1
            self._count.requests += 1
            self._count.most = max(self._count.most, self._count.now)
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._answer)

    def _answer(self) -> None:
        self._count.now -= 1
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER)


@asynccontextmanager
async def busy(servers: int) -> AsyncIterator[tuple[list[str], list[Count]]]:
    loop, counts = asyncio.get_running_loop(), [Count() for _ in range(servers)]
    made = [await loop.create_server(lambda count=count: Busy(count), "127.0.0.1", backlog=512) for count in counts]  # type: ignore[misc]
    try:
        yield [f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in made], counts
    finally:
        for one in made:
            one.close()
            await one.wait_closed()


def pool_of(urls: Sequence[str], told: list[str] | None = None) -> Pool:
    say = (told if told is not None else []).append
    return Pool([Remote(url, out=None, proved={"v"}) for url in urls], None, say)


def model_of(pool: Pool) -> VersionModel:
    return VersionModel("v", pool, Words(), [2], 100, 10)  # type: ignore[arg-type]


@pytest.mark.parametrize(("servers", "episodes"), [(1, 1024), (2, 640)])
async def test_a_burst_is_played_to_its_end_within_the_bound_and_no_server_leaves(
    servers: int, episodes: int
) -> None:
    told: list[str] = []
    async with busy(servers) as (urls, counts):
        pool = pool_of(urls, told)
        agents = dict.fromkeys(LAKE.players, LanguageAgent("policy", model_of(pool)))
        played = await asyncio.gather(
            *(play_episode(LAKE, agents, start_seed=i % 8, chance_seed=i, sampling_seed=i) for i in range(episodes))
        )
        await agents["player"].close()
    assert {episode.error for episode in played} == {None}
    assert {turn.retries for episode in played for turn in episode.turns} == {0}
    assert told == []
    assert sum(count.requests for count in counts) == sum(len(episode.turns) for episode in played)
    for count, remote in zip(counts, pool.remotes, strict=True):
        assert count.most <= 256
        assert count.requests > 0.4 * sum(one.requests for one in counts) / servers
        assert (remote.in_flight, remote.failures, remote.out) == (0, 0, None)


async def calls_of_a_turn(at_once: int) -> float:
    """Python function calls of one turn, server included, where so many are asked at once, twice."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    async with busy(1) as (urls, _):
        model = model_of(pool_of(urls))
        for watched in (False, True):  # the first time connections are made
            sys.setprofile(count if watched else None)
            try:
                await asyncio.gather(*(model.complete(Prompt("", ""), Sampling(), i) for i in range(at_once)))
            finally:
                sys.setprofile(None)
        await model.close()
    return calls / at_once


async def test_a_turns_work_does_not_grow_with_the_turns_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of connections that looks through all of them at each request holds the event loop up for seconds."""
    monkeypatch.setattr(http, "KEEP_S", 600.0)  # whatever comes between the two times
    few, many = await calls_of_a_turn(16), await calls_of_a_turn(240)
    assert many < 1.5 * few


# ── the line ──


def places(pool: Pool, count: int) -> None:
    pool.__dict__["places"] = count


async def holding(pool: Pool, leave: asyncio.Event, seen: list[str | None]) -> None:
    async with pool.place() as remote:
        seen.append(None if remote is None else remote.url)
        await leave.wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_waits_gets_the_first_place_that_comes_free_in_the_order_of_the_line() -> None:
    pool, seen, order = pool_of(["a", "b"]), [], []  # type: ignore[var-annotated]
    places(pool, 1)
    leave = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(holding(pool, one, seen)) for one in leave]
    await settled()
    assert sorted(filter(None, seen)) == ["a", "b"]
    for number in (1, 0):  # the server that is done first gets the first who waits
        leave[number].set()
        await settled()
        order.append(seen[-1])
    assert order == [seen[1], seen[0]]
    for one in leave:
        one.set()
    await asyncio.gather(*tasks)
    assert [remote.in_flight for remote in pool.remotes] == [0, 0]


async def test_who_gives_up_waiting_holds_no_place_and_nobody_up() -> None:
    pool, seen, through = pool_of(["a"]), [], asyncio.Event()  # type: ignore[var-annotated]
    places(pool, 1)
    through.set()
    first = await pool._place()
    waiting = [asyncio.create_task(holding(pool, through, seen)) for _ in range(3)]
    await settled()
    waiting[0].cancel()  # while it waits
    pool._leave(first)
    waiting[1].cancel()  # when it has been given a place and does not know it yet
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in found] == [True, True, False]
    assert seen == ["a"]
    assert pool.remotes[0].in_flight == 0


async def test_a_line_whose_people_have_all_left_keeps_nobody_out() -> None:
    pool, seen = pool_of(["a"]), []  # type: ignore[var-annotated]
    places(pool, 0)
    gone = [asyncio.create_task(holding(pool, asyncio.Event(), seen)) for _ in range(3)]
    await settled()
    for one in gone:
        one.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    places(pool, 1)
    through = asyncio.Event()
    through.set()
    await asyncio.wait_for(holding(pool, through, seen), 60)
    assert seen == ["a"]


async def test_a_server_that_leaves_gets_nobody_of_the_line_and_the_last_one_tells_them() -> None:
    pool, seen = pool_of(["a", "b"]), []  # type: ignore[var-annotated]
    places(pool, 1)
    a, b = pool.remotes
    leave = asyncio.Event()
    tasks = [asyncio.create_task(holding(pool, leave, seen)) for _ in range(4)]
    await settled()
    pool.failed(a, RemoteError("gone", final=True))
    await settled()
    assert len(seen) == 2
    pool.failed(b, RemoteError("gone", final=True))
    await settled()
    assert seen[2:] == [None, None]
    leave.set()
    await asyncio.gather(*tasks)
    assert (a.in_flight, b.in_flight) == (0, 0)


async def test_a_server_that_joins_takes_up_the_line() -> None:
    pool, seen = pool_of(["a", "b"]), []  # type: ignore[var-annotated]
    places(pool, 2)
    a = pool.remotes[0]
    a.out = "gone"
    leave = asyncio.Event()
    tasks = [asyncio.create_task(holding(pool, leave, seen)) for _ in range(5)]
    await settled()
    assert seen == ["b", "b"]
    pool.joined(a, "v")
    await settled()
    assert seen == ["b", "b", "a", "a"]
    leave.set()
    await asyncio.gather(*tasks)


def test_a_server_that_comes_back_and_fails_again_is_named_with_its_failure() -> None:
    """It lists its versions and answers no turn: it plays again whenever a turn gives up, and the error said None."""
    pool = pool_of(["http://127.0.0.1:1"])
    (remote,) = pool.remotes
    for _ in range(module.PATIENCE):
        pool.failed(remote, RemoteError("status 500: boom"))
    pool.joined(remote, "v")
    assert "http://127.0.0.1:1: status 500: boom" in pool.none_left().message


def test_two_event_loops_share_the_places() -> None:
    """Rollouts ahead of the trainer run in a thread with a loop of its own."""
    pool, most, lock = pool_of(["a"]), [0], threading.Lock()
    places(pool, 2)

    async def turn() -> None:
        async with pool.place() as remote:
            assert remote is not None
            with lock:
                most[0] = max(most[0], remote.in_flight)
            await asyncio.sleep(0)

    async def many() -> None:
        await asyncio.wait_for(asyncio.gather(*(turn() for _ in range(300))), 60)

    threads = [threading.Thread(target=lambda: asyncio.run(many())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [2]
    assert pool.remotes[0].in_flight == 0
    assert not pool._line


async def test_when_none_is_left_one_turn_of_all_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of turns that wait for a server that comes back must not all ask it, every second."""
    monkeypatch.setattr(module, "COME_BACK_S", 0.3)
    lists = 0

    async def broken(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal lists
        lists += request.path == "/v1/models"
        await reply(503, "starting")(request, writer)

    async with FakeServer(then=broken) as server:
        model = model_of(pool_of([server.url.removesuffix("/v1")]))
        asked = [asyncio.create_task(model.complete(Prompt("", ""), Sampling(), i)) for i in range(200)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        await model.close()
    assert all(isinstance(one, RunError) for one in found)
    assert 0 < lists < 100  # of 200
