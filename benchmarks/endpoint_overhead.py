"""How much of a server's speed an evaluation reaches: msgrpo against a bare loop of the same requests.

    python benchmarks/endpoint_overhead.py --url http://127.0.0.1:8000/v1 --model base --episodes 200

After a warm-up, both are timed alternately. The bare loop sends the recorded requests of the same episodes, each
episode's in their order, with the plain openai client and nothing else. Prints JSON: episodes per second of both
and their ratio, from the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import openai
from machine import facts

from evals.run import evaluate
from msgrpo_agent.agent import LanguageAgent, Sampling
from msgrpo_agent.episode import Episode, read_episodes
from msgrpo_agent.games import get_scenario
from msgrpo_agent.models.endpoint import SEED_BITS, EndpointModel
from msgrpo_agent.rollout import derive_seed


async def with_msgrpo(options: argparse.Namespace, out: Path) -> tuple[float, list[Episode]]:
    """Seconds for all episodes, and their records."""
    agent = LanguageAgent("bench", EndpointModel(options.url, options.model), Sampling(max_tokens=options.max_tokens))
    began = time.perf_counter()
    await evaluate([agent], [get_scenario(options.scenario)], options.episodes, out, concurrency=options.concurrency)
    elapsed = time.perf_counter() - began
    await agent.close()
    return elapsed, list(read_episodes(out / "bench" / f"{options.scenario}.jsonl"))


async def bare(options: argparse.Namespace, episodes: list[Episode]) -> tuple[float, int]:
    """Seconds for the same requests, and the tokens of their answers."""
    tokens = 0
    gate = asyncio.Semaphore(options.concurrency)

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


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        _, episodes = await with_msgrpo(options, Path(folder) / "warm-up")
        tokens = sum(turn.completion_tokens for episode in episodes for turn in episode.turns)
        bare_tokens = 0
        for i in range(options.repeats):
            ours.append((await with_msgrpo(options, Path(folder) / str(i)))[0])
            seconds, bare_tokens = await bare(options, episodes)
            theirs.append(seconds)
    return {
        "scenario": options.scenario,
        "episodes": options.episodes,
        "requests": sum(len(episode.turns) for episode in episodes),
        "failed_episodes": sum(episode.error is not None for episode in episodes),
        "concurrency": options.concurrency,
        "msgrpo_s": [round(s, 3) for s in ours],
        "bare_s": [round(s, 3) for s in theirs],
        "msgrpo_completion_tokens": tokens,
        "bare_completion_tokens": bare_tokens,
        "msgrpo_episodes_per_s": round(options.episodes / median(ours), 3),
        "bare_episodes_per_s": round(options.episodes / median(theirs), 3),
        "ratio": round(median(theirs) / median(ours), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--scenario", default="frozen-lake")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    print(json.dumps({"machine": facts(), **asyncio.run(measure(parser.parse_args()))}, indent=2))


if __name__ == "__main__":
    main()
