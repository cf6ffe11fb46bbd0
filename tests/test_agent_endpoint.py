"""A model behind a URL, over a real socket: what is asked, and what again. The waits are recorded, not waited."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import resource
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from msgrpo.agent import LanguageAgent, ParseFailure, Sampling
from msgrpo.episode import play_episode
from msgrpo.errors import EndpointError
from msgrpo.games import get_scenario
from msgrpo.models import bounded
from msgrpo.models.bounded import LONGEST_BODY
from msgrpo.models.endpoint import LONGEST_WAIT_S, EndpointModel, Timeouts
from tests.endpoint_helpers import GOOD, PROMPT, Client
from tests.fake_server import Behaviour, FakeServer, Request, answer, chat, hang, http, reply, reset, send

pytestmark = pytest.mark.usefixtures("no_keys")


HTML = send(http(502, b"<html><body><h1>Bad gateway</h1>nginx</body></html>", {"content-type": "text/html"}))


async def test_an_answer_and_what_was_asked() -> None:
    async with FakeServer([GOOD]) as server:
        got = await Client(server, headers={"x-team": "a"}, body={"min_p": 0.1, "seed": None}).ask()
    (request,) = server.requests
    assert (got.text, got.finish_reason, got.retries) == ("Go. <action>up</action>", "stop", 0)
    assert (got.prompt_tokens, got.completion_tokens) == (100, 10)
    assert request.path == "/v1/chat/completions"
    assert request.headers["x-team"] == "a"
    assert request.body == {
        "model": "fake",
        "messages": [{"role": "user", "content": "rules state"}],
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 256,
        "min_p": 0.1,
    }


async def test_the_seed_is_sent_in_31_bits_and_the_same_seed_again() -> None:
    async with FakeServer() as server:
        client = Client(server)
        for seed in (2**62 + 5, 2**62 + 5, 6):
            await client.model.complete(PROMPT, Sampling(), seed)
        await client.model.close()
    assert [r.body["seed"] for r in server.requests] == [5, 5, 6]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(reply(429, {"error": {"message": "slow down"}}), id="429"),
        pytest.param(reply(500, {"error": "boom"}), id="500, error is a string"),
        pytest.param(HTML, id="502 with HTML"),
        pytest.param(reply(503, ""), id="503 without a body"),
        pytest.param(reply(408, {"detail": "late"}), id="408"),
        pytest.param(reset, id="reset"),
        pytest.param(send(b"", close=True), id="closed without an answer"),
        pytest.param(send(http(200, b'{"choices": [', length=500), close=True), id="cut off on 200"),
        pytest.param(send(http(200, b'{"choices": [')), id="broken JSON on 200"),
        pytest.param(reply(200, [1]), id="a list on 200"),
        pytest.param(reply(200, {"choices": None}), id="choices null"),
        pytest.param(reply(200, {"choices": []}), id="choices empty"),
        pytest.param(reply(200, {"choices": [None]}), id="choice null"),
        pytest.param(reply(200, {"choices": [{"message": None, "finish_reason": "stop"}]}), id="message null"),
        pytest.param(reply(200, {"error": {"message": "upstream", "code": 502}}), id="an error on 200"),
        pytest.param(reply(200, {"error": "overloaded"}), id="a string as error on 200"),
        pytest.param(reply(200, chat("a", finish="error")), id="an answer that ended in an error"),
        pytest.param(reply(200, chat("a", finish="abort")), id="an answer that was given up"),
        pytest.param(
            reply(200, {"choices": [chat("a")["choices"][0] | {"error": {"code": 502}}]}),
            id="an error beside an answer",
        ),
        pytest.param(
            reply(429, {"error": {"message": "You exceeded your current quota, see billing. Retry in 34s"}}),
            id="a rate limit that speaks of quota",
        ),
        pytest.param(send(http(200, b"[" * 200_000)), id="brackets without end"),
        pytest.param(send(http(200, b'{"a": ' + b"1" * 5000 + b"}")), id="no answer but a number without end"),
    ],
)
async def test_what_may_pass_is_asked_again_and_counted(fault: Behaviour) -> None:
    async with FakeServer([fault, fault, GOOD]) as server:
        client = Client(server)
        got = await client.ask()
    assert got.text == "Go. <action>up</action>"
    assert got.retries == 2
    assert len(server.requests) == 3
    assert server.requests[0].body == server.requests[2].body
    assert 0 < client.waits[0] <= 0.5
    assert 0.5 < client.waits[1] <= 1.0


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (reply(429, {}), "rate_limit"),
        (reply(500, {}), "server_error"),
        (HTML, "server_error"),
        (reset, "connection"),
        (reply(200, {"choices": None}), "bad_response"),
    ],
)
async def test_tries_are_capped(fault: Behaviour, kind: str) -> None:
    async with FakeServer(then=fault) as server:
        client = Client(server, retries=3)
        with pytest.raises(EndpointError, match="4 tries") as caught:
            await client.ask()
    assert (caught.value.kind, caught.value.fatal) == (kind, False)
    assert len(server.requests) == 4
    assert len(client.waits) == 3


async def test_back_off_is_capped() -> None:
    async with FakeServer(then=reply(500, {})) as server:
        client = Client(server, retries=12)
        with pytest.raises(EndpointError):
            await client.ask()
    assert max(client.waits) == LONGEST_WAIT_S
    assert client.model.retrying == 0


async def test_a_request_is_retrying_until_it_has_its_answer() -> None:
    """While it was asked again nobody was told that it had failed before."""
    told: list[tuple[int, str]] = []

    async def look(request: Request, writer: asyncio.StreamWriter) -> None:
        told.append((client.model.retrying, client.model.trouble))
        await (reply(500, "busy") if len(told) < 3 else GOOD)(request, writer)

    async with FakeServer(then=look) as server:
        client = Client(server)
        await client.ask()
    failed = [f"status 500: busy (retry {number} of 10)" for number in (1, 2)]
    assert told == [(0, ""), (1, failed[0]), (1, failed[1])]
    assert (client.model.retrying, client.model.trouble) == (0, "")


async def test_a_server_that_is_not_there() -> None:
    async with FakeServer() as server:
        url = server.url
    model = EndpointModel(url, "fake", retries=0)
    with pytest.raises(EndpointError) as caught:
        await model.complete(PROMPT, Sampling(), 1)
    await model.close()
    assert (caught.value.kind, caught.value.fatal) == ("connection", False)


async def test_a_server_that_dies_while_it_answers() -> None:
    async with FakeServer(then=hang) as server:
        client = Client(server, retries=1)
        asking = asyncio.ensure_future(client.ask())
        while not server.requests:
            await asyncio.sleep(0)
        await server.stop()
        with pytest.raises(EndpointError) as caught:
            await asking
    assert caught.value.kind == "connection"


@pytest.mark.parametrize("timeouts", [Timeouts(read_s=0.02), Timeouts(total_s=0.02)], ids=["read", "total"])
async def test_time_outs(timeouts: Timeouts) -> None:
    async with FakeServer(then=hang) as server:
        client = Client(server, retries=1, timeouts=timeouts)
        with pytest.raises(EndpointError, match="in time") as caught:
            await client.ask()
        assert caught.value.kind == "timeout"
        assert len(client.waits) == 1


async def test_a_connection_that_cannot_be_made_in_time() -> None:
    with socket.socket() as deaf, socket.socket() as first, socket.socket() as second:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)  # never accepts: once its queue is full, further connections hang
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1"
        model = EndpointModel(url, "fake", retries=0, timeouts=Timeouts(connect_s=0.05))
        with pytest.raises(EndpointError) as caught:
            await model.complete(PROMPT, Sampling(), 1)
        await model.close()
    assert caught.value.kind == "timeout"


async def test_a_failed_request_is_never_a_move() -> None:
    scenario = get_scenario("frozen-lake")
    async with FakeServer([GOOD, answer("?"), *[reply(500, {})] * 3]) as server:
        client = Client(server, retries=2)
        agent = LanguageAgent("endpoint", client.model)
        episode = await play_episode(scenario, {"player": agent}, start_seed=3, chance_seed=1, sampling_seed=1)
        await agent.close()
    assert episode.error == "server_error"
    assert [turn.failure for turn in episode.turns] == [None, ParseFailure.NO_TAG]


async def test_an_outage_of_minutes_is_outlasted_and_a_wrong_address_is_not() -> None:
    down = reply(503, "starting")
    async with FakeServer([GOOD, *[down] * 10, GOOD]) as server:
        client = Client(server)
        await client.model.complete(PROMPT, Sampling(), 7)
        assert (await client.ask()).retries == 10
    assert sum(client.waits) > 180
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        client.waits.clear()
        client.model = EndpointModel(f"http://127.0.0.1:{probe.getsockname()[1]}/v1", "m", sleep=client._sleep)
        with pytest.raises(EndpointError, match=r"nothing answers at 127.0.0.1:\d+ \(Connection refused\)") as none:
            await client.ask()
        assert "start its server" in str(none.value.fix)
    assert 0 < sum(client.waits) < 20


def gzipped(size: int) -> Behaviour:
    """A body of so many zeros, packed a thousand times smaller."""
    packer = zlib.compressobj(9, wbits=31)
    zeros = bytes(2**20)
    packed = b"".join(packer.compress(zeros) for _ in range(size // 2**20)) + packer.flush()
    return send(http(200, packed, {"content-encoding": "gzip"}))


async def test_a_body_that_inflates_without_end_is_bounded_and_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """300 MB took 34 s, a gigabyte of memory, and stopped everything else for seconds at a time."""
    turns, pieces = 0, []
    inflated = bounded._inflated

    def seen(inflater: Any, chunk: bytes) -> Iterator[bytes]:
        for piece in inflated(inflater, chunk):
            pieces.append((turns, len(piece)))
            yield piece

    async def beat() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(bounded, "_inflated", seen)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with FakeServer([gzipped(300 * 2**20)]) as server:
        beating = asyncio.create_task(beat())
        with pytest.raises(EndpointError, match="longer than 16 MiB") as caught:
            await Client(server).ask()
        beating.cancel()
    assert (caught.value.kind, len(server.requests)) == ("bad_response", 1)  # asking again helps nobody
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert sum(size for _, size in pieces) > LONGEST_BODY
    assert all(0 < size <= 2**18 for _, size in pieces)
    assert all(one < other for (one, _), (other, _) in itertools.pairwise(pieces))  # the rest had its turns


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_compressed_answer_is_an_answer(encoding: str) -> None:
    text = json.dumps(chat("<action>up</action>")).encode()
    packed = gzip.compress(text) if encoding == "gzip" else zlib.compress(text)
    async with FakeServer([send(http(200, packed, {"content-encoding": encoding}))]) as server:
        assert (await Client(server).ask()).text == "<action>up</action>"


@pytest.mark.parametrize("encoding", ["br", "gzip", "x"])
async def test_a_body_that_cannot_be_inflated_is_a_bad_response(encoding: str) -> None:
    bad = send(http(200, b"no such thing", {"content-encoding": encoding}))
    async with FakeServer([], then=bad) as server:
        with pytest.raises(EndpointError) as caught:
            await Client(server, retries=1).ask()
    assert caught.value.kind == "bad_response"
