"""What a turn costs the client, and how many turns a second one process plays: rollouts and evaluations.

    python benchmarks/client.py --seconds 5 --result benchmarks/results/client-now.json

The servers answer at once, so that only our side counts: the game, the prompt, the tokens, the request, the answer,
the record. `--before` is a checkout of an older commit (`git worktree add ../before COMMIT`), which is measured in
the same run, in turn with this one; the benchmark itself is this file for both. Parts:

rollouts   training's own path: episodes at once against one server, and 8,192 against two
eval       `evaluate`, with its records: 10,000 episodes of an endpoint, and the memory as it goes on
two        two client processes, each with a server of its own, against one

CPU milliseconds a turn are the figure to compare: on a machine with other work, turns a second say little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
LONGEST_S = 150  # of one measurement: what is not done then is reported as that
ANSWER = "The goal is down and right. <action>right</action>"
AT_ONCE = (64, 512, 4096)
GROUP = 16  # episodes that share a start, as in training


# ── the server: one process, one answer ──


class Instant(asyncio.Protocol):
    """Answers every request at once, with the fixed body of its path."""

    def __init__(self, answers: dict[bytes, bytes]) -> None:
        self._answers, self._held = answers, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        while (end := self._held.find(b"\r\n\r\n")) >= 0:
            head = self._held[:end].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
            if len(self._held) < end + 4 + length:
                return
            self._held = self._held[end + 4 + length :]
            self._transport.write(self._answers[head.split(b" ", 2)[1]])


def bodies() -> dict[bytes, bytes]:
    """vLLM's own shapes, with the tokens that nano's tokenizer makes of the answer."""
    ids = tokenizer()(ANSWER, add_special_tokens=False)["input_ids"]
    usage = {"prompt_tokens": 210, "total_tokens": 210 + len(ids), "completion_tokens": len(ids)}
    logprobs = {
        "text_offset": list(range(len(ids))),
        "token_logprobs": [-0.1234567890123 - i / 64 for i in range(len(ids))],
        "tokens": [f"token_id:{one}" for one in ids],
        "top_logprobs": [{f"token_id:{one}": -0.1234567890123} for one in ids],
    }
    choice = {"index": 0, "finish_reason": "stop", "stop_reason": None}
    both = {"id": "x" * 40, "created": 1764000000, "model": "v", "usage": usage, "system_fingerprint": None}
    message: dict[str, Any] = {
        "role": "assistant",
        "content": ANSWER,
        "refusal": None,
        "tool_calls": [],
        "reasoning": None,
    }
    found = {
        b"/v1/completions": {"choices": [choice | {"text": ANSWER, "token_ids": ids, "logprobs": logprobs}]},
        b"/v1/chat/completions": {"choices": [choice | {"message": message, "logprobs": None}]},
    }
    return {path: _response(json.dumps(both | body).encode()) for path, body in found.items()}


def _response(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def serve() -> None:
    answers = bodies()
    server = await asyncio.get_running_loop().create_server(lambda: Instant(answers), "127.0.0.1", 0, backlog=8192)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


@contextmanager
def servers(count: int) -> Iterator[list[str]]:
    """URLs of so many servers, each a process of its own."""
    program = [sys.executable, str(HERE), "--serve"]
    started = [subprocess.Popen(program, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [one.stdout.readline().strip() for one in started if one.stdout is not None]
    finally:
        for one in started:
            one.kill()
            one.communicate()


# ── the client: one process, started on the tree that is measured ──


def in_tree(name: str, *homes: str) -> Any:
    """What has this name in the tree that is measured: older commits have it in another file. None without one."""
    for home in homes:
        if find_spec(home) is not None and hasattr(module := import_module(home), name):
            return getattr(module, name)
    return None


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from msgrpo.models.paths import NANO_DIR

    return AutoTokenizer.from_pretrained(NANO_DIR)


class Meter:
    """Turns, and the longest time for which the event loop stood still: by the clock, and of it by its own work."""

    def __init__(self) -> None:
        self.turns, self.still_s, self.still_cpu_s = 0, 0.0, 0.0

    async def watch(self) -> None:
        while True:
            began, worked = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.01)
            self.still_s = max(self.still_s, time.perf_counter() - began - 0.01)
            self.still_cpu_s = max(self.still_cpu_s, time.thread_time() - worked)


def rollouts(urls: Sequence[str], at_once: int, seconds: float) -> dict[str, Any]:
    """Episode after episode in each of `at_once` places until the time is over; those that run are played out."""
    from msgrpo.train.engines.pool import Pool, Remote, VersionModel

    chat_format = in_tree("ChatFormat", "msgrpo.prompt", "msgrpo.models.chat")
    told: list[str] = []
    pool = Pool([Remote(url, out=None, proved={"v"}) for url in urls], None, told.append)
    size = {"vocabulary": 2**31} if "vocabulary" in signature(VersionModel).parameters else {}  # older commits: none
    model = VersionModel("v", pool, chat_format(tokenizer(), {}), [2], 2048, **size)
    asyncio.run(_episodes(model, 4, 0.5, Meter()))  # imports, and what is made once
    found = _measured(lambda meter: _episodes(model, at_once, seconds, meter))
    return found | {"answered": [remote.answered for remote in pool.remotes], "told": told}


async def _episodes(model: Any, at_once: int, seconds: float, meter: Meter) -> None:
    from msgrpo.agent import LanguageAgent, Sampling
    from msgrpo.games import get_scenario
    from msgrpo.prompt import PromptTemplate

    play_episode = in_tree("play_episode", "msgrpo.episode", "msgrpo.rollout")
    scenario = get_scenario("frozen-lake")
    agent = LanguageAgent("policy", model, Sampling(max_tokens=48), PromptTemplate())
    agents = dict.fromkeys(scenario.players, agent)
    until = time.perf_counter() + seconds

    async def place(number: int) -> None:
        while True:
            episode = await play_episode(
                scenario, agents, start_seed=number // GROUP, chance_seed=number, sampling_seed=number
            )
            assert episode.error is None, episode.error_message
            meter.turns += len(episode.turns)
            number += at_once
            if time.perf_counter() >= until:
                return

    try:
        await asyncio.gather(*map(place, range(at_once)))
    finally:
        await agent.close()


def few_collections() -> AbstractContextManager[None]:
    """What training and evaluation play under; older commits have nothing like it."""
    play_under: Callable[[], AbstractContextManager[None]] = (
        in_tree("few_collections", "msgrpo.episode", "msgrpo.rollout") or nullcontext
    )
    return play_under()


def _measured(play: Callable[[Meter], Any]) -> dict[str, Any]:
    async def main() -> None:
        watching = asyncio.create_task(meter.watch())
        try:
            with few_collections():
                await play(meter)
        finally:
            watching.cancel()

    meter, failure = Meter(), None
    began, used = time.perf_counter(), time.process_time()
    try:
        asyncio.run(main())
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error)[:200]}"
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    return {
        "turns": meter.turns,
        "cpu_ms_a_turn": round(1e3 * cpu / meter.turns, 3) if meter.turns else None,
        "turns_a_second": round(meter.turns / wall, 1),
        "longest_standstill_s": round(meter.still_s, 3),
        "longest_standstill_cpu_s": round(meter.still_cpu_s, 3),
        "most_memory_mib": _memory(),
        "failure": failure,
    }


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def evaluation(url: str, at_once: int, episodes: int) -> dict[str, Any]:
    """`evaluate` with all its records; the resident memory after each tenth of the episodes."""
    from msgrpo.agent import LanguageAgent, Sampling
    from msgrpo.evals import run
    from msgrpo.games import get_scenario
    from msgrpo.models.endpoint import EndpointModel

    named: Any = vars(run)
    progress = (named.get("EvalProgress") or named["Progress"])()  # what the older commit calls it
    memory: list[int] = []

    def look(progress: Any) -> None:
        if progress.done == len(memory) * (episodes // 10):
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024)

    progress.on_change = look

    async def play(meter: Meter) -> None:
        with tempfile.TemporaryDirectory() as folder:
            agent = LanguageAgent("bench", EndpointModel(f"{url}/v1", "v"), Sampling(max_tokens=48))
            scenario = get_scenario("frozen-lake")
            try:
                await run.evaluate(
                    [agent], [scenario], episodes, Path(folder), concurrency=at_once, progress=progress
                )
            finally:
                await agent.close()
            for line in (Path(folder) / "bench" / "frozen-lake.jsonl").open():
                meter.turns += line.count('"step":')

    began = time.perf_counter()
    found = _measured(play)
    return found | {"episodes": progress.done, "seconds": round(time.perf_counter() - began, 1), "mib": memory}


# ── the comparison ──


@contextmanager
def importable(tree: Path) -> Iterator[Path]:
    """A folder in which the tree's own folders stand under their import name."""
    with tempfile.TemporaryDirectory() as name:
        package = Path(name) / "msgrpo"
        package.mkdir()
        for entry in [
            *(tree / "msgrpo_agent").iterdir(),
            *(tree / part for part in ("train", "serve", "evals", "tui")),
        ]:
            (package / entry.name).symlink_to(entry.resolve())
        yield Path(name)


def started(links: Path, part: str, *arguments: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(links), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    program = [sys.executable, str(HERE), "--worker", part, json.dumps(arguments)]
    return subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        said, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"failure": f"not done after {LONGEST_S} s"}
    found: dict[str, Any] = json.loads(said.splitlines()[-1]) if said else {"failure": "it ended without a result"}
    return found


def measured(links: Path, seconds: float, parts: Sequence[str]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The name of each measurement, and what makes it."""

    def at(count: int, part: str, *arguments: Any) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            with servers(count) as urls:
                given = [urls, *arguments] if count != 1 or part != "evaluation" else [urls[0], *arguments]
                return result(started(links, part, *given))

        return run

    if "rollouts" in parts:
        for at_once in AT_ONCE:
            yield f"rollouts, {at_once} at once", at(1, "rollouts", at_once, seconds)
        yield "rollouts, 8192 at once, two servers", at(2, "rollouts", 8192, seconds)
    if "eval" in parts:
        yield "eval, 10000 episodes, 64 at once", at(1, "evaluation", 64, 10_000)
        yield "eval, 10000 episodes, 512 at once", at(1, "evaluation", 512, 10_000)
    if "two" in parts:
        yield "two processes, 64 at once each", lambda: two(links, seconds)


def two(links: Path, seconds: float) -> dict[str, Any]:
    """Turns a second of one process and of two at the same time; there must be cores for them and their servers."""
    with servers(2) as urls:
        one = result(started(links, "rollouts", urls[:1], 64, seconds))
        both = [started(links, "rollouts", [url], 64, seconds) for url in urls]
        pair = [result(process) for process in both]
    together = sum(found["turns_a_second"] for found in pair)
    return {
        "one_turns_a_second": one["turns_a_second"],
        "two_turns_a_second": round(together, 1),
        "ratio": round(together / one["turns_a_second"], 2),
        "cpu_ms_a_turn": [one["cpu_ms_a_turn"], *(found["cpu_ms_a_turn"] for found in pair)],
    }


WORKERS: dict[str, Callable[..., dict[str, Any]]] = {"rollouts": rollouts, "evaluation": evaluation}
PARTS = ("rollouts", "eval", "two")


def commit(tree: Path) -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of an older commit, measured in the same run")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each rollout measurement")
    parser.add_argument("--part", choices=PARTS, action="append", help="may repeat; all without")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve())
        return
    if given.worker:
        print(json.dumps(WORKERS[given.worker[0]](*json.loads(given.worker[1]))), flush=True)
        os._exit(0)  # what a broken run has left open is not waited for
    trees = {"before": given.before, "now": HERE.parents[1]} if given.before else {"now": HERE.parents[1]}
    found: dict[str, Any] = {}
    with all_importable(trees) as links:
        for steps in zip(*(measured(one, given.seconds, given.part or PARTS) for one in links.values()), strict=True):
            for tree, (name, run) in zip(links, steps, strict=True):
                found.setdefault(name, {})[tree] = run()
                print(f"{name} [{tree}]: {json.dumps(found[name][tree])}", file=sys.stderr, flush=True)
    from machine import facts

    machine = facts() | {
        "load_average_at_the_end": os.getloadavg(),
        "commits": {k: commit(v) for k, v in trees.items()},
    }
    text = json.dumps({"machine": machine, "found": found}, indent=2) + "\n"
    if given.result:
        given.result.parent.mkdir(parents=True, exist_ok=True)
        given.result.write_text(text)
    print(text)


@contextmanager
def all_importable(trees: dict[str, Path]) -> Iterator[dict[str, Path]]:
    """The importable folder of each tree."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(importable(tree)) for name, tree in trees.items()}


if __name__ == "__main__":
    main()
