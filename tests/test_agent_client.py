"""The client of language models' servers: bursts, bounds, keys, and what a turn costs."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from msgrpo.agent import LanguageAgent, Sampling
from msgrpo.episode import COLLECTION, few_collections, play_episode
from msgrpo.errors import UsageError
from msgrpo.games import get_scenario
from msgrpo.models import http
from msgrpo.models.bounded import LONGEST_BODY, TooLongError
from msgrpo.models.endpoint import EndpointModel, Timeouts
from msgrpo.models.http import Client, NoAnswerError, most_in_flight, proxy_for
from msgrpo.prompt import Prompt
from tests.fake_server import FakeServer, Request, player, reply, send, time_that_jumps
from tests.fake_server import http as response

LAKE = get_scenario("frozen-lake")


async def test_a_burst_of_episodes_is_played_to_its_end_without_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IN_FLIGHT", 8)

    async def slowly(request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        await player(request, writer)

    async with FakeServer(then=slowly) as server:
        agent = LanguageAgent("policy", EndpointModel(server.url, "fake", retries=0))
        agents = dict.fromkeys(LAKE.players, agent)
        played = await asyncio.gather(
            *(play_episode(LAKE, agents, start_seed=i % 8, chance_seed=i, sampling_seed=i) for i in range(300))
        )
        await agent.close()
    assert {(episode.error, sum(turn.retries for turn in episode.turns)) for episode in played} == {(None, 0)}
    assert len(server.requests) == sum(len(episode.turns) for episode in played)
    assert server.most_at_once == 8


async def test_a_requests_limits_begin_with_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """160 wait for 8 places: the last of them thirteen times as long as one may take."""
    monkeypatch.setattr(http, "IN_FLIGHT", 8)
    limits, held, answered = Timeouts(), 0, asyncio.Event()
    with time_that_jumps() as jump:

        async def slowly(request: Request, writer: asyncio.StreamWriter) -> None:
            nonlocal held, answered
            held, mine = held + 1, answered
            if held == 8:
                jump(limits.total_s * 2 / 3)
                held, answered = 0, asyncio.Event()
                mine.set()
            await mine.wait()
            await player(request, writer)

        async with FakeServer(then=slowly) as server:
            model = EndpointModel(server.url, "fake", retries=0, timeouts=replace(limits, read_s=limits.total_s))
            answers = await asyncio.gather(*(model.complete(Prompt("", "state"), Sampling(), i) for i in range(160)))
            await model.close()
    assert [answer.retries for answer in answers] == [0] * 160


async def test_connections_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEP_S", 600.0)  # whatever comes between two rounds
    made: list[Any] = []
    connect = asyncio.BaseEventLoop.create_connection

    async def counted(self: Any, *arguments: Any, **more: Any) -> Any:
        made.append(arguments)
        return await connect(self, *arguments, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", counted)
    async with FakeServer(then=reply(200, {})) as server, Client({}) as client:
        for _ in range(20):
            await asyncio.gather(*(client.ask("POST", server.url, b"{}") for _ in range(5)))
    assert len(server.requests) == 100
    assert len(made) == 5


def test_a_client_serves_one_event_loop_after_another() -> None:
    """An opponent behind an endpoint plays in every update, each of which has a loop of its own."""
    model: list[EndpointModel] = []

    async def once() -> str:
        async with FakeServer() as server:
            model.append(EndpointModel(server.url, "fake"))
            for _ in range(2):
                found = await model[-1].complete(Prompt("", "state"), Sampling(), 1)
            await model[-1].close()
            return found.text

    assert asyncio.run(once()) == asyncio.run(once())
    assert not any(one._client.is_open for one in model)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_the_key_stays_with_its_host(status: int) -> None:
    """No redirect takes it elsewhere, and no cookie that a server sets comes back to it."""
    async with FakeServer(then=reply(200, {})) as other:
        moved = reply(status, "", {"location": other.url, "set-cookie": "a=b"})
        async with FakeServer(then=moved) as server, Client({"Authorization": "Bearer secret"}) as client:
            for _ in range(2):
                assert (await client.ask("POST", server.url, b"{}")).status == status
    assert other.requests == []
    assert [sent.headers["authorization"] for sent in server.requests] == ["Bearer secret"] * 2
    assert not any("cookie" in sent.headers for sent in server.requests)


@pytest.mark.parametrize("given", [str(LONGEST_BODY + 1), None])
async def test_a_body_is_bounded_whether_its_length_is_named_or_not(given: str | None) -> None:
    head = b"HTTP/1.1 200 OK\r\n" + (f"content-length: {given}\r\n".encode() if given else b"connection: close\r\n")
    raw = send(head + b"\r\n" + b" " * (LONGEST_BODY + 1), close=True)
    async with FakeServer(then=raw) as server, Client({}) as client:
        with pytest.raises(TooLongError, match="16 MiB"):
            await client.ask("GET", server.url)


@pytest.mark.parametrize("named", [True, False])
async def test_few_long_bodies_are_read_at_once(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 bodies of 16 MiB each are 4 GiB."""
    monkeypatch.setattr(http, "SHORT_BODY", 100)
    monkeypatch.setattr(http, "LONG_AT_ONCE", 1)
    ended, order = asyncio.Event(), list[str]()

    def body(size: int) -> bytes:
        length = f"content-length: {size}\r\n" if named else "connection: close\r\n"
        return f"HTTP/1.1 200 OK\r\n{length}\r\n".encode()

    async def answers(request: Request, writer: asyncio.StreamWriter) -> None:
        size = 50 if request.path.endswith("short") else 300
        writer.write(body(size) + b" " * (size - 1))
        if request.path.endswith("first"):
            await ended.wait()
            await asyncio.sleep(0.2)  # in which the second would be read, too
        writer.write(b" ")
        if not named:
            writer.close()

    async with FakeServer(then=answers) as server, Client({}) as client:

        async def ask(name: str) -> None:
            assert len((await client.ask("GET", f"{server.url}/{name}")).body) == (50 if name == "short" else 300)
            order.append(name)

        first = asyncio.create_task(ask("first"))
        while not client._here().long_bodies.locked():
            await asyncio.sleep(0.01)
        second = asyncio.create_task(ask("second"))
        await ask("short")
        ended.set()
        await asyncio.gather(first, second)
    assert order == ["short", "first", "second"]


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a" * 70000,
        b"HTTP/1.1 200 OK\r\nset-cookie: x\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\nset-cookie: secret\x00\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nset-cookie: secret" + b"a" * 70000 + b"\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_request_without_an_answer(raw: bytes) -> None:
    async with FakeServer(then=send(raw, close=True)) as server, Client({}) as client:
        with pytest.raises(NoAnswerError) as caught:
            await client.ask("GET", server.url)
    assert not caught.value.late
    said = str(caught.value)  # is shown and recorded; of its headers it says nothing
    assert "set-cookie" not in said
    assert "secret" not in said
    assert "nonsense" not in said


async def test_a_request_that_takes_too_long_is_late() -> None:
    """Also where a piece comes now and then, which ends no limit between two pieces."""

    async def drip(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, b"", length=1000))
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.01)

    async with FakeServer(then=drip) as server, Client({}, read_s=5.0, total_s=0.2) as client:
        with pytest.raises(NoAnswerError) as caught:
            await client.ask("GET", server.url)
    assert caught.value.late


def test_the_bound_in_flight_fits_the_files_that_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.append(new))
    assert most_in_flight(1) == 256
    assert limits == [(1024, 4096)]  # enough as it is
    assert most_in_flight(8) == 256
    assert limits[-1] == (8 * 256 + 256, 4096)
    assert most_in_flight(63) == (4096 - 256) // 63
    assert limits[-1] == (4096, 4096)
    assert most_in_flight(10_000) == 1


async def test_no_more_open_files_is_no_fault_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_left(*arguments: Any, **more: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", none_left)
    async with Client({}) as client:
        with pytest.raises(UsageError, match="files and connections") as caught:
            await client.ask("GET", "http://127.0.0.1:9/")
    assert "ulimit" in str(caught.value.fix)


def test_the_proxy_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert proxy_for("https://h/v1") is None
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    monkeypatch.setenv("NO_PROXY", "localhost,10.0.0.1")
    assert proxy_for("https://h/v1") == "http://proxy:1"
    assert proxy_for("http://h/v1") is None
    assert proxy_for("https://localhost:8000/v1") is None
    monkeypatch.setenv("HTTPS_PROXY", "proxy:3128")  # as curl takes it too
    assert proxy_for("https://h/v1") == "http://proxy:3128"
    monkeypatch.setenv("HTTPS_PROXY", "socks5://proxy:1080")
    with pytest.raises(UsageError, match="socks5"):
        proxy_for("https://h/v1")


async def test_a_header_of_the_users_own_takes_the_place_of_the_keys() -> None:
    async with FakeServer() as server:
        model = EndpointModel(server.url, "fake", headers={"AUTHORIZATION": "Basic x"})
        await model.complete(Prompt("", "state"), Sampling(), 1)
        await model.close()
    assert server.requests[0].headers["authorization"] == "Basic x"
    assert server.requests[0].headers["user-agent"].startswith("msgrpo/")


# ── streams ──


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_events_are_the_same_however_they_are_cut(size: int, end: bytes) -> None:
    chunks = [{"choices": [{"delta": {"content": text}}]} for text in ("Gö ", "<action>up", "</action>")]
    chunks.append({"choices": [{"finish_reason": "stop", "delta": {}}]})
    lines = [b": a comment", b"", b"event: x", b"id: 7"]
    lines += [part for one in chunks for part in (b"data: " + json.dumps(one, ensure_ascii=False).encode(), b"")]
    whole = end.join([*lines, b"data:[DONE]", b"", b"data: after the end", b"", b""])

    async def cut(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for start in range(0, len(whole), size):
            writer.write(whole[start : start + size])
            await asyncio.sleep(0)
        writer.close()

    async with FakeServer(then=cut) as server:
        model = EndpointModel(server.url, "fake", retries=0)
        found = await model.complete(Prompt("", "state"), Sampling(), 1, on_text=lambda text: None)
        await model.close()
    assert found.text == "Gö <action>up</action>"


# ── tokens of prompts ──


class Tokenizer:
    """Joins `merged` into one token wherever it stands; every other character is one. Counts what it reads."""

    chat_template, name_or_path, backend_tokenizer = "x", "x", None

    def __init__(self, merged: str) -> None:
        self.merged, self.read = merged, 0

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return f"<user>{messages[0]['content']}<assistant>"

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, Any]:
        self.read += sum(map(len, texts))
        return {"input_ids": [list(map(ord, text.replace(self.merged, "\u2603"))) for text in texts]}


@pytest.mark.parametrize("merged", ["state", "\nS", "rule"])
def test_the_prefixs_tokens_are_made_once_and_are_those_of_the_whole(merged: str) -> None:
    """Also of a tokenizer that joins characters across the start of a line: there each prompt is read as a whole."""
    from msgrpo.prompt import ChatFormat

    tokenizer = Tokenizer(merged)
    chat = ChatFormat(tokenizer)
    prompts = [Prompt("the rules\n" * 100 + "State: ", f"the state {i}") for i in range(40)]
    whole = [tokenizer([f"<user>{one.prefix}{one.state}<assistant>"])["input_ids"][0] for one in prompts]
    assert chat.ids(prompts[:20]) == whole[:20]
    before = tokenizer.read
    assert [chat.ids([one])[0] for one in prompts[20:]] == whole[20:]
    read = (tokenizer.read - before) / 20
    assert read > 1000 if merged == "\nS" else read < 100


def test_prompts_of_several_prefixes_and_without_lines_are_told_apart() -> None:
    from msgrpo.prompt import ChatFormat

    chat = ChatFormat(Tokenizer("~"))
    prompts = [Prompt(prefix, str(i)) for i in range(8) for prefix in ("a\nb: ", "a\nc: ", "d: ", "", "e\n", "f\n ")]
    for _ in range(2):
        assert chat.ids(prompts) == [list(map(ord, f"<user>{p.prefix}{p.state}<assistant>")) for p in prompts]
    assert all(len(set(pair)) == 2 for pair in pairwise(p.prefix for p in prompts))


def test_python_searches_seldom_for_cycles_while_episodes_are_played_and_as_before_afterwards() -> None:
    """Also where one playing lies in another, as an evaluation in a training, and where it ends in an error."""
    before = gc.get_threshold()

    def fails_while_playing() -> None:
        with few_collections():
            assert gc.get_threshold() == COLLECTION
            assert gc.get_freeze_count() > 0
            with few_collections():
                assert gc.get_threshold() == COLLECTION
            assert gc.get_threshold() == COLLECTION
            raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        fails_while_playing()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
