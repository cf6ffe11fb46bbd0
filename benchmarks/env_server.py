"""`msgrpo env serve` under load: many sessions at once, killed and silent clients, and its memory over many episodes.

    python benchmarks/env_server.py --episodes 100000 --result benchmarks/results/env-server.json

It needs `msgrpo[openenv]`. Clients are plain websockets in this process, so what is measured is the server and what
the network stack and this client add. Every episode is played in process as well, with the same start, luck and
answers; a text, reward or end that differs stops the script.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from machine import facts
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from msgrpo.episode import observation_of
from msgrpo.game import Outcome, Scenario, stream
from msgrpo.games import get_scenario

PORT = 8711
URL = f"ws://127.0.0.1:{PORT}/ws"
SCENARIO = "frozen-lake-slippery"
HOLD = """
import asyncio, json, sys
from websockets.asyncio.client import connect
async def main():
    async def one():
        socket = await connect(sys.argv[1]).__aenter__()
        await socket.send('{"type": "reset", "data": {}}')
        assert json.loads(await socket.recv())["type"] == "observation"
        return socket
    held = await asyncio.gather(*(one() for _ in range(int(sys.argv[2]))))
    print("held", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def serve(sessions: int, idle_s: float) -> psutil.Popen:
    """The server as a process, when it answers."""
    command = [sys.executable, "-m", "msgrpo.cli", "env", "serve", SCENARIO, "--port", str(PORT)]
    child = psutil.Popen([*command, "--sessions", str(sessions), "--idle-s", str(idle_s)])
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5)
            return child
        except OSError:
            time.sleep(0.1)


def stop(child: psutil.Popen) -> None:
    child.terminate()
    child.wait(30)


async def say(socket: ClientConnection, kind: str, **data: Any) -> dict[str, Any]:
    await socket.send(json.dumps({"type": kind, "data": data}))
    answer = json.loads(await socket.recv())
    if answer["type"] != "observation":
        raise RuntimeError(str(answer))
    flat: dict[str, Any] = {**answer["data"]["observation"], **answer["data"]}
    return flat


async def play(socket: ClientConnection, scenario: Scenario, number: int) -> int:
    """One episode, here and there; its steps. Raises RuntimeError where the two differ."""
    start = next(scenario.starts("train", number % 1000))
    game, generator = scenario.new(start, number), stream(number, "bench")
    seen = await say(socket, "reset", seed=start, chance_seed=number)
    while True:
        same = seen["text"] == observation_of(game, "player") and seen["outcome"] == game.outcome
        if not same or seen["done"] != (game.outcome is not Outcome.PLAYING):
            raise RuntimeError(f"episode {number} differs at step {game.steps}: {seen}")
        if seen["done"]:
            return game.steps
        action = str(generator.choice([*game.actions, "nonsense"]))
        reward = game.step({"player": action if action in game.actions else None})["player"]
        seen = await say(socket, "step", action=action)
        if seen["reward"] != reward:
            raise RuntimeError(f"episode {number} pays {seen['reward']}, not {reward}")


async def many(sessions: int) -> dict[str, Any]:
    """All sessions are open at once, and each plays two episodes."""
    scenario, began = get_scenario(SCENARIO), time.perf_counter()
    gate = asyncio.Semaphore(100)  # connections in the making at once

    async def one(number: int, all_open: asyncio.Barrier) -> int:
        async with gate:
            manager = connect(URL, open_timeout=60)
            socket = await manager.__aenter__()
            await say(socket, "reset")
        await all_open.wait()
        steps = await play(socket, scenario, number) + await play(socket, scenario, sessions + number)
        await socket.close()
        return steps

    barrier = asyncio.Barrier(sessions)
    steps = await asyncio.gather(*(one(number, barrier) for number in range(sessions)))
    return {
        "sessions_at_once": sessions,
        "episodes": 2 * sessions,
        "steps": sum(steps),
        "seconds": round(time.perf_counter() - began, 1),
    }


async def free(places: int, limit_s: float) -> float:
    """Seconds until so many sessions can be opened, all at once."""
    began = time.perf_counter()
    while time.perf_counter() - began < limit_s:
        held: list[ClientConnection] = []
        try:
            for _ in range(places):
                held.append(await connect(URL).__aenter__())
                await say(held[-1], "reset")
            return round(time.perf_counter() - began, 1)
        except (RuntimeError, ConnectionClosed):
            await asyncio.sleep(0.5)
        finally:
            for socket in held:
                await socket.close()
    raise RuntimeError(f"after {limit_s:g} s there are still no {places} places")


def hold(sessions: int) -> subprocess.Popen[str]:
    """A process that has opened so many sessions and says no more."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, URL, str(sessions)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def killed(sessions: int) -> dict[str, Any]:
    """A client that is killed: its sessions' places are free again."""
    server = serve(sessions, 900)
    client = hold(sessions)
    os.kill(client.pid, signal.SIGKILL)
    client.wait()
    seconds = asyncio.run(free(sessions, 60))
    stop(server)
    return {"sessions": sessions, "all_places_free_again_after_s": seconds}


def silent(sessions: int, idle_s: float) -> dict[str, Any]:
    """A client that stays connected and says nothing: its places are free again after `idle_s`."""
    server = serve(sessions, idle_s)
    client = hold(sessions)
    seconds = asyncio.run(free(sessions, 60 + 2 * idle_s))
    client.kill()
    client.wait()
    stop(server)
    return {"sessions": sessions, "idle_s": idle_s, "all_places_free_again_after_s": seconds}


async def memory(server: psutil.Popen, episodes: int, sessions: int) -> dict[str, Any]:
    """Resident memory of the server, ten times over so many episodes; each session is closed after fifty."""
    scenario, began, points = get_scenario(SCENARIO), time.perf_counter(), []
    steps = 0
    for tenth in range(10):
        numbers = iter(range(tenth * episodes // 10, (tenth + 1) * episodes // 10))

        async def one(left: Any = numbers) -> int:
            done = 0
            while True:
                async with connect(URL) as socket:
                    for _ in range(50):
                        number = next(left, None)
                        if number is None:
                            return done
                        done += await play(socket, scenario, number)

        steps += sum(await asyncio.gather(*(one() for _ in range(sessions))))
        points.append(
            {
                "episodes": (tenth + 1) * episodes // 10,
                "mib": round(server.memory_info().rss / 2**20, 1),
                "threads": server.num_threads(),
                "open_files": server.num_fds(),
            }
        )
        print(points[-1], flush=True)
    seconds = time.perf_counter() - began
    return {"sessions": sessions, "steps": steps, "seconds": round(seconds, 1), "points": points}


def main(
    result: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")],
    episodes: Annotated[int, typer.Option(help="Over which the memory is watched.")] = 100_000,
    sessions: Annotated[int, typer.Option(help="Open at once.")] = 500,
) -> None:
    """Measure all four, and write the result file."""
    found: dict[str, Any] = {}
    server = serve(sessions, 900)
    found["many"] = asyncio.run(many(sessions))
    stop(server)
    found["killed"] = killed(sessions)
    found["silent"] = silent(100, 5)
    server = serve(sessions, 900)
    found["memory"] = asyncio.run(memory(server, episodes, 32))
    stop(server)
    result.write_text(json.dumps({"machine": facts(), "scenario": SCENARIO, **found}, indent=2) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    typer.run(main)
