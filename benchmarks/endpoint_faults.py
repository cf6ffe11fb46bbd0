"""An evaluation against a server that fails one request in five, killed with SIGKILL again and again.

    PYTHONPATH=. python benchmarks/endpoint_faults.py --episodes 1000 --kills 5

The same command is started again after each kill. Afterwards the record must hold every episode once, with the
same answers, returns and token sums as a run against the same server without faults and without kills. Prints
JSON and exits with 1 where they differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from machine import facts

from msgrpo.episode import Episode, read_episodes
from msgrpo.evals.record import folder_name, seeds_of
from tests.fake_server import Behaviour, FakeServer, Request, http, player, reply, reset, send

FAULTS: tuple[Behaviour, ...] = (
    reply(429, {"error": {"message": "slow down"}}, {"retry-after": "1"}),
    reply(429, {"error": "slow down"}),
    reply(500, {"error": "boom"}),
    send(http(502, b"<html>bad gateway</html>", {"content-type": "text/html"})),
    reply(503, ""),
    reset,
    send(b"", close=True),
    send(http(200, b'{"choices": [', length=500), close=True),
    send(http(200, b'{"choices": [')),
    reply(200, {"choices": None}),
    reply(200, {"choices": [{"message": None, "finish_reason": "stop"}]}),
    reply(200, {"error": {"message": "upstream", "code": 502}}),
)


class Flaky:
    """Every fifth request fails, each time in the next way; the others are played."""

    def __init__(self) -> None:
        self.count = 0
        self.failed: Counter[int] = Counter()

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        if self.count % 5:
            await player(request, writer)
            return
        fault = self.count // 5 % len(FAULTS)
        self.failed[fault] += 1
        await FAULTS[fault](request, writer)


def finished_lines(record: Path) -> int:
    return record.read_bytes().count(b"\n") if record.is_file() else 0


async def run(url: str, out: Path, options: argparse.Namespace, kills: int) -> tuple[list[Episode], int]:
    """The record of the evaluation, and how many kills hit it before it ended."""
    spec = f"endpoint:{url}#fake"
    record = out / folder_name(spec) / f"{options.scenario}.jsonl"
    command = [sys.executable, "-m", "msgrpo.cli", "eval", spec, "--scenario", options.scenario]
    command += ["--episodes", str(options.episodes), "--out", str(out)]
    killed = 0
    while True:
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        ending = asyncio.ensure_future(child.wait())
        goal = options.episodes * (killed + 1) // (kills + 1) if killed < kills else None
        while not ending.done():
            if goal is not None and finished_lines(record) >= goal:
                child.send_signal(signal.SIGKILL)
                killed += 1
                goal = None
            await asyncio.wait([ending], timeout=0.02)
        if ending.result() == 0:
            return list(read_episodes(record)), killed
        if ending.result() != -signal.SIGKILL:
            raise SystemExit(f"the evaluation ended with {ending.result()}")


def outcome(episodes: list[Episode]) -> dict[Any, Any]:
    """What must be the same: seeds → answers, rewards, returns and tokens."""
    return {
        seeds_of(e): ([(t.answer, t.reward, t.prompt_tokens, t.completion_tokens) for t in e.turns], e.returns)
        for e in episodes
        if e.error is None
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    flaky = Flaky()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        async with FakeServer(then=flaky) as server:
            faulty, killed = await run(server.url, Path(folder) / "faulty", options, options.kills)
        faulty_s = time.perf_counter() - began
        async with FakeServer(then=player) as server:
            clean, _ = await run(server.url, Path(folder) / "clean", options, 0)
    finished = [e for e in faulty if e.error is None]
    return {
        "episodes": options.episodes,
        "requests": flaky.count,
        "failed_requests": sum(flaky.failed.values()),
        "kinds_of_failure": len(flaky.failed),
        "kills": killed,
        "seconds": round(faulty_s, 1),
        "lost": options.episodes - len(outcome(faulty)),
        "doubled": len(finished) - len(outcome(faulty)),
        "failed_episodes": len(faulty) - len(finished),
        "retries": sum(t.retries for e in finished for t in e.turns),
        "same_as_clean": outcome(faulty) == outcome(clean),
        "clean_episodes": len(outcome(clean)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", default="frozen-lake")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=5)
    result = {"machine": facts(), **asyncio.run(measure(parser.parse_args()))}
    print(json.dumps(result, indent=2))
    sys.exit(0 if result["same_as_clean"] and not result["lost"] and not result["doubled"] else 1)


if __name__ == "__main__":
    main()
