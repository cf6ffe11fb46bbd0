"""Every fault of an OpenAI-compatible server, over a real socket. The waits are recorded, not waited."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import math
import resource
import socket
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from msgrpo.agent import Completion, LanguageAgent, ParseFailure, Sampling
from msgrpo.episode import play_episode
from msgrpo.errors import EndpointError, UsageError
from msgrpo.games import get_scenario
from msgrpo.models import bounded
from msgrpo.models.bounded import LONGEST_BODY
from msgrpo.models.endpoint import (
    ALWAYS_READ,
    LONGEST_LINE,
    LONGEST_WAIT_S,
    MOST_A_TOKEN,
    EndpointModel,
    Timeouts,
    action_probabilities,
    key_of,
    retry_after,
)
from msgrpo.prompt import Prompt
from tests.fake_server import Behaviour, FakeServer, answer, chat, hang, http, reply, reset, send, streamed

PROMPT = Prompt("rules ", "state")
GOOD = answer("Go. <action>up</action>")
HTML = send(http(502, b"<html><body><h1>Bad gateway</h1>nginx</body></html>", {"content-type": "text/html"}))


class Client:
    """A model on a fake server, with the waits it asked for."""

    def __init__(self, server: FakeServer, **arguments: Any) -> None:
        self.waits: list[float] = []
        self.model = EndpointModel(server.url, "fake", sleep=self._sleep, **arguments)

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    async def ask(self, **arguments: Any) -> Completion:
        try:
            return await self.model.complete(PROMPT, Sampling(), 7, **arguments)
        finally:
            await self.model.close()


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MSGRPO_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


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


@pytest.mark.parametrize(
    ("environment", "sent"),
    [
        ({}, "none"),
        ({"OPENAI_API_KEY": "a"}, "a"),
        ({"OPENAI_API_KEY": "a", "MSGRPO_API_KEY": "b"}, "b"),
        ({"OPENAI_API_KEY": "a", "MSGRPO_API_KEY_127_0_0_1": "c"}, "c"),  # the host's own
        ({"OPENAI_API_KEY": "a", "MSGRPO_API_KEY_127_0_0_1": ""}, "none"),  # it shall have none
        ({"OPENAI_API_KEY": "a", "MSGRPO_API_KEY_EXAMPLE_COM": "d"}, "a"),  # another's
    ],
)
async def test_the_key_comes_from_the_environment(
    environment: dict[str, str], sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    async with FakeServer([GOOD]) as server:
        await Client(server).ask()
    assert server.requests[0].headers["authorization"] == f"Bearer {sent}"


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("api.example.com", "own"),
        ("API.Example.com:8443", "own"),
        ("api.example.com.", "own"),  # the same host
        ("api-example.com", "general"),  # anybody's
        ("ap\N{LATIN SMALL LETTER DOTLESS I}.example.com", "general"),  # whose capital is an I
        ("api_example.com", "general"),
        ("[::1]:8000", "loopback"),
    ],
)
def test_a_hosts_own_key_is_no_other_hosts(host: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every character but letters and digits became an underscore, so that look-alikes shared a variable."""
    monkeypatch.setenv("OPENAI_API_KEY", "general")
    monkeypatch.setenv("MSGRPO_API_KEY_API_EXAMPLE_COM", "own")
    monkeypatch.setenv("MSGRPO_API_KEY___1", "loopback")
    assert key_of(f"http://{host}/v1") == key


def test_brackets_that_do_not_close_are_no_address() -> None:
    """The key was looked for before the address was looked at: a traceback."""
    with pytest.raises(UsageError, match="is no endpoint"):
        EndpointModel("http://[::1/v1", "m")


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
    ("header", "low", "high"),
    [
        ("7", 7, 7),
        ("0.5", 0.5, 0.5),
        ("0", 0.3, 0.5),
        ("Fri, 01 Jan 2100 00:00:00 GMT", LONGEST_WAIT_S, LONGEST_WAIT_S),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.3, 0.5),
        ("86400", LONGEST_WAIT_S, LONGEST_WAIT_S),
        ("soon", 0.3, 0.5),
        (None, 0.3, 0.5),
    ],
)
async def test_retry_after(header: str | None, low: float, high: float) -> None:
    fault = reply(429, {}, {"retry-after": header} if header else {})
    async with FakeServer([fault, GOOD]) as server:
        client = Client(server)
        await client.ask()
    (wait,) = client.waits
    assert low <= wait <= high


def test_retry_after_reads_a_date_against_the_clock() -> None:
    headers = {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}
    assert retry_after(headers, now=1445412470.0) == pytest.approx(10.0)


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


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (reply(401, {"error": "no"}), "auth", "MSGRPO_API_KEY"),
        (reply(403, {"error": {"message": "denied"}}), "auth", "denied"),
        (reply(404, {"error": {"message": "no such model"}}), "unknown_model", "its models: base, fl"),
        (reply(400, {"message": "The model `x` does not exist"}), "unknown_model", "base, fl"),
        (reply(429, {"error": {"code": "insufficient_quota"}}), "quota", "quota"),
    ],
)
async def test_what_will_not_pass_is_fatal_at_once(fault: Behaviour, kind: str, says: str) -> None:
    models = reply(200, {"object": "list", "data": [{"id": "base"}, {"id": "fl"}]})
    async with FakeServer([fault], then=models) as server:
        client = Client(server)
        with pytest.raises(EndpointError) as caught:
            await client.ask()
    assert (caught.value.kind, caught.value.fatal) == (kind, True)
    assert says in str(caught.value)
    assert client.waits == []


async def test_what_a_server_says_does_not_drive_the_terminal() -> None:
    async with FakeServer([reply(400, {"error": {"message": "no"}} | {"x": "a"}), reply(400, "\x1b[2Jno")]) as server:
        for _ in range(2):
            with pytest.raises(EndpointError) as caught:
                await Client(server).ask()
    assert "no" in caught.value.message
    assert caught.value.message.isprintable()


async def test_an_unknown_path_says_so_without_a_list_of_models() -> None:
    async with FakeServer(then=reply(404, "<h1>Not found</h1>", {"content-type": "text/html"})) as server:
        with pytest.raises(EndpointError, match="ends in /v1"):
            await Client(server).ask()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (
            reply(400, {"error": {"message": "This model's maximum context length is 512 tokens."}}),
            "context_length",
        ),
        (reply(400, {"error": "context_length_exceeded"}), "context_length"),
        (reply(413, ""), "context_length"),
        (reply(400, {"error": {"code": "content_filter"}}), "content_filter"),
        (reply(422, {"detail": [{"msg": "field required"}]}), "bad_request"),
    ],
)
async def test_what_this_request_cannot_pass_ends_the_episode_only(fault: Behaviour, kind: str) -> None:
    async with FakeServer([fault]) as server:
        client = Client(server)
        with pytest.raises(EndpointError) as caught:
            await client.ask()
    assert (caught.value.kind, caught.value.fatal) == (kind, False)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("given", "text", "finish", "reasoning"),
    [
        (answer("think, thi", "length"), "think, thi", "length", None),
        (answer(None, "length", reasoning="hm"), "", "length", "hm"),
        (answer("", "stop", reasoning_content="so"), "", "stop", "so"),
        (answer("<action>up</action>", reasoning="so"), "<action>up</action>", "stop", "so"),
        (answer(None), "", "stop", None),
        (answer("", "content_filter"), "", "content_filter", None),
        (
            reply(200, {"choices": [{"message": None, "finish_reason": "content_filter"}]}),
            "",
            "content_filter",
            None,
        ),
        (answer(None, refusal="I will not play"), "I will not play", "stop", None),
        (answer([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "ab", "stop", None),  # type: ignore[arg-type]
        (answer("x", None, unknown_field={"a": 1}), "x", "stop", None),
    ],
)
async def test_a_bad_answer_is_the_models_and_never_asked_again(
    given: Behaviour, text: str, finish: str, reasoning: str | None
) -> None:
    async with FakeServer([given], then=GOOD) as server:
        got = await Client(server).ask()
    assert (got.text, got.finish_reason, got.reasoning, got.retries) == (text, finish, reasoning, 0)
    assert len(server.requests) == 1


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None}, "many"])
async def test_missing_usage_counts_no_tokens(usage: Any) -> None:
    async with FakeServer([reply(200, chat("x") | {"usage": usage})]) as server:
        got = await Client(server).ask()
    assert (got.prompt_tokens, got.completion_tokens) == (0, 0)


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


@pytest.mark.parametrize("on_text", [None, lambda text: None], ids=["whole", "streamed"])
async def test_a_web_page_is_no_answer_and_is_not_asked_again(on_text: Any) -> None:
    page = reply(200, "<!doctype html><title>login</title>", {"content-type": "text/html; charset=utf-8"})
    async with FakeServer([], then=page) as server:
        with pytest.raises(EndpointError, match="a web page: this address has no such API") as caught:
            await Client(server).ask(on_text=on_text)
    assert (caught.value.kind, caught.value.fatal, len(server.requests)) == ("bad_address", True, 1)


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


def token(text: str, **alternatives: float) -> dict[str, Any]:
    listed = [{"token": t, "logprob": math.log(p)} for t, p in (alternatives or {text: 1.0}).items()]
    return {"token": text, "logprob": listed[0]["logprob"], "top_logprobs": listed}


def test_action_probabilities_by_hand() -> None:
    tokens = [token("<action"), token(">"), token("up", up=0.5, down=0.2, Le=0.2, zebra=0.1), token("</action>")]
    found = action_probabilities(tokens, ("up", "down", "left", "right"))
    assert found is not None
    assert found == pytest.approx({"up": 5 / 9, "down": 2 / 9, "left": 2 / 9, "right": 0.0})


def test_action_probabilities_where_the_tag_ends_inside_a_token() -> None:
    merged = token(">up", **{">up": 0.75, ">left": 0.25, "up": 0.9})
    found = action_probabilities([token("<action"), merged, token("</action>")], ("up", "left"))
    assert found == pytest.approx({"up": 0.75, "left": 0.25})


@pytest.mark.parametrize("tokens", [[], [token("up")], [token("<action>")], [{"token": "<action>"}, {"token": "up"}]])
def test_action_probabilities_where_there_are_none(tokens: list[dict[str, Any]]) -> None:
    assert action_probabilities(tokens, ("up", "down")) is None


async def test_probabilities_come_with_the_answer_or_not_at_all() -> None:
    body = chat("<action>up</action>")
    said = [token("<action>"), token("up", up=0.6, down=0.4), token("</action>")]
    body["choices"][0]["logprobs"] = {"content": said}
    refused = reply(400, {"error": {"message": "logprobs are not supported by this model"}})
    async with FakeServer([reply(200, body), refused, GOOD, GOOD]) as server:
        client = Client(server)
        asked = [await client.model.complete(PROMPT, Sampling(), 1, actions=("up", "down")) for _ in range(3)]
        await client.model.close()
    assert asked[0].action_probabilities == pytest.approx({"up": 0.6, "down": 0.4})
    assert asked[1].action_probabilities is None
    assert ["logprobs" in r.body for r in server.requests] == [True, True, False, False]


async def test_a_failed_request_is_never_a_move() -> None:
    scenario = get_scenario("frozen-lake")
    async with FakeServer([GOOD, answer("?"), *[reply(500, {})] * 3]) as server:
        client = Client(server, retries=2)
        agent = LanguageAgent("endpoint", client.model)
        episode = await play_episode(scenario, {"player": agent}, start_seed=3, chance_seed=1, sampling_seed=1)
        await agent.close()
    assert episode.error == "server_error"
    assert [turn.failure for turn in episode.turns] == [None, ParseFailure.NO_TAG]


async def test_settings_hold_the_extra_body() -> None:
    agent = LanguageAgent("e", EndpointModel("http://h/v1", "m", body={"min_p": 0.1}))
    assert agent.settings()["body"] == {"min_p": 0.1}
    await agent.close()


def test_no_url_no_endpoint() -> None:
    with pytest.raises(UsageError, match="no endpoint"):
        EndpointModel("localhost:8000", "m")


@pytest.mark.parametrize(
    ("message", "text", "reasoning"),
    [
        ({"content": "a", "reasoning": ["x"]}, "a", None),
        ({"content": "", "refusal": {"a": 1}}, "", None),
        ({"content": "a \ud800 b", "reasoning_content": "\ud800"}, "a ? b", "?"),
    ],
)
async def test_odd_messages_are_answers_that_a_record_can_hold(
    message: dict[str, Any], text: str, reasoning: str | None
) -> None:
    async with FakeServer([reply(200, {"choices": [{"message": message, "finish_reason": "stop"}]})]) as server:
        got = await Client(server).ask()
    assert (got.text, got.reasoning) == (text, reasoning)
    got.text.encode()


@pytest.mark.parametrize("url", ["http://#", "http://", "http://[::1/v1", "http://h:99999/v1", "ftp://h/v1", "h/v1"])
def test_an_address_that_is_none_is_refused_before_the_first_request(url: str) -> None:
    with pytest.raises(UsageError, match="no endpoint"):
        EndpointModel(url, "m")


@pytest.mark.parametrize(
    ("name", "value"),
    [("X", "\u00e9"), ("X", "a "), ("", "a"), ("a b", "a"), ("a:b", "a"), ("\u00e9", "a"), ("Content-Length", "5")],
)
def test_headers_that_cannot_be_sent_are_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        EndpointModel("http://h/v1", "m", headers={name: value})


def test_a_key_that_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSGRPO_API_KEY", "k\n")
    with pytest.raises(UsageError, match="the header 'Authorization'"):
        EndpointModel("http://h/v1", "m")


# ── what only a second look found ──


@pytest.mark.parametrize(
    "usage",
    [
        "100 tokens",
        [1, 2],
        {"prompt_tokens": "x", "completion_tokens": None},
        {"prompt_tokens": -5, "completion_tokens": True - 2},
        {"prompt_tokens": 2**53 + 1, "completion_tokens": 10**400},
        {"prompt_tokens": 0.5, "completion_tokens": [7]},
    ],
)
async def test_odd_token_counts_are_missing_and_the_answer_stays(usage: Any) -> None:
    async with FakeServer([reply(200, chat("Go. <action>up</action>") | {"usage": usage})]) as server:
        got = await Client(server).ask()
    assert (got.text, got.retries) == ("Go. <action>up</action>", 0)
    assert (got.prompt_tokens, got.completion_tokens) == (0, 0)


@pytest.mark.parametrize("count", [b"NaN", b"Infinity", b"1e400", b"-1e400"])
async def test_token_counts_that_json_does_not_know_are_missing(count: bytes) -> None:
    body = b'{"choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":' + count + b"}}"
    async with FakeServer([send(http(200, body))]) as server:
        got = await Client(server).ask()
    assert (got.text, got.prompt_tokens, got.retries) == ("a", 0, 0)


@pytest.mark.parametrize(
    "alternatives",
    [[{"token": "up", "logprob": "x"}], [{"token": "up", "logprob": 1e10}], ["up"], 7],
)
async def test_alternatives_that_cannot_be_read_are_left_out(alternatives: Any) -> None:
    body = chat("<action>up</action>")
    tokens = [{"token": "<action>"}, {"token": "up", "top_logprobs": alternatives}, {"token": "</action>"}]
    body["choices"][0]["logprobs"] = {"content": tokens}
    async with FakeServer([reply(200, body)]) as server:
        got = await Client(server).ask(actions=("up", "down"))
    assert (got.text, got.action_probabilities, got.retries) == ("<action>up</action>", None, 0)


@pytest.mark.parametrize("charset", ["hex", "zlib", "rot13", "undefined", "base64", "no-such-charset", "utf-16"])
@pytest.mark.parametrize("status", [200, 400])
async def test_no_charset_of_a_server_is_a_traceback(charset: str, status: int) -> None:
    body = json.dumps(chat("Gö. <action>up</action>"), ensure_ascii=False).encode()
    fault = send(http(status, body, {"content-type": f"application/json; charset={charset}"}))
    async with FakeServer([fault]) as server:
        if status == 200:
            assert (await Client(server).ask()).text == "Gö. <action>up</action>"
        else:
            with pytest.raises(EndpointError, match="status 400"):
                await Client(server).ask()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("stream", [False, True])
async def test_no_redirect_is_followed(status: int, stream: bool) -> None:
    """A 307 would take prompt and headers to another host; after a 302 an empty GET would answer for the model."""
    async with FakeServer() as other:
        target = f"{other.url}/chat/completions"
        async with FakeServer([reply(status, "", {"location": target})]) as server:
            with pytest.raises(EndpointError) as caught:
                await Client(server).ask(**({"on_text": lambda text: None} if stream else {}))
        assert other.requests == []
    assert caught.value.fatal
    assert caught.value.kind == "bad_address"
    assert target in caught.value.message


@pytest.mark.parametrize("status", [405, 410])
async def test_an_address_that_takes_no_chat_ends_the_run_at_once(status: int) -> None:
    async with FakeServer([reply(status, "no")]) as server:
        with pytest.raises(EndpointError) as caught:
            await Client(server).ask()
    assert (caught.value.kind, caught.value.fatal) == ("bad_address", True)


async def test_a_403_that_speaks_of_a_rate_limit_is_waited_out() -> None:
    page = send(http(403, b"<html>You are being rate limited</html>", {"content-type": "text/html"}))
    async with FakeServer([page, GOOD]) as server:
        assert (await Client(server).ask()).retries == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "api.openai.com"])
async def test_only_openai_gets_openais_headers(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-secret")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-secret")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-admin-secret")
    async with FakeServer([GOOD]) as server:
        sent = EndpointModel(server.url.replace("127.0.0.1", host), "fake").headers
        names = {sent.get("openai-organization"), sent.get("openai-project")}
        assert names == ({None} if host == "127.0.0.1" else {"org-secret", "proj-secret"})
        if host == "127.0.0.1":
            await Client(server).ask()
            assert "secret" not in str(server.requests[0].headers)


async def test_a_query_in_the_url_goes_with_every_request() -> None:
    async with FakeServer([GOOD]) as server:
        model = EndpointModel(server.url.removesuffix("/v1") + "/openai/deployments/d?api-version=2024-10-21", "fake")
        await model.complete(PROMPT, Sampling(), 7)
        await model.close()
    assert server.requests[0].path == "/openai/deployments/d/chat/completions?api-version=2024-10-21"


def test_a_password_in_the_url_is_refused_without_being_repeated() -> None:
    with pytest.raises(UsageError, match="user or a password") as caught:
        EndpointModel("http://me:hunter2@host:8000/v1", "m")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["messages", "model", "stream", "n", "prompt"])
def test_the_body_cannot_change_what_is_asked(name: str) -> None:
    with pytest.raises(UsageError, match=f"may not set {name}"):
        EndpointModel("http://host/v1", "m", body={name: []})


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


async def test_a_count_of_thousands_of_digits_throws_no_answer_away() -> None:
    body = b'{"choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":' + b"1" * 6000 + b"}}"
    async with FakeServer([send(http(200, body))]) as server:
        got = await Client(server).ask()
    assert (got.text, got.prompt_tokens, got.retries) == ("a", 0, 0)


def test_probabilities_are_those_of_the_action_that_the_parser_reads() -> None:
    """Not of a tag that is never closed, nor of one inside of reasoning."""
    tokens = [
        {"token": "<ACTION>"}, {"token": "up", "top_logprobs": [{"token": "up", "logprob": 0.0}]},
        {"token": "</ACTION> then "}, {"token": "<action>"},
        {"token": "left", "top_logprobs": [{"token": "left", "logprob": 0.0}]},
    ]  # fmt: skip
    assert action_probabilities(tokens, ("up", "left")) == {"up": 1.0, "left": 0.0}


@pytest.mark.parametrize("url", ["http://me:SECRET@host:99999/v1", "http://me:SECRET@/v1", "//me:SECRET@h"])
def test_no_message_repeats_a_password(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        EndpointModel(url, "m")
    assert "SECRET" not in str(caught.value)


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


@pytest.mark.parametrize("piece", ["null", "[1]", "7", '"text"', "{" + '"n":' + "9" * 5000 + "}"])
async def test_what_stands_for_a_chunk_in_a_stream_is_a_bad_response(piece: str) -> None:
    """`null` and `[1]` crashed the client, and 5,000 digits were called a connection that failed."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    raw = send(head + f"data: {piece}\n\ndata: [DONE]\n\n".encode(), close=True)
    async with FakeServer([], then=raw) as server:
        with pytest.raises(EndpointError) as caught:
            await Client(server, retries=1).ask(on_text=lambda text: None)
    assert caught.value.kind == "bad_response"


async def test_a_long_error_body_of_open_tags_is_looked_at_in_part() -> None:
    """160 KB of `<` stopped the event loop for 14 s, at each of 11 tries."""
    async with FakeServer([], then=reply(500, "<" * 1_000_000)) as server:
        began = time.process_time()
        with pytest.raises(EndpointError):
            await Client(server).ask()
    assert time.process_time() - began < 10


async def test_a_stream_of_many_pieces_is_told_now_and_then() -> None:
    """Telling all of the text after each piece is quadratic: 60,000 pieces took 40 s."""
    told: list[str] = []
    pieces = [{"choices": [{"delta": {"content": "abcd"}}]}] * 5000 + [{"choices": [{"finish_reason": "stop"}]}]
    async with FakeServer([streamed(*pieces)]) as server:
        got = await Client(server).ask(on_text=told.append)
    assert got.text == "abcd" * 5000 == told[-1]
    assert all(after.startswith(before) for before, after in itertools.pairwise(told))
    assert len(told) < 1000


@pytest.mark.parametrize("field", ["model", "system_fingerprint"])
async def test_no_escape_code_reaches_the_record(field: str) -> None:
    async with FakeServer([reply(200, chat("<action>up</action>") | {field: "x\x1b[2J"})]) as server:
        got = await Client(server).ask()
    assert "\x1b" not in str(got.model)
    for body in ({"error": {"message": "x\x1b[2J", "code": "\x1b"}}, "x\x1b[2J"):
        async with FakeServer([], then=reply(400, body)) as server:
            with pytest.raises(EndpointError) as caught:
                await Client(server).ask()
        assert "\x1b" not in caught.value.message
        assert "u001b" not in caught.value.message


@pytest.mark.parametrize(
    "body", [{"api_key": "s"}, {"extra": {"Authorization": "s"}}, {"a": [{"access_token": "s"}]}]
)
def test_a_key_in_the_body_would_stand_in_every_record(body: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="would stand in every record"):
        EndpointModel("http://127.0.0.1:1/v1", "m", body=body)
    EndpointModel("http://127.0.0.1:1/v1", "m", body={"max_tokens": 3, "stop_token_ids": [1], "logit_bias": {"1": 2}})
