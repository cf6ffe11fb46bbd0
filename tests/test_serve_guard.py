"""The middleware inside vLLM: the key on every route, and adapters from one folder only."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from msgrpo.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from msgrpo.models.paths import NANO_DIR
from msgrpo.serve.adapters import read_adapter
from msgrpo.serve.guard import Guard
from tests.serve_fakes import nano_lora_shapes, write_adapter, write_safetensors

LOAD = "/v1/load_lora_adapter"


class Inside:
    """What the guard protects: it notes the bodies that reach it, and the last headers, and answers `status`."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.status = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            self.bodies.append(b"lifespan")
            return
        self.headers = list(scope["headers"])
        self.bodies.append((await receive()).get("body", b""))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


async def ask(
    guard: Guard, path: str, *, key: str | None = None, body: bytes = b"", method: str = "POST", kind: str = "http"
) -> tuple[int, Any]:
    """(status, answer); a closed websocket is its close code."""
    headers = [(b"content-length", str(len(body)).encode())]
    if key is not None:
        headers.append((b"authorization", key.encode()))
    sent: list[Any] = []
    parts = [body[:5], body[5:]]

    async def receive() -> dict[str, Any]:
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "method": method, "headers": headers, "query_string": b""}
    await guard(scope, receive, send)
    if kind == "websocket":
        return sent[0]["code"], sent[0]["type"]
    text = sent[1]["body"]
    if text in (b"", b"ok"):
        return sent[0]["status"], text
    found = json.loads(text)
    return sent[0]["status"], found["error"]["message"] if "error" in found else found


@pytest.fixture
def inside() -> Inside:
    return Inside()


@pytest.fixture
def keyed(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Guard:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    monkeypatch.delenv("MSGRPO_ADAPTER_ROOT", raising=False)
    return Guard(inside)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters"
    folder.mkdir()
    return folder


@pytest.fixture
def loading(inside: Inside, root: Path, monkeypatch: pytest.MonkeyPatch) -> Guard:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("MSGRPO_ADAPTER_ROOT", str(root))
    monkeypatch.setenv("MSGRPO_SERVED_BASE", "nano")
    monkeypatch.setenv("MSGRPO_SERVED_WEIGHTS", str(NANO_DIR))
    return Guard(inside)


def load(path: Path | str, **more: Any) -> bytes:
    return json.dumps({"lora_name": "new", "lora_path": str(path)} | more).encode()


@pytest.mark.parametrize("path", ["/v1/models", "/invocations", "/tokenize", "/metrics", "/docs", "/", "/health/x"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
async def test_nothing_answers_without_the_key(keyed: Guard, inside: Inside, path: str, method: str) -> None:
    for key in (None, "", "s3cret", "Bearer", "Bearer ", "Bearer wrong", "Bearer s3cret2", "Basic s3cret"):
        status, _ = await ask(keyed, path, key=key, method=method)
        assert status == 401
    assert inside.bodies == []


async def test_the_key_opens_everything_and_health_is_open(keyed: Guard) -> None:
    for path in ("/v1/models", "/v1/chat/completions", "/metrics"):
        assert (await ask(keyed, path, key="Bearer s3cret"))[0] == 200
        assert (await ask(keyed, path, key="bearer s3cret"))[0] == 200
    assert (await ask(keyed, "/health"))[0] == 200


async def test_websockets_need_the_key_too(keyed: Guard, inside: Inside) -> None:
    assert await ask(keyed, "/v1/realtime", kind="websocket") == (1008, "websocket.close")
    assert inside.bodies == []


async def test_the_servers_own_events_pass(keyed: Guard, inside: Inside) -> None:
    await keyed({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert inside.bodies == [b"lifespan"]


async def test_without_a_key_nothing_is_asked_but_loading_is_off(
    keyed: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "")
    guard = Guard(keyed.app)
    assert (await ask(guard, "/v1/models"))[0] == 200
    for path in (LOAD, "/v1/unload_lora_adapter"):
        assert (await ask(guard, path, body=load("/x")))[0] == 403
    for path in (LOAD + "/", "/prefix" + LOAD, "/adapters", "/adapters/fl", LOAD + "\n", "/adapters\n"):
        assert (await ask(guard, path, body=load("/x")))[0] == 404


def real_router(reached: list[str]) -> Any:
    """Routes of vLLM's names on FastAPI's own router, which is what vLLM uses; each notes that it was reached."""
    fastapi = pytest.importorskip("fastapi")
    app = fastapi.FastAPI()

    def route(name: str) -> Any:
        async def handler(request: Any) -> Any:
            reached.append(name)
            return {}

        handler.__annotations__ = {"request": fastapi.Request}
        return handler

    for path in (LOAD, "/v1/unload_lora_adapter", "/adapters", "/adapters/{name}", "/invocations", "/v1/models"):
        app.add_api_route(path, route(path), methods=["GET", "POST", "DELETE"])
    return app


SPELLINGS = st.lists(
    st.sampled_from(
        [LOAD, "/adapters", "/invocations", "/v1", "/load_lora_adapter", "/LOAD_LORA_ADAPTER", "/", "//", "/.", "/..",
         "\n", "\r", "\t", "\x00", " ", "%0A", "%2F", "%2e", "?", "#", ";", "\\", "\u2028", "\x85", "\x1c", "é", "x"]
    ),
    max_size=5,
).map("".join)  # fmt: skip


@given(SPELLINGS, st.sampled_from(["GET", "POST", "DELETE"]))
@example(LOAD + "\n", "POST")
@example("/adapters\n", "POST")
def test_no_spelling_of_a_path_passes_the_guard_and_loads_what_it_has_not_checked(path: str, method: str) -> None:
    """Property: whatever the router makes of a path, a load that was not checked reaches no handler."""
    reached: list[str] = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "")
        patch.setenv("MSGRPO_ADAPTER_ROOT", folder)
        patch.setenv("MSGRPO_SERVED_BASE", "nano")
        patch.setenv("MSGRPO_SERVED_WEIGHTS", str(NANO_DIR))
        guard = Guard(real_router(reached))
        asyncio.run(ask(guard, path, body=load("/etc"), method=method))
    assert not [name for name in reached if name not in ("/v1/models", "/v1/unload_lora_adapter")]


def test_the_router_does_match_before_a_newline() -> None:
    """The wrong variant: without the guard, the odd spelling reaches the loading route."""
    reached: list[str] = []
    asyncio.run(ask(real_router(reached), LOAD + "\n", body=load("/etc")))
    assert reached == [LOAD]


async def test_a_client_that_leaves_during_a_load_is_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "")
    monkeypatch.setenv("MSGRPO_ADAPTER_ROOT", str(root))
    monkeypatch.setenv("MSGRPO_SERVED_BASE", "nano")
    monkeypatch.setenv("MSGRPO_SERVED_WEIGHTS", str(NANO_DIR))
    write_adapter(root / "v1")
    seen: list[str] = []

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([(await receive())["type"] for _ in range(2)])

    messages = [{"type": "http.request", "body": load("v1")}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    scope = {"type": "http", "path": LOAD, "method": "POST", "headers": []}
    await Guard(inside)(scope, receive, None)  # type: ignore[arg-type]
    assert seen == ["http.request", "http.disconnect"]


async def test_checking_a_folder_does_not_hold_up_other_requests(
    loading: Guard, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(root / "v1")
    slow, released = threading.Event(), threading.Event()

    def waiting(folder: Path, name: str) -> Any:
        slow.set()
        assert released.wait(60)
        return read_adapter(folder, name)

    monkeypatch.setattr("msgrpo.serve.guard.read_adapter", waiting)
    asked = asyncio.create_task(ask(loading, LOAD, body=load("v1")))
    assert await asyncio.to_thread(slow.wait, 60)
    assert (await ask(loading, "/v1/models"))[0] == 200
    released.set()
    assert (await asked)[0] == 200


@pytest.mark.parametrize(
    "more", [{"is_3d_lora_weight": True}, {"lora_name": ""}, {"lora_name": 7}, {"lora_name": "a\x1b]0;x"}]
)
async def test_only_known_fields_reach_the_loader(
    loading: Guard, inside: Inside, root: Path, more: dict[str, Any]
) -> None:
    write_adapter(root / "v1")
    assert (await ask(loading, LOAD, body=load("v1", **more)))[0] == 400
    assert inside.bodies == []


async def test_an_adapter_below_the_folder_is_loaded_by_its_real_path(
    loading: Guard, inside: Inside, root: Path
) -> None:
    write_adapter(root / "v1")
    (root / "latest").symlink_to(root / "v1")
    assert (await ask(loading, LOAD, body=load(root / "v1")))[0] == 200
    assert (await ask(loading, LOAD, body=load("latest")))[0] == 200
    assert [json.loads(body)["lora_path"] for body in inside.bodies] == [str(root / "v1")] * 2


async def test_no_way_leads_out_of_the_folder(loading: Guard, inside: Inside, root: Path, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    (root / "chain").symlink_to(root / "link")
    for path in ("../outside", str(outside), str(root / ".." / "outside"), "link", "chain", str(root) + "-other"):
        status, message = await ask(loading, LOAD, body=load(path))
        assert (status, message) == (403, "that folder is not below the one that adapters may be loaded from")
    for file in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        inner = write_adapter(root / f"inner-{file}")
        (inner / file).unlink()
        (inner / file).symlink_to(outside / file)
        assert (await ask(loading, LOAD, body=load(inner)))[0] == 403
    assert inside.bodies == []


async def test_what_cannot_be_served_is_refused(loading: Guard, inside: Inside, root: Path) -> None:
    write_adapter(root / "qwen", base_model_name_or_path="Qwen/Qwen2.5-3B-Instruct")
    write_adapter(root / "dora", use_dora=True)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    write_adapter(root / "shape", shapes={f"{name}.lora_A.weight": (8, 64), f"{name}.lora_B.weight": (64, 8)})
    for folder, reason in (
        ("qwen", "trained on Qwen"),
        ("dora", "DoRA"),
        ("shape", "128x128"),
        ("none", "no adapter"),
    ):
        status, message = await ask(loading, LOAD, body=load(folder))
        assert status == 400
        assert reason in message
    assert inside.bodies == []


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 5000, "circle"])
async def test_a_name_that_no_folder_can_have_is_refused(
    loading: Guard, inside: Inside, root: Path, path: str
) -> None:
    (root / "circle").symlink_to(root / "circle")
    assert (await ask(loading, LOAD, body=load(path)))[0] == 400
    assert inside.bodies == []


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[]", b'{"lora_name": "x"}', b'{"lora_name":"x","lora_path":3}', b"[" * 60_000]
)
async def test_a_body_that_is_no_load_request_is_refused(loading: Guard, body: bytes) -> None:
    assert (await ask(loading, LOAD, body=body))[0] == 400


async def test_a_very_long_body_is_refused(loading: Guard) -> None:
    assert (await ask(loading, LOAD, body=b" " * 70_000))[0] == 413


async def test_new_weights_need_a_new_folder(loading: Guard, inside: Inside, root: Path) -> None:
    folder = write_adapter(root / "v1", rank=8)
    assert (await ask(loading, LOAD, body=load("v1")))[0] == 200
    assert (await ask(loading, LOAD, body=load("v1", load_inplace=True)))[0] == 400
    write_safetensors(folder / ADAPTER_WEIGHTS, nano_lora_shapes(4))
    status, message = await ask(loading, LOAD, body=load("v1"))
    assert status == 409
    assert "write each version to a new folder" in message
    assert len(inside.bodies) == 1


async def test_a_changed_config_is_a_new_version_too(loading: Guard, root: Path) -> None:
    write_adapter(root / "v1", lora_alpha=8)
    assert (await ask(loading, LOAD, body=load("v1")))[0] == 200
    write_adapter(root / "v1", lora_alpha=16)
    assert (await ask(loading, LOAD, body=load("v1")))[0] == 409


async def test_an_adapter_served_from_the_start_counts_as_loaded(
    loading: Guard, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(root / "v1", rank=8)
    monkeypatch.setenv("MSGRPO_SERVED_ADAPTERS", json.dumps([str(folder)]))
    guard = Guard(loading.app)
    assert (await ask(guard, LOAD, body=load("v1")))[0] == 200
    write_adapter(folder, rank=4)
    assert (await ask(guard, LOAD, body=load("v1")))[0] == 409


async def test_what_vllm_refused_was_not_loaded(loading: Guard, inside: Inside, root: Path) -> None:
    inside.status = 500
    write_adapter(root / "v1", rank=33)
    await ask(loading, LOAD, body=load("v1"))
    write_adapter(root / "v1", rank=8)
    inside.status = 200
    assert (await ask(loading, LOAD, body=load("v1")))[0] == 200


# ── found by mutation ──


async def exchange(app: Any, path: str, *messages: dict[str, Any], **scope: Any) -> list[Any]:
    """What the app sends for these messages of the client's; `scope` is added to a plain POST's."""
    coming, sent = list(messages), []

    async def receive() -> dict[str, Any]:
        return coming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "path": path, "method": "POST", "headers": [], **scope}, receive, send)
    return sent


async def test_a_refusal_says_what_it_is_and_only_401_asks_for_the_key(keyed: Guard) -> None:
    json_only = [(b"content-type", b"application/json")]
    key = [(b"authorization", b"Bearer s3cret")]
    for path, headers, status, expected in (
        ("/v1/models", [], 401, [*json_only, (b"www-authenticate", b"Bearer")]),
        (LOAD, key, 403, json_only),
        ("/docs", key, 404, json_only),
    ):
        start, body = await exchange(keyed, path, headers=headers)
        assert start == {"type": "http.response.start", "status": status, "headers": expected}
        error = json.loads(body["body"])["error"]
        assert (error["type"], error["param"], error["code"]) == ("refused", None, status)
        assert error["message"]


@pytest.mark.parametrize(
    "value", [b"Token s3cret", b"Zz s3cret", b" s3cret", b"s3cret", b"Bearer s 3cret", b"Bearer\ts3cret"]
)
async def test_only_the_bearer_scheme_carries_the_key(keyed: Guard, inside: Inside, value: bytes) -> None:
    start, _ = await exchange(keyed, "/v1/models", headers=[(b"authorization", value)])
    assert start["status"] == 401
    assert inside.bodies == []


async def test_two_keys_are_none_and_other_headers_are_no_key(keyed: Guard, inside: Inside) -> None:
    right, wrong = (b"authorization", b"Bearer s3cret"), (b"authorization", b"Bearer wrong")
    for headers in ([right, wrong], [wrong, right], [right, right], [(b"x-key", b"Bearer s3cret")]):
        start, _ = await exchange(keyed, "/v1/models", headers=headers)
        assert start["status"] == 401
    assert inside.bodies == []
    arrived = {"type": "http.request", "body": b"", "more_body": False}
    start, _ = await exchange(keyed, "/v1/models", arrived, headers=[(b"accept", b"*/*"), right, (b"x-key", b"a")])
    assert start["status"] == 200


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_a_server_mounted_below_a_path_and_websockets_are_not_served(keyed: Guard, kind: str) -> None:
    headers = [(b"authorization", b"Bearer s3cret")]
    if kind == "http":
        start, _ = await exchange(keyed, "/v1/models", headers=headers, root_path="/mounted")
        assert start["status"] == 404
    else:
        (closed,) = await exchange(keyed, "/v1/models", type="websocket", headers=headers)
        assert (closed["type"], closed["code"]) == ("websocket.close", 1008)
        assert "does not serve that path" in closed["reason"]


@pytest.mark.parametrize(
    "path",
    [
        *("/health", "/ping", "/version", "/load", "/metrics", "/metrics/", "/tokenize", "/detokenize"),
        *("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses"),
        *("/v1/messages", "/v1/messages/count_tokens"),
    ],
)
async def test_every_path_that_is_served_passes_with_the_key(keyed: Guard, path: str) -> None:
    assert await ask(keyed, path, key="Bearer s3cret") == (200, b"ok")


async def test_a_load_reaches_the_loader_as_it_was_checked(loading: Guard, root: Path) -> None:
    """One content-length, that of the new body; the other headers as they came; three fields at most become two."""
    write_adapter(root / "v1")
    seen: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.extend((scope["headers"], await receive()))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    loading.app = inner
    given = [(b"accept", b"*/*"), (b"content-length", b"7"), (b"x-request-id", b"1")]
    message = {"type": "http.request", "body": load("v1", load_inplace=False)}  # without more_body it is whole
    sent = await exchange(loading, LOAD, message, headers=given)
    headers, arrived = seen
    assert [part["type"] for part in sent] == ["http.response.start", "http.response.body"]
    assert arrived["type"] == "http.request"
    assert arrived["more_body"] is False
    assert json.loads(arrived["body"]) == {"lora_name": "new", "lora_path": str(root / "v1")}
    length = str(len(arrived["body"])).encode()
    assert sorted(headers) == [(b"accept", b"*/*"), (b"content-length", length), (b"x-request-id", b"1")]


async def test_an_unload_passes_as_it_is(loading: Guard, inside: Inside) -> None:
    message = {"type": "http.request", "body": b"anything", "more_body": False}
    start, _ = await exchange(loading, "/v1/unload_lora_adapter", message)
    assert start["status"] == 200
    assert inside.bodies == [b"anything"]


async def test_a_client_that_leaves_before_its_body_has_arrived(loading: Guard, inside: Inside) -> None:
    part = {"type": "http.request", "body": b"{", "more_body": True}
    start, body = await exchange(loading, LOAD, part, {"type": "http.disconnect"})
    assert start["status"] == 400
    assert json.loads(body["body"])["error"]["message"] == "the request ended early"
    assert inside.bodies == []


@pytest.mark.parametrize(("length", "status"), [(65_536, 200), (65_537, 413)])
async def test_the_longest_load_request(loading: Guard, root: Path, length: int, status: int) -> None:
    write_adapter(root / "v1")
    assert (await ask(loading, LOAD, body=load("v1").ljust(length)))[0] == status


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"b": 1, "a": 2}, "a, b"),
        ({"lora_name": ""}, "''"),
        ({"lora_name": 7}, "7"),
        ({"lora_name": "a\r\nb"}, r"'a\r\nb'"),
        ({"lora_name": "\x1b" + "x" * 200}, r"'\x1b" + "x" * 75),  # 80 characters of it
    ],
)
async def test_a_refused_field_is_named(
    loading: Guard, inside: Inside, root: Path, more: dict[str, Any], named: str
) -> None:
    write_adapter(root / "v1")
    status, message = await ask(loading, LOAD, body=load("v1", **more))
    assert (status, message) == (400, f"give lora_name, a model's name, and lora_path, not {named}")
    assert inside.bodies == []


@pytest.mark.parametrize("file", [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
async def test_either_file_as_a_link_out_of_the_folder_is_refused_by_name(
    loading: Guard, root: Path, tmp_path: Path, file: str
) -> None:
    outside, inner = write_adapter(tmp_path / "outside"), write_adapter(root / "inner")
    (inner / file).unlink()
    (inner / file).symlink_to(outside / file)
    assert await ask(loading, LOAD, body=load("inner")) == (403, f"that adapter's {file} is a link out of the folder")


@pytest.mark.parametrize("file", [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
@pytest.mark.parametrize("seconds", [-1, 1])
async def test_an_older_copy_is_other_weights_too(loading: Guard, root: Path, file: str, seconds: int) -> None:
    """Of the same size and with a time before or after: `cp -p` puts an old version back with its old time."""
    changed = write_adapter(root / "v1") / file
    assert (await ask(loading, LOAD, body=load("v1")))[0] == 200
    then = changed.stat().st_mtime_ns + seconds * 10**9
    os.utime(changed, ns=(then, then))
    assert (await ask(loading, LOAD, body=load("v1")))[0] == 409


async def test_another_size_is_other_weights_even_with_the_same_time(loading: Guard, root: Path) -> None:
    folder = write_adapter(root / "v1", rank=8)
    files = [folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS]
    times = [file.stat().st_mtime_ns for file in files]
    assert (await ask(loading, LOAD, body=load("v1")))[0] == 200
    write_adapter(folder, rank=4)
    for file, time in zip(files, times, strict=True):
        os.utime(file, ns=(time, time))
    assert (await ask(loading, LOAD, body=load("v1")))[0] == 409


async def test_what_was_served_from_the_start_is_not_loaded_with_other_weights(
    loading: Guard, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(root / "v1", rank=8)
    monkeypatch.setenv("MSGRPO_SERVED_ADAPTERS", json.dumps([str(folder)]))
    guard = Guard(loading.app)
    write_adapter(folder, rank=4)
    assert (await ask(guard, LOAD, body=load("v1")))[0] == 409


async def test_the_root_may_be_a_link(loading: Guard, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(root / "v1")
    link = root.parent / "link"
    link.symlink_to(root)
    monkeypatch.setenv("MSGRPO_ADAPTER_ROOT", str(link))
    for path in ("v1", str(link / "v1"), str(root / "v1")):
        assert (await ask(Guard(loading.app), LOAD, body=load(path)))[0] == 200


async def test_a_folder_that_the_disk_refuses_is_one_clear_error(
    loading: Guard, inside: Inside, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(root / "v1")

    def refuse(folder: Path, name: str) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("msgrpo.serve.guard.read_adapter", refuse)
    status, message = await ask(loading, LOAD, body=load("v1"))
    assert status == 400
    assert message.startswith("that folder cannot be read: ")
    assert inside.bodies == []


@pytest.mark.parametrize("body", [b"no json", b"\xff", b"[" * 60_000, b"[]", b"7", b"null", b'{"lora_path": "v1"}'])
async def test_what_is_no_load_request_is_told_what_one_is(loading: Guard, body: bytes) -> None:
    assert await ask(loading, LOAD, body=body) == (400, "give lora_name and lora_path as JSON")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"127.0.0.1:8000", 200), (b"localhost", 200), (b"LOCALHOST:1", 200), (b"[::1]:8000", 200),
        (b"127.9.9.9", 200),
        (b"evil.example:8000", 421), (b"127.0.0.1.evil.example", 421), (b"localhost.evil.example", 421),
        (b"", 421),
        (b"127.0.0.1@evil.example", 421), (b"[::1", 421), (b"::1", 421), (b"localhost:99999", 421),
    ],
)  # fmt: skip
async def test_a_server_without_a_key_answers_to_loopbacks_names_only(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, host: bytes, status: int
) -> None:
    """DNS rebinding: a page of any site, whose name suddenly leads to 127.0.0.1, could ask it."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    asked = {"type": "http.request", "body": b"", "more_body": False}
    sent = await exchange(Guard(inside), "/v1/models", asked, headers=[(b"host", host)])
    assert sent[0]["status"] == status


@pytest.mark.parametrize(
    ("origins", "status"),
    [
        ([], 200), ([b"http://127.0.0.1:8000"], 200), ([b"http://localhost:8000"], 200),
        ([b"http://evil.example"], 403), ([b"null"], 403), ([b"http://localhost:3000"], 403),
        ([b"http://127.0.0.1:8000", b"http://evil.example"], 403),
    ],
)  # fmt: skip
async def test_a_server_without_a_key_answers_no_page_of_another_address(
    inside: Inside, keyed: Guard, monkeypatch: pytest.MonkeyPatch, origins: list[bytes], status: int
) -> None:
    """A page of any site may send a request to 127.0.0.1, and vLLM says that it may read the answer."""
    asked = {"type": "http.request", "body": b"", "more_body": False}
    headers = [(b"host", b"127.0.0.1:8000"), *((b"origin", origin) for origin in origins)]
    start, _ = await exchange(keyed, "/v1/models", asked, headers=[*headers, (b"authorization", b"Bearer s3cret")])
    assert start["status"] == 200  # whoever knows the key
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    start, *_ = await exchange(Guard(inside), "/v1/models", asked, headers=headers)
    assert start["status"] == status


@pytest.mark.parametrize("given", [b"Bearer s3cret ", b"Bearer  s3cret", b"bearer s3cret\t", b"BEARER s3cret"])
async def test_blanks_around_the_key_are_no_other_key(keyed: Guard, inside: Inside, given: bytes) -> None:
    """The guard passed `Bearer KEY ` on, and vLLM's own check, which compares the bytes, answered 401."""
    asked = {"type": "http.request", "body": b"", "more_body": False}
    start, _ = await exchange(keyed, "/v1/models", asked, headers=[(b"accept", b"*/*"), (b"authorization", given)])
    assert start["status"] == 200
    assert sorted(inside.headers) == [(b"accept", b"*/*"), (b"authorization", b"Bearer s3cret")]


@pytest.mark.parametrize("name", ["../x", "#", "a b", "x\ny", "-x", ""])
async def test_a_name_that_is_refused_at_the_start_is_refused_at_run_time(
    loading: Guard, root: Path, name: str
) -> None:
    status, _ = await ask(loading, LOAD, body=json.dumps({"lora_name": name, "lora_path": "a"}).encode())
    assert status == 400
