"""An answer in every shape that servers send is the model's; what of it cannot be read is missing."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from msgrpo.agent import Sampling
from msgrpo.errors import EndpointError
from msgrpo.models.endpoint_answers import action_probabilities
from tests.endpoint_helpers import GOOD, PROMPT, Client
from tests.fake_server import Behaviour, FakeServer, answer, chat, http, reply, send

pytestmark = pytest.mark.usefixtures("no_keys")


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
