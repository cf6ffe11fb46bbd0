"""What a person gives to reach a server: its key, its address, headers and fields of the body."""

from __future__ import annotations

import math
from typing import Any

import pytest

from msgrpo.agent import LanguageAgent, Sampling
from msgrpo.errors import UsageError
from msgrpo.models.endpoint import EndpointModel
from msgrpo.models.endpoint_settings import key_of
from msgrpo.specs import make_agent
from tests.endpoint_helpers import GOOD, PROMPT, Client
from tests.fake_server import FakeServer

pytestmark = pytest.mark.usefixtures("no_keys")


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


async def test_settings_hold_the_extra_body() -> None:
    agent = LanguageAgent("e", EndpointModel("http://h/v1", "m", body={"min_p": 0.1}))
    assert agent.settings()["body"] == {"min_p": 0.1}
    await agent.close()


def test_no_url_no_endpoint() -> None:
    with pytest.raises(UsageError, match="no endpoint"):
        EndpointModel("localhost:8000", "m")


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


@pytest.mark.parametrize("url", ["http://me:SECRET@host:99999/v1", "http://me:SECRET@/v1", "//me:SECRET@h"])
def test_no_message_repeats_a_password(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        EndpointModel(url, "m")
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "body", [{"api_key": "s"}, {"extra": {"Authorization": "s"}}, {"a": [{"access_token": "s"}]}]
)
def test_a_key_in_the_body_would_stand_in_every_record(body: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="would stand in every record"):
        EndpointModel("http://127.0.0.1:1/v1", "m", body=body)
    EndpointModel("http://127.0.0.1:1/v1", "m", body={"max_tokens": 3, "stop_token_ids": [1], "logit_bias": {"1": 2}})


@pytest.mark.parametrize("rate", [math.nan, math.inf, 0.0, -1.0])
def test_a_rate_that_limits_nothing_is_refused(rate: float) -> None:
    """From Python NaN passed, and every request went out at once."""
    with pytest.raises(UsageError, match="no number of requests a minute"):
        EndpointModel("http://127.0.0.1:9/v1", "m", rate=rate)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"body": [1]}, r"the body is \[1\], not a dict"),
        ({"body": {"stop": {1}}}, "cannot be sent as JSON.*set is not JSON"),
        ({"body": {"seed": math.nan}}, "cannot be sent as JSON"),
        ({"headers": ["x-a"]}, r"the header is \['x-a'\], not a dict"),
        ({"headers": {"x-a": 5}}, "the header 'x-a' cannot be sent"),
        ({"retries": "3"}, "'3' is no number of further tries"),
        ({"retries": math.nan}, "nan is no number of further tries"),
        ({"rate": "60"}, "'60' is no number of requests a minute"),
        ({"timeouts": 5}, "timeouts is 5"),
        ({"url": 5}, "the address 5"),
        ({"model_name": None}, "the model None"),
    ],
)
def test_what_no_request_can_hold_is_named_at_once(given: dict[str, Any], said: str) -> None:
    """These were errors of Python's own, some of them only after the first failure of a server; of NaN tries there
    was no end."""
    with pytest.raises(UsageError, match=said):
        EndpointModel(**{"url": "http://127.0.0.1:9/v1", "model_name": "m"} | given)


def test_a_body_of_nothing_takes_the_chat_templates_arguments() -> None:
    agent: Any = make_agent("endpoint:http://h/v1#m", endpoint={"body": None}, chat={"enable_thinking": False})
    assert agent.model.body == {"chat_template_kwargs": {"enable_thinking": False}}
