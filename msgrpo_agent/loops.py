"""Coroutines that code without `await` waits for, or that run beside it: event loops of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine gives; where an event loop runs already, as in a notebook's cell, it runs in a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    running = InThread(coroutine)
    try:
        return running.result()
    finally:
        running.give_up()  # a stop while it was waited for


class InThread(Generic[T]):
    """A coroutine that runs at once, in a thread with a loop of its own; `result` waits for it."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._future: Future[T] = Future()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(coroutine)
        self._thread = Thread(target=self._run, name="msgrpo-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # which ends what the task leaves behind
                given = runner.run(self._ended())
            self._future.set_result(given)
        except BaseException as error:  # raised where the result is asked for
            self._future.set_exception(error)

    async def _ended(self) -> T:
        return await self._task

    def result(self) -> T:
        return self._future.result()

    def give_up(self) -> None:
        if not self._future.done():
            with suppress(RuntimeError):  # it ended just now, and its loop is closed
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
