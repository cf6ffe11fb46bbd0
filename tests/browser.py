"""A real headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")

Ask = Callable[..., Awaitable[Any]]


def wait_for(found: Callable[[], Any], what: str = "it", seconds: float = 90.0) -> Any:
    """The first true value of `found()`; fails after a time that is far beyond what it takes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.1)  # each look may be a process
    raise AssertionError(f"{what} did not happen in time")


@asynccontextmanager
async def opened(url: str, profile: Path) -> AsyncIterator[Ask]:
    """A browser that shows `url`: `await ask("Domain.method", **parameters)`."""
    browser = subprocess.Popen(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0",
         "--window-size=1000,700", url],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        debugger = wait_for(lambda: (profile / "DevToolsActivePort").is_file() and profile / "DevToolsActivePort")
        debug_port = int(wait_for(debugger.read_text).splitlines()[0])
        async with _page_of(debug_port) as ask:
            yield ask
    finally:
        browser.terminate()
        browser.wait(timeout=30)


@asynccontextmanager
async def _page_of(debug_port: int) -> AsyncIterator[Ask]:
    """The first page of a browser."""
    import aiohttp

    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://127.0.0.1:{debug_port}/json") as answer:
            pages = [page for page in await answer.json() if page["type"] == "page"]
        async with http.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as connection:
            numbers = itertools.count(1)

            async def ask(method: str, **parameters: Any) -> Any:
                number = next(numbers)
                await connection.send_json({"id": number, "method": method, "params": parameters})
                while True:
                    message = await connection.receive_json(timeout=60)
                    if message.get("id") == number:
                        return message["result"]

            yield ask
