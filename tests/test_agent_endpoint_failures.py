"""Which failure a server's response is, what is said of it, and that the fatal ones end a run at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from msgrpo.errors import EndpointError
from msgrpo.models.endpoint import LONGEST_WAIT_S
from msgrpo.models.endpoint_failures import retry_after
from tests.endpoint_helpers import GOOD, Client
from tests.fake_server import Behaviour, FakeServer, chat, http, reply, send

pytestmark = pytest.mark.usefixtures("no_keys")


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


async def test_a_model_that_the_server_lists_is_not_said_to_be_missing() -> None:
    """A URL without /v1 was answered by the name of the very model that had been asked for."""
    models = reply(200, {"object": "list", "data": [{"id": "fake"}]})
    async with FakeServer([reply(404, {})], then=models) as server:
        with pytest.raises(EndpointError, match="it lists this model: check the URL"):
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


@pytest.mark.parametrize("on_text", [None, lambda text: None], ids=["whole", "streamed"])
async def test_a_web_page_is_no_answer_and_is_not_asked_again(on_text: Any) -> None:
    page = reply(200, "<!doctype html><title>login</title>", {"content-type": "text/html; charset=utf-8"})
    async with FakeServer([], then=page) as server:
        with pytest.raises(EndpointError, match="a web page: this address has no such API") as caught:
            await Client(server).ask(on_text=on_text)
    assert (caught.value.kind, caught.value.fatal, len(server.requests)) == ("bad_address", True, 1)


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


async def test_a_long_error_body_of_open_tags_is_looked_at_in_part() -> None:
    """160 KB of `<` stopped the event loop for 14 s, at each of 11 tries."""
    async with FakeServer([], then=reply(500, "<" * 1_000_000)) as server:
        began = time.process_time()
        with pytest.raises(EndpointError):
            await Client(server).ask()
    assert time.process_time() - began < 10


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
