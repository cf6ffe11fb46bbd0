"""Rollouts through vLLM, measured and broken on purpose; every part on real servers and real processes.

    python benchmarks/rollouts.py speed --result benchmarks/results/rollouts-speed.json
    python benchmarks/rollouts.py learning --result benchmarks/results/rollouts-learning.json
    python benchmarks/rollouts.py pace --result benchmarks/results/rollouts-pace.json
    python benchmarks/rollouts.py faults --result benchmarks/results/rollouts-faults.json

speed     turns a second of rollouts through the engine, against the same prompts sent to the same bare servers
learning  the same short training in process and through vLLM, three seeds each
pace      ahead=1 against 0, and two ranks against one: wall time and success
faults    a server killed in a rollout, a trainer killed five times, a server that serves the base, a disk that lags

Needs the extras train and serve-cpu (or serve). Nano plays; the figures are this machine's, side by side in one run.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from machine import options, write

from msgrpo.episode import Episode
from msgrpo.games import get_scenario
from msgrpo.run_log import read_rows
from msgrpo.serve.preflight import free_port
from msgrpo.train.config import TrainConfig, make_config

SMALL = ["groups=4", "group_size=16", "select=aaw(keep=6)", "evaluation=100", "checkpoint_every=1"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass
class Served:
    """One `msgrpo serve`, and the file that it writes its output to."""

    process: subprocess.Popen[bytes]
    port: int
    said: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """kill -9 of vLLM itself, below the command and its supervisor."""
        (supervisor,) = children(self.process.pid)
        (server,) = children(supervisor)
        os.kill(server, signal.SIGKILL)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def start(folder: Path, work: Path) -> Served:
    """Begin to serve; `ready` waits for it."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "msgrpo.cli", "serve", "--base", "nano", "--port", str(port)]
    command += ["--allow-runtime-adapters", str(folder)]
    said = work / f"serve-{port}.txt"
    with said.open("wb") as output:
        process = subprocess.Popen(command, cwd=work, stdout=output, stderr=subprocess.STDOUT)
    return Served(process, port, said)


def ready(served: Served) -> Served:
    while "stop it with" not in (text := served.said.read_text()):
        if served.process.poll() is not None:
            raise RuntimeError(f"a server did not start:\n{text}")
        time.sleep(0.2)
    return served


@contextmanager
def servers(*folders: Path) -> Iterator[list[Served]]:
    """Servers that share nothing but, where it is the same one, their folder."""
    work = Path(tempfile.mkdtemp())
    started: list[Served] = []
    try:
        started += [start(folder, work) for folder in folders]
        yield [ready(served) for served in started]
    finally:
        for served in started:
            served.stop()
        shutil.rmtree(work, ignore_errors=True)


def train_command(out: Path, *more: str, ranks: int = 1) -> list[str]:
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    return [sys.executable, "-m", *launcher, "msgrpo.cli", "train", "frozen-lake", "--out", str(out), *more]


def settings(*pairs: str) -> list[str]:
    return [part for pair in pairs for part in ("--set", pair)]


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    rows = [row for row in read_rows(out) if row["kind"] == "train"]
    mismatch = [row["engine/mismatch_max"] for row in rows if "engine/mismatch_max" in row]
    times = {name: median(row[f"time/{name}"] for row in rows) for name in ("rollout", "update", "wait")}
    return {
        "seed": found["seed"],
        "before": found["before"]["success"],
        "after": found["after"]["success"],
        "training_seconds": found["training_seconds"],
        "turns": sum(row["rollout/turns"] for row in rows),
        "largest_mismatch": max(mismatch, default=None),
        "median_seconds_of_an_update": times,
        "ratio_by_staleness": by_staleness(rows, "update/ratio"),
        "kl_by_staleness": by_staleness(rows, "update/kl"),
    }


def by_staleness(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    rows = [row for row in rows if name in row]  # an update in which nothing was learned has none
    kinds = sorted({row["rollout/staleness"] for row in rows})
    return {str(int(kind)): median(r[name] for r in rows if r["rollout/staleness"] == kind) for kind in kinds}


def trained(out: Path, *more: str, ranks: int = 1, runs: Sequence[str] = SMALL) -> dict[str, Any]:
    """One whole run in a process of its own, and how long it took from start to end."""
    began = time.perf_counter()
    command = train_command(out, *settings(*runs), *more, ranks=ranks)
    subprocess.run(command, check=True, env=os.environ | ONE_THREAD, stdout=sys.stderr, stderr=sys.stderr)
    return summary(out) | {"wall_seconds": round(time.perf_counter() - began, 1)}


# ── speed ────────────────────────────────────────────────────────────────────────────────────────────────────


def speed(work: Path, rounds: int) -> dict[str, Any]:
    folder = work / "adapters"
    found = {}
    with servers(folder, folder) as both:
        for count in (1, 2):
            found[f"{count} server{'s' * (count > 1)}"] = _speed(
                both[:count], folder, work / f"speed-{count}", rounds
            )
    return found


def _speed(used: Sequence[Served], folder: Path, out: Path, rounds: int) -> dict[str, Any]:
    """The engine's rollouts, then their very prompts to the bare servers, as many at once; alternating."""
    from msgrpo.train.display import Quiet
    from msgrpo.train.engines.vllm import VllmEngine
    from msgrpo.train.policy import Policy
    from msgrpo.train.ranks import ALONE
    from msgrpo.train.rollouts import Players, Playing, RolloutSource

    given = {"rollouts": f"servers(at={' '.join(one.url for one in used)}, adapters={folder})"}
    config = make_config(settings=[*SMALL, "groups=2"], given=given)
    scenario, policy, players = get_scenario(config.scenario), Policy(config), Players(config)
    engine = VllmEngine(policy, scenario, config, out, ALONE, Quiet())
    ours, bare, ratios, first = [], [], [], 0
    try:
        for n in range(rounds + 1):
            model = engine.load(2 * n)
            starts, first = RolloutSource(players).next_starts(first)
            began = time.perf_counter()
            episodes = asyncio.run(Playing(players, n, model, config.sampling, starts).play())
            through = time.perf_counter() - began
            turns = sum(len(episode.turns) for episode in episodes)
            model = engine.load(2 * n + 1)  # the same weights under another name: nothing of it is cached there
            alone = asyncio.run(_bare(used, model.name, config, episodes))
            if n:  # the first is warm-up
                ours.append(turns / through)
                bare.append(turns / alone)
                ratios.append(alone / through)
    finally:
        engine.close()
    return {
        "engine_turns_a_second": median(ours),
        "bare_turns_a_second": median(bare),
        "ratio": median(ratios),
        "ratios": ratios,
    }


async def _bare(used: Sequence[Served], name: str, config: TrainConfig, episodes: Sequence[Episode]) -> float:
    """Seconds for the prompts of these episodes, each episode's one after another as in a game, dealt out in turn."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:

        async def one(index: int, episode: Episode) -> None:
            url = used[index % len(used)].url + "/v1/completions"
            for turn in episode.turns:
                assert turn.completion is not None
                body = {
                    "model": name, "prompt": list(turn.completion.prompt_ids), "max_tokens": config.max_tokens,
                    "temperature": config.temperature, "seed": turn.step, "logprobs": 0, "return_token_ids": True,
                }  # fmt: skip
                (await client.post(url, json=body)).raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*(one(index, episode) for index, episode in enumerate(episodes)))
        return time.perf_counter() - began


# ── learning and pace ────────────────────────────────────────────────────────────────────────────────────────


def learning(work: Path, seeds: int) -> dict[str, Any]:
    """Eight updates each way, one run at a time."""
    steps = ["--steps", "8", "--set", "evaluation=100(every=8)"]
    return {
        rollouts: [
            trained(work / f"{rollouts}-{seed}", "--seed", str(seed), "--rollouts", rollouts, *steps)
            for seed in range(seeds)
        ]
        for rollouts in ("hf", "vllm")
    }


def pace(work: Path, seeds: int) -> dict[str, Any]:
    """Five updates each; ahead and not through vLLM, one rank and two in process."""
    steps = ["--steps", "5", "--set", "evaluation=100(every=5)"]
    found: dict[str, Any] = {"ahead=0": [], "ahead=1": [], "1 rank": [], "2 ranks": []}
    for seed in range(seeds):
        for ahead in (0, 1):
            more = ["--seed", str(seed), "--rollouts", f"vllm(ahead={ahead})", *steps]
            found[f"ahead={ahead}"].append(trained(work / f"ahead-{ahead}-{seed}", *more))
        for ranks, name in ((1, "1 rank"), (2, "2 ranks")):
            found[name].append(trained(work / f"ranks-{ranks}-{seed}", "--seed", str(seed), *steps, ranks=ranks))
    return found


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────

FAULTY = ["groups=4", "group_size=8", "select=aaw(keep=4)", "evaluation=20(every=6)", "checkpoint_every=1"]


def faults(work: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    folder = work / "adapters"
    with servers(folder, folder) as (one, other):
        both = f"{one.url} {other.url}"
        found["trainer killed five times"] = killed_trainer(work / "trainer", folder, both)
        with dropping_names(other.url) as liar:
            found["a server that serves the base"] = noted(work / "liar", folder, f"{one.url} {liar}")
        found["server killed in a rollout"] = killed_server(work / "server", folder, both, other)
    with servers(work / "lagging") as (slow,), lagging(work / "written", work / "lagging", seconds=3.0):
        found["a disk that lags by 3 s"] = noted(work / "disk", work / "written", slow.url)
    return found


def faulty_command(out: Path, folder: Path, urls: str, *more: str) -> list[str]:
    more = ("--rollouts", f"servers(at={urls}, adapters={folder})", *settings(*FAULTY), "--steps", "6", *more)
    return train_command(out, *more)


def result_of(out: Path, said: str) -> dict[str, Any]:
    """What a run ended with: its updates in order, each once, and what it said about servers."""
    rows = [row["step"] for row in read_rows(out) if row["kind"] == "train"]
    transcripts = [json.loads(line) for line in (out / "transcripts.jsonl").read_text().splitlines()]
    return {
        "updates": rows,
        "complete": rows == [1, 2, 3, 4, 5, 6],
        "every_turn_names_its_version": all(turn["model"] for one in transcripts for turn in one["turns"]),
        "largest_mismatch": summary(out)["largest_mismatch"],
        "said": [line for line in said.splitlines() if "plays" in line],
    }


def noted(out: Path, folder: Path, urls: str) -> dict[str, Any]:
    environment = os.environ | ONE_THREAD
    done = subprocess.run(
        faulty_command(out, folder, urls), env=environment, capture_output=True, text=True, check=True
    )
    return result_of(out, done.stderr)


def killed_server(out: Path, folder: Path, urls: str, victim: Served) -> dict[str, Any]:
    """kill -9 of one of two servers while update 3 is being played."""
    return _watched(out, faulty_command(out, folder, urls), "update 3 of 6", victim.kill)


def _watched(out: Path, command: list[str], moment: str, act: Callable[[], None]) -> dict[str, Any]:
    environment = os.environ | ONE_THREAD
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    metrics, wanted = out / "metrics.jsonl", int(moment.split()[1]) - 1
    while running.poll() is None and not (metrics.is_file() and metrics.read_text().count('"train"') >= wanted):
        time.sleep(0.02)
    time.sleep(1.0)  # now the next rollout is on its way
    act()
    _, said = running.communicate()
    return result_of(out, said) | {"status": running.returncode}


def killed_trainer(out: Path, folder: Path, urls: str) -> dict[str, Any]:
    """kill -9 five times, a little later into the run each time; then to the end. The servers run on."""
    environment, kills = os.environ | ONE_THREAD, 0
    metrics = out / "metrics.jsonl"
    for updates in range(1, 6):
        running = subprocess.Popen(
            faulty_command(out, folder, urls, "--resume"), env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while running.poll() is None and not (metrics.is_file() and metrics.read_text().count('"train"') >= updates):
            time.sleep(0.02)
        time.sleep(0.4 * updates)
        if running.poll() is None:
            running.kill()
            kills += 1
        running.wait()
    done = subprocess.run(
        faulty_command(out, folder, urls, "--resume"), env=environment, capture_output=True, text=True, check=True
    )
    left = httpx.get(urls.split(",")[0] + "/v1/models").json()["data"]
    loaded = [entry["id"] for entry in left if entry["id"] != "nano"]
    return result_of(out, done.stderr) | {"kills": kills, "still_loaded_at_the_servers": loaded}


@contextmanager
def dropping_names(url: str) -> Iterator[str]:
    """A proxy before a real server that loads adapters and then asks the base, answering under the adapter's name."""

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = body.get("model")
            if asked is not None:
                body["model"] = "nano"
            self._pass(httpx.post(url + self.path, json=body, headers=self._key(), timeout=300), asked)

        def do_GET(self) -> None:
            self._pass(httpx.get(url + self.path, headers=self._key(), timeout=30), None)

        def _key(self) -> dict[str, str]:
            given = self.headers["Authorization"]
            return {"Authorization": given} if given else {}

        def _pass(self, found: httpx.Response, asked: str | None) -> None:
            data = found.content
            if asked is not None and found.status_code == 200:
                data = json.dumps(found.json() | {"model": asked}).encode()
            self.send_response(found.status_code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            """Silent."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 256  # of its five usual places a busy machine resets the connections beyond

    proxy = Server(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        proxy.server_close()


@contextmanager
def lagging(source: Path, target: Path, seconds: float) -> Iterator[None]:
    """A second view of a folder in which what is new appears `seconds` later."""
    over = threading.Event()
    source.mkdir(parents=True, exist_ok=True)

    def copy() -> None:
        seen: dict[str, float] = {}
        while not over.wait(0.1):
            for folder in source.iterdir():
                first = seen.setdefault(folder.name, time.monotonic())
                late = time.monotonic() - first >= seconds and not folder.name.startswith(".")
                if late and not (target / folder.name).exists():
                    shutil.copytree(folder, target / f".{folder.name}", dirs_exist_ok=True)
                    os.replace(target / f".{folder.name}", target / folder.name)

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        with ExitStack() as stack:
            stack.callback(thread.join)
            stack.callback(over.set)
            yield
    finally:
        over.set()


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("part", choices=["speed", "learning", "pace", "faults"])
    parser.add_argument("--rounds", type=int, default=5, help="of speed")
    parser.add_argument("--seeds", type=int, default=3, help="of learning and pace")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "speed": lambda: speed(work, given.rounds),
            "learning": lambda: learning(work, given.seeds),
            "pace": lambda: pace(work, given.seeds),
            "faults": lambda: faults(work),
        }
        found = {given.part: parts[given.part]()}
    write(given.result, found)
    print(json.dumps(found[given.part], indent=2))


if __name__ == "__main__":
    main()
