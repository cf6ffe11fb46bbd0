"""The terminal side of `msgrpo serve`: checks, a spinner, commands to try, and an orderly end."""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from msgrpo.errors import ServeError, UsageError
from msgrpo.files import expanded, is_folder
from msgrpo.loopback import is_loopback
from msgrpo.models.asked import taught_as, trained_as
from msgrpo.models.paths import adapters_base
from msgrpo.prompt import USUAL, Asked
from msgrpo.serve.adapters import Adapter, check_fits, read_adapter
from msgrpo.serve.preflight import (
    check_port,
    check_torchvision,
    installed_engine,
    local_weights,
    machine_engine,
)
from msgrpo.serve.server import Server, models
from msgrpo.serve.vllm_command import KEY_VARIABLE, Engine, Launch, Request, build, common_base
from msgrpo.signals import ending_as_interrupt
from msgrpo.text import duration

LOGS = Path("runs") / "serve"
LONG_S = 60.0  # of a start, after which its time and its log are told


def parse_adapter(text: str) -> Adapter:
    """`DIR`, or `NAME=DIR` for another model name than the folder's."""
    name, equals, folder = text.partition("=")
    if equals and "/" not in name and not is_folder(text):
        return read_adapter(expanded(folder), name)
    return read_adapter(expanded(text))


def plan(adapters: Sequence[str], base: str | None, asked: Request) -> Request:
    """The request `asked`, with these adapters, and their base where none is named. Raises UsageError or ModelError
    for what cannot be served.
    """
    if asked.extra and not asked.extra[0].startswith("-"):
        first = asked.extra[0]
        raise UsageError(f"unexpected argument {first!r}", fix=f"for an adapter: --adapter {shlex.quote(first)}")
    if asked.runtime_adapters is not None and not asked.runtime_adapters.is_dir():
        raise UsageError(f"--allow-runtime-adapters: there is no folder {asked.runtime_adapters}")
    read = tuple(parse_adapter(text) for text in adapters)
    for adapter in read:
        adapters_base(adapter.folder)
    return replace(asked, base=common_base(read, base), adapters=read)


def with_key(request: Request, key: str | None) -> tuple[Request, bool]:
    """The request with its key, and whether the key was generated: a server that others can reach always has one."""
    check_key(key)
    if key or is_loopback(request.host):
        return replace(request, key=key or None), False
    return replace(request, key=secrets.token_urlsafe(24)), True


def check_key(key: str | None) -> None:
    """Raise UsageError for a key that no HTTP header can hold."""
    if key and (not key.isascii() or not key.isprintable() or " " in key):
        raise UsageError(f"{KEY_VARIABLE} holds characters that an HTTP header cannot", fix="use letters and digits")


def status(host: str, port: int, key: str | None) -> dict[str, str | None]:
    """What a running server serves: model name → its base's name, None for a base."""
    check_key(key)
    return models(host, port, key)


def dry_run(request: Request, key: str | None) -> str:
    """The command with its variables as shell text; nothing is downloaded or started."""
    request, _ = with_key(request, key)
    weights = local_weights(request.base, download=False)
    if weights is not None:
        for adapter in request.adapters:
            check_fits(adapter, weights)
    return build(request, _planned_engine(), None if weights is None else str(weights)).shell()


def _planned_engine() -> Engine:
    try:
        return installed_engine()
    except ServeError:
        return machine_engine()  # the engine that would be used once installed


def serve(request: Request, key: str | None, console: Console) -> bool:
    """Serve until Ctrl-C, SIGTERM or the terminal's end. Returns whether it had become ready.

    Raises ServeError, ModelError or UsageError before the start when it cannot work, and when vLLM ends by itself.
    """
    request, show_key = with_key(request, key)
    ready, asked = False, learned_as(request)
    with ending_as_interrupt():
        try:
            launch, log = prepare(request, console.print), LOGS / f"vllm-{request.port}.log"
            with Server(launch, log) as server:
                try:
                    _start(server, console)
                    ready = True
                    _announce(launch, asked, log, console, show_key=show_key)
                    server.wait()
                except KeyboardInterrupt:
                    console.print("stopping" + (", requests in flight may end …" if ready else " …"))
        except KeyboardInterrupt:
            console.print("stopped" if ready else "stopped before the start")  # a third Ctrl-C ends the stopping
        else:
            console.print("stopped")
    return ready


def prepare(request: Request, say: Callable[[str], object]) -> Launch:
    """Every check that needs no running engine, cheapest first; then the launch."""
    engine = installed_engine()
    check_port(request.host, request.port)
    build(request, engine)  # names and options, before anything is downloaded
    if engine == "cpu":
        check_torchvision()
    if local_weights(request.base, download=False) is None:
        say(f"downloading {request.base} …")
    weights = local_weights(request.base, download=True)
    assert weights is not None
    for adapter in request.adapters:
        check_fits(adapter, weights)
    return build(request, engine, str(weights))


def _start(server: Server, console: Console) -> None:
    """Start the server and wait for it: what it does is told when that changes, and every LONG_S."""
    server.start()
    began, told = time.monotonic(), set[tuple[str, int]]()

    def doing(stage: str) -> str:
        waited = time.monotonic() - began
        return f"{stage} …" if waited < LONG_S else f"{stage} … {duration(waited)} already; its log is {server.log}"

    if not console.is_terminal:

        def tell(stage: str) -> None:
            now = stage, int((time.monotonic() - began) / LONG_S)
            if now not in told:
                told.add(now)
                console.print(doing(stage), highlight=False, markup=False, soft_wrap=True)

        server.wait_ready(tell)
        return
    with console.status("importing vLLM …") as spinner:
        server.wait_ready(lambda stage: spinner.update(escape(doing(stage))))


def learned_as(request: Request) -> Asked:
    """How the last of its models was asked while it learned. Raises ModelError where nobody knows."""
    return trained_as(request.adapters[-1].folder) if request.adapters else taught_as(request.base) or USUAL


def _announce(launch: Launch, asked: Asked, log: Path, console: Console, *, show_key: bool) -> None:
    url, model = launch.url, launch.models[-1]
    header = f"-H 'Authorization: Bearer ${KEY_VARIABLE}' " if launch.key else ""
    header = header.replace("'", '"')
    options = "".join(f" {shlex.quote(option)}" for option in [*asked.options, *asked.length])
    lines = [
        f"ready at {url}",
        f"models   {', '.join(launch.models)}",
        f"log      {log}",
        *([f"key      {launch.key}   (shown once: export {KEY_VARIABLE}=…)"] if show_key else []),
        "try",
        f"  curl {url}/chat/completions {header}-H 'Content-Type: application/json' "
        f'-d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "hello"}}], "max_tokens": 16}}\'',
        f"  msgrpo eval --endpoint {shlex.quote(url)} --model {shlex.quote(model)}{options}",
        f"  msgrpo play frozen-lake --agent endpoint:{url}#{shlex.quote(model)}{options}",
        "stop it with Ctrl-C",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
