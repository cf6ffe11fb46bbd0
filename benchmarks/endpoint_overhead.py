"""How much of a server's speed an evaluation reaches: msgrpo against a bare loop of the same requests.

    python benchmarks/endpoint_overhead.py --url http://127.0.0.1:8000/v1 --model base --episodes 200
    python benchmarks/endpoint_overhead.py --scripted 50 --concurrency 1 --concurrency 64 --concurrency 500

After a warm-up, both are timed alternately. The bare loop sends the recorded requests of the same episodes, each
episode's in their order, with the plain openai client and nothing else. Prints JSON: episodes per second of both,
from the medians, and their ratio in each round with its median (1: as fast as the bare loop). `--scripted MS` is a
server in a process of its own that answers after so many milliseconds: what is measured then is the client alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import openai
from machine import facts

from msgrpo.agent import LanguageAgent, Sampling
from msgrpo.episode import Episode, derive_seed, read_episodes
from msgrpo.evals.run import evaluate
from msgrpo.games import get_scenario
from msgrpo.models.endpoint import SEED_BITS, EndpointModel

ROOT = Path(__file__).parent.parent


@contextmanager
def scripted(delay_ms: float) -> Iterator[str]:
    """The URL of a server that answers every request alike, after a delay."""
    program = [sys.executable, __file__, "--serve", str(delay_ms)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


async def serve(delay_ms: float) -> None:
    sys.path.insert(0, str(ROOT))
    from tests.fake_server import FakeServer, Request, player

    async def late(request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_ms / 1000)
        await player(request, writer)

    async with FakeServer(then=late) as server:
        print(server.url, flush=True)
        while True:
            await asyncio.sleep(1)
            server.requests.clear()


async def with_msgrpo(
    options: argparse.Namespace, out: Path, concurrency: int, episodes: int
) -> tuple[float, list[Episode]]:
    """Seconds for all episodes, and their records."""
    agent = LanguageAgent("bench", EndpointModel(options.url, options.model), Sampling(max_tokens=options.max_tokens))
    began = time.perf_counter()
    await evaluate([agent], [get_scenario(options.scenario)], episodes, out, concurrency=concurrency)
    elapsed = time.perf_counter() - began
    await agent.close()
    return elapsed, list(read_episodes(out / "bench" / f"{options.scenario}.jsonl"))


async def bare(options: argparse.Namespace, episodes: list[Episode], concurrency: int) -> tuple[float, int]:
    """Seconds for the same requests, and the tokens of their answers."""
    tokens = 0
    gate = asyncio.Semaphore(concurrency)

    async def one(client: openai.AsyncOpenAI, episode: Episode) -> None:
        nonlocal tokens
        async with gate:
            for turn in episode.turns:
                answer = await client.chat.completions.create(
                    model=options.model,
                    messages=[{"role": "user", "content": episode.prefix[turn.player] + turn.state}],
                    temperature=1.0,
                    top_p=1.0,
                    max_tokens=options.max_tokens,
                    seed=derive_seed(episode.sampling_seed, turn.step, turn.player) & (2**SEED_BITS - 1),
                )
                tokens += answer.usage.completion_tokens if answer.usage else 0

    key = os.environ.get("MSGRPO_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none"
    async with openai.AsyncOpenAI(base_url=options.url, api_key=key) as client:
        began = time.perf_counter()
        await asyncio.gather(*(one(client, episode) for episode in episodes))
        return time.perf_counter() - began, tokens


async def measure(options: argparse.Namespace, concurrency: int) -> dict[str, Any]:
    ours, theirs = [], []
    count = max(options.episodes, 2 * concurrency) if concurrency > 1 else min(options.episodes, 40)
    with tempfile.TemporaryDirectory() as folder:
        _, episodes = await with_msgrpo(options, Path(folder) / "warm-up", concurrency, count)
        tokens = sum(turn.completion_tokens for episode in episodes for turn in episode.turns)
        bare_tokens = 0
        for i in range(options.repeats):
            ours.append((await with_msgrpo(options, Path(folder) / str(i), concurrency, count))[0])
            seconds, bare_tokens = await bare(options, episodes, concurrency)
            theirs.append(seconds)
    return {
        "scenario": options.scenario,
        "episodes": count,
        "requests": sum(len(episode.turns) for episode in episodes),
        "failed_episodes": sum(episode.error is not None for episode in episodes),
        "concurrency": concurrency,
        "msgrpo_s": [round(s, 3) for s in ours],
        "bare_s": [round(s, 3) for s in theirs],
        "msgrpo_completion_tokens": tokens,
        "bare_completion_tokens": bare_tokens,
        "msgrpo_episodes_per_s": round(count / median(ours), 3),
        "bare_episodes_per_s": round(count / median(theirs), 3),
        "ratios": [round(b / a, 3) for a, b in zip(ours, theirs, strict=True)],
        "ratio": round(median(b / a for a, b in zip(ours, theirs, strict=True)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--scripted", type=float, metavar="MS", help="in place of --url")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--scenario", default="frozen-lake")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--concurrency", type=int, action="append", help="may repeat; 64 without")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    if given.serve is not None:
        asyncio.run(serve(given.serve))
        return
    with scripted(given.scripted) if given.scripted is not None else nullcontext(given.url) as given.url:
        found = [asyncio.run(measure(given, concurrency)) for concurrency in given.concurrency or [64]]
    print(json.dumps({"machine": facts(), "scripted_ms": given.scripted, "found": found}, indent=2))


if __name__ == "__main__":
    main()
