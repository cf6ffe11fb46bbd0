"""Answers that a server streams: whole, broken, endless and odd."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from msgrpo.errors import EndpointError
from msgrpo.models.endpoint import ALWAYS_READ, MOST_A_TOKEN
from msgrpo.models.endpoint_stream import LONGEST_LINE
from tests.endpoint_helpers import Client
from tests.fake_server import Behaviour, FakeServer, answer, chat, reply, send, streamed

pytestmark = pytest.mark.usefixtures("no_keys")


def piece(text: str | None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish}]}


USAGE = {"id": "x", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}


async def test_streaming_gives_the_text_so_far() -> None:
    seen: list[str] = []
    async with FakeServer(
        [streamed(piece(None, reasoning="hm"), piece("Go "), piece("up", "stop"), USAGE)]
    ) as server:
        got = await Client(server).ask(on_text=seen.append)
    assert seen == ["Go ", "Go up"]
    assert (got.text, got.reasoning, got.prompt_tokens, got.finish_reason) == ("Go up", "hm", 5, "stop")
    assert server.requests[0].body["stream"] is True


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream", "text/plain"])
async def test_a_server_that_does_not_stream_is_understood(content_type: str) -> None:
    """Its answer was called a stream that ended too soon, ten times over: in the app such a server never played."""
    async with FakeServer([reply(200, chat("Go up"), {"content-type": content_type})]) as server:
        got = await Client(server).ask(on_text=lambda text: None)
    assert (got.text, got.retries, got.prompt_tokens) == ("Go up", 0, 100)


@pytest.mark.parametrize(
    "broken",
    [
        streamed(piece("Go "), done=False),
        streamed({"error": {"message": "worker died"}}),
        send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {brok\n\n", close=True),
    ],
    ids=["ends early", "error event", "broken JSON"],
)
async def test_a_broken_stream_is_asked_again(broken: Behaviour) -> None:
    async with FakeServer([broken, streamed(piece("up", "stop"))]) as server:
        got = await Client(server).ask(on_text=lambda text: None)
    assert (got.text, got.retries) == ("up", 1)


async def test_a_stream_that_is_done_without_a_reason_is_called_that_and_not_asked_again() -> None:
    async with FakeServer([], then=streamed(piece("Go up"))) as server:
        with pytest.raises(EndpointError, match=r"ended with \[DONE\] and gave no finish_reason") as caught:
            await Client(server).ask(on_text=lambda text: None)
    assert (caught.value.kind, len(server.requests)) == ("bad_response", 1)


LONG = "a" * (ALWAYS_READ // 4)


@pytest.mark.parametrize(
    ("sent", "on_text"),
    [
        (streamed(*[piece(LONG)] * 6, piece("", "stop")), lambda text: None),
        (streamed(*[piece(None, reasoning=LONG)] * 6, piece("", "stop")), lambda text: None),
        (answer(LONG * 6), None),
    ],
    ids=["streamed", "reasoning", "whole"],
)
async def test_an_answer_far_beyond_max_tokens_is_a_named_error(sent: Behaviour, on_text: Any) -> None:
    async with FakeServer([], then=sent) as server:
        with pytest.raises(EndpointError, match="characters already, and 256 tokens were asked for") as caught:
            await Client(server).ask(on_text=on_text)
    assert (caught.value.kind, len(server.requests)) == ("bad_response", 1)


async def test_an_answer_may_be_as_long_as_its_tokens() -> None:
    tokens = 6 * len(LONG) // MOST_A_TOKEN
    async with FakeServer([streamed(*[piece(LONG)] * 6, piece("", "stop"))]) as server:
        got = await Client(server, body={"max_tokens": tokens}).ask(on_text=lambda text: None)
    assert len(got.text) == 6 * len(LONG)


async def test_a_line_without_end_is_a_named_error() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\ndata: "
    async with FakeServer([], then=send(head + b"a" * (LONGEST_LINE + 1), close=True)) as server:
        with pytest.raises(EndpointError, match="a line of the stream has more than 1 MiB") as caught:
            await Client(server).ask(on_text=lambda text: None)
    assert (caught.value.kind, len(server.requests)) == ("bad_response", 1)


@pytest.mark.parametrize(
    "odd",
    [
        {"logprobs": "odd"}, {"logprobs": {"content": "odd"}}, {"delta": "odd"}, {"delta": None},
        {"delta": {"content": ["a", {"text": "b"}]}}, {"error": None},
    ],
)  # fmt: skip
async def test_odd_pieces_of_a_stream_are_no_crash(odd: dict[str, Any]) -> None:
    events = [piece("Go. "), {"choices": [{"index": 0, "delta": {}, "finish_reason": None} | odd, "odd", 7]}]
    async with FakeServer([streamed({"choices": "odd"}, *events, piece("<action>up</action>", "stop"))]) as server:
        got = await Client(server).ask(on_text=lambda text: None, actions=("up", "down"))
    assert got.text.startswith("Go. ")
    assert got.text.endswith("<action>up</action>")


@pytest.mark.parametrize("piece", ["null", "[1]", "7", '"text"', "{" + '"n":' + "9" * 5000 + "}"])
async def test_what_stands_for_a_chunk_in_a_stream_is_a_bad_response(piece: str) -> None:
    """`null` and `[1]` crashed the client, and 5,000 digits were called a connection that failed."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    raw = send(head + f"data: {piece}\n\ndata: [DONE]\n\n".encode(), close=True)
    async with FakeServer([], then=raw) as server:
        with pytest.raises(EndpointError) as caught:
            await Client(server, retries=1).ask(on_text=lambda text: None)
    assert caught.value.kind == "bad_response"


async def test_a_stream_of_many_pieces_is_told_now_and_then() -> None:
    """Telling all of the text after each piece is quadratic: 60,000 pieces took 40 s."""
    told: list[str] = []
    pieces = [{"choices": [{"delta": {"content": "abcd"}}]}] * 5000 + [{"choices": [{"finish_reason": "stop"}]}]
    async with FakeServer([streamed(*pieces)]) as server:
        got = await Client(server).ask(on_text=told.append)
    assert got.text == "abcd" * 5000 == told[-1]
    assert all(after.startswith(before) for before, after in itertools.pairwise(told))
    assert len(told) < 1000
