"""A service that speaks Tinker's protocol, as the installed SDK speaks it, and computes with nano.

It shares no code with `msgrpo.train.tinker.service`: sampling and the loss are written down again.
One thread computes all requests in their order; samples that wait at the same time are one batch. `faults` change
what it does.
"""

from __future__ import annotations

import copy
import io
import json
import queue
import tarfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
import zstandard
from tinker.proto import tinker_public_pb2 as wire

from msgrpo.train.config import TrainConfig
from msgrpo.train.policy import Policy

KEY = "tml-test-key"


@dataclass
class Model:
    """An adapter with its optimizer."""

    rank: int
    policy: Policy
    optimizer: torch.optim.AdamW


@dataclass
class Sampler:
    """Published weights: the adapter, and the base into which it was merged, which samples faster."""

    model: Model
    adapter: Any
    merged: Any

    @classmethod
    def of(cls, model: Model) -> Sampler:
        return cls(model, model.policy.adapter_state(), copy.deepcopy(model.policy.model).merge_and_unload())


@dataclass
class Fake:
    """Start it as a context; `url` is its address."""

    faults: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)  # the paths of all requests
    keys: set[str | None] = field(default_factory=set)
    bodies: list[Any] = field(default_factory=list)  # of forward_backward
    steps: int = 0
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    saved: dict[str, tuple[int, Any, Any]] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Fake:
        self._work: queue.Queue[Any] = queue.Queue()
        self._ready = threading.Condition()
        fake = self

        class Handler(_Handler):
            service = fake

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """A connection that was closed on purpose is no news."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        threading.Thread(target=self._compute, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._work.put(None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def later(self, kind: str, body: Any) -> dict[str, Any]:
        """A promise of what the thread will compute."""
        request = uuid.uuid4().hex
        self._work.put((request, kind, body))
        return {"request_id": request}

    def result(self, request: str) -> Any:
        """What was computed; a refusal to wait longer where it is not there yet."""
        with self._ready:
            if not self._ready.wait_for(lambda: request in self.done, timeout=10):
                return {"type": "try_again", "request_id": request, "queue_state": "active"}
        return self.done[request]

    def _compute(self) -> None:
        while (first := self._work.get()) is not None:
            batch = [first]
            if first[1] == "asample":
                time.sleep(0.02)
                while (
                    not self._work.empty() and self._work.queue[0] is not None and self._work.queue[0][1] == "asample"
                ):
                    batch.append(self._work.get())
            try:
                results = self._samples(batch) if first[1] == "asample" else [getattr(self, f"_{first[1]}")(first[2])]
            except Exception as error:
                results = [{"error": f"{type(error).__name__}: {error}", "category": "server"}] * len(batch)
            with self._ready:
                self.done |= {request: result for (request, *_), result in zip(batch, results, strict=True)}
                self._ready.notify_all()

    def make(self, rank: int, seed: int) -> str:
        name = f"run-{len(self.models)}"
        policy = Policy(TrainConfig(lora_rank=rank, seed=seed))
        self.models[name] = Model(rank, policy, torch.optim.AdamW(policy.parameters, weight_decay=0.0))
        return name

    def _create_model(self, body: Any) -> Any:
        assert body["base_model"] == "nano"
        assert body["lora_config"]["train_unembed"] is False
        return {
            "model_id": self.make(body["lora_config"]["rank"], body["lora_config"].get("seed") or 0),
            "type": "create_model",
        }

    def _load_weights(self, body: Any) -> Any:
        rank, adapter, optimizer = self.saved[body["path"]]
        name = body.get("model_id") or self.make(rank, 0)
        if body.get("session_id"):  # 0.38 names the model that it makes by loading
            self.models[f"{body['session_id']}:train:{body['model_seq_id']}"] = self.models[name]
        self.models[name].policy.load_adapter_state(adapter)
        self.models[name].optimizer.load_state_dict(optimizer)
        return {"path": body["path"], "type": "load_weights"}

    def _save_weights(self, body: Any) -> Any:
        model, path = self.models[body["model_id"]], f"tinker://{body['model_id']}/weights/{body['path']}"
        state = model.optimizer.state_dict()
        self.saved[path] = (model.rank, model.policy.adapter_state(), copied(state))
        return {"path": "file:///etc/passwd" if "path" in self.faults else path, "type": "save_weights"}

    def _save_weights_for_sampler(self, body: Any) -> Any:
        model, name = self.models[body["model_id"]], body.get("path") or uuid.uuid4().hex
        stale = "stale" in self.faults and self.samplers
        self.samplers[name] = next(reversed(self.samplers.values())) if stale else Sampler.of(model)
        if body.get("path"):
            return {"path": f"tinker://{body['model_id']}/sampler_weights/{name}", "type": "save_weights_for_sampler"}
        return {"sampling_session_id": name, "type": "save_weights_for_sampler"}

    def _save_weights_external(self, body: Any) -> Any:
        self.samplers[body["path"]] = Sampler.of(self.models[body["model_id"]])
        return {
            "path": f"tinker://{body['model_id']}/external_weights/{body['path']}",
            "type": "save_weights_external",
        }

    def files(self, name: str) -> dict[str, bytes]:
        """The adapter of a sampler in PEFT's format; it names another base than it should."""
        sampler = self.samplers[name]
        files = sampler.model.policy.adapter_files(sampler.adapter)
        config = json.loads(files["adapter_config.json"]) | {"base_model_name_or_path": "evil/base"}
        return files | {"adapter_config.json": json.dumps(config).encode()}

    def archive(self, name: str) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for file, data in {**self.files(name), "../../evil": b"x"}.items():
                info = tarfile.TarInfo(file)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return packed.getvalue()

    def _samples(self, batch: list[Any]) -> list[Any]:
        found: dict[str, Any] = {}
        for session in {body["sampling_session_id"] for _, _, body in batch}:
            own = {request: body for request, _, body in batch if body["sampling_session_id"] == session}
            found |= dict(zip(own, self._sampled(self.samplers[session].merged, list(own.values())), strict=True))
        return [found[request] for request, *_ in batch]

    def _sampled(self, model: Any, bodies: list[Any]) -> list[Any]:
        prompts = [[token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]] for body in bodies]
        settings = [body["sampling_params"] for body in bodies]
        stops = {int(stop) for one in settings for stop in one.get("stop") or []}
        asked = zip(prompts, settings, strict=True)
        rows = [_Row(prompt, one, np.random.default_rng(one.get("seed"))) for prompt, one in asked]
        _answer(model, rows, stops)
        answers = []
        for body, row in zip(bodies, rows, strict=True):
            tokens, own = row.tokens, row.logprobs
            if "nan" in self.faults:
                own[0] = float("nan")
            if "alien" in self.faults:
                tokens[0] = 5_000
            stopped = tokens[-1] in stops
            answer = wire.SampleResponse(
                sequences=[
                    wire.SampledSequence(
                        stop_reason=wire.STOP_REASON_STOP if stopped else wire.STOP_REASON_LENGTH,
                        tokens=np.asarray(tokens, np.int32).tobytes(),
                        logprobs=np.asarray(own, np.float32).tobytes(),
                    )
                ]
            )
            if body.get("prompt_logprobs"):
                answer.prompt_logprobs = np.asarray(self._read(model, row.prompt), np.float32).tobytes()
            answers.append(answer.SerializeToString())
        return answers

    def _read(self, model: Any, tokens: list[int]) -> list[float]:
        """log p of each token of a prompt; nobody knows that of the first."""
        ids = torch.tensor([tokens])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits.log_softmax(-1)[0, :-1]
        off = 1.0 if "temperature" in self.faults else 0.0
        return [float("nan"), *(logprobs.gather(-1, ids[0, 1:, None])[:, 0] - off).tolist()]

    def _forward_backward(self, body: Any) -> Any:
        """−Σ min(w A, clip(w) A) over all tokens of all rows; its gradient is added to what is there."""
        self.bodies.append(body)
        model, found = self.models[body.model_id], []
        for row in body.data:
            inputs = {name: _array(tensor) for name, tensor in row.loss_fn_inputs.items()}
            tokens = np.concatenate([np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in row.model_input])
            targets = torch.tensor(inputs["target_tokens"])
            assert len(tokens) == len(targets)
            logits = model.policy.model(input_ids=torch.tensor(tokens.astype(np.int64))[None]).logits[0]
            logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            found.append(logprobs.detach().numpy().astype(np.float32))
            if body.forward_only:
                continue
            assert body.loss_fn == "ppo"
            ratio = (logprobs - torch.tensor(inputs["logprobs"])).exp()
            bounded = ratio.clamp(
                body.loss_fn_config["clip_low_threshold"], body.loss_fn_config["clip_high_threshold"]
            )
            advantages = torch.tensor(inputs["advantages"])
            (-torch.minimum(ratio * advantages, bounded * advantages).sum()).backward()
        lengths = np.cumsum([0, *(array.nbytes for array in found)])
        record = wire.ArrayRecord(num_datums=len(found))
        record.fields["logprobs"].CopyFrom(
            wire.BatchedTensor(
                data=b"".join(array.tobytes() for array in found),
                offsets=lengths.astype(np.int64).tobytes(),
                dtype=wire.DTYPE_FLOAT32,
            )
        )
        answer = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record])
        return answer.SerializeToString()

    def _optim_step(self, body: Any) -> Any:
        model, adam = self.models[body["model_id"]], body["adam_params"]
        norm = torch.nn.utils.clip_grad_norm_(model.policy.parameters, adam["grad_clip_norm"])
        for group in model.optimizer.param_groups:
            group |= {"lr": adam["learning_rate"], "betas": (adam["beta1"], adam["beta2"]), "eps": adam["eps"]}
            group["weight_decay"] = adam["weight_decay"]
        model.optimizer.step()
        model.optimizer.zero_grad()
        self.steps += 1
        return {"metrics": {"grad_norm:mean": float(norm)}, "type": "optim_step"}


@dataclass
class _Row:
    """One answer as it grows; its numbers are drawn from its own seed."""

    prompt: list[int]
    settings: Any
    numbers: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def ended(self, stops: set[int]) -> bool:
        return len(self.tokens) >= self.settings["max_tokens"] or (bool(self.tokens) and self.tokens[-1] in stops)


def _answer(model: Any, rows: list[_Row], stops: set[int]) -> None:
    """Sample token by token, all rows in one batch, padded at the left."""
    longest = max(len(row.prompt) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row.prompt)) + row.prompt for row in rows])
    mask = torch.tensor([[0] * (longest - len(row.prompt)) + [1] * len(row.prompt) for row in rows])
    places, past = (mask.cumsum(1) - 1).clamp(min=0), None
    while not all(row.ended(stops) for row in rows):
        with torch.no_grad():
            out = model(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=past, use_cache=True)
        past, logprobs = out.past_key_values, out.logits[:, -1].log_softmax(-1)
        drawn = []
        for row, own in zip(rows, logprobs, strict=True):
            token = min(int(torch.searchsorted(own.exp().cumsum(0), row.numbers.random())), len(own) - 1)
            drawn.append(token)
            if not row.ended(stops):
                row.tokens.append(token)
                row.logprobs.append(float(own[token]))
        ids, places = torch.tensor(drawn)[:, None], places[:, -1:] + 1
        mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.long)], 1)


def copied(state: Any) -> Any:
    """A copy of an optimizer's state with tensors of its own."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


def _array(tensor: Any) -> Any:
    return np.frombuffer(tensor.dense, np.int64 if tensor.dtype == wire.DTYPE_INT64 else np.float32).copy()


class _Handler(BaseHTTPRequestHandler):
    """The protocol's paths."""

    protocol_version = "HTTP/1.1"
    service: Fake

    def log_message(self, *given: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._answered(None)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "zstd":
            raw = zstandard.ZstdDecompressor().decompress(raw)
        if "x-protobuf" in self.headers.get("Content-Type", ""):
            body = wire.ForwardBackwardRequest()
            body.ParseFromString(raw)
            self._answered(body)
        else:
            self._answered(json.loads(raw or b"{}"))

    def _answered(self, body: Any) -> None:
        fake, path = self.service, self.path.partition("?")[0]
        fake.asked.append(path)
        if "gone" in fake.faults and not path.endswith("healthz"):
            self.close_connection = True
            self.connection.close()
            return None
        if path.startswith("/files/"):
            assert self.headers.get("X-API-Key") is None  # a key goes to the service's own paths only
            return self._send(fake.files("final")[path.removeprefix("/files/")], "application/octet-stream")
        if path == "/archive":
            return self._send(fake.archive("final"), "application/octet-stream")
        key = self.headers.get("X-API-Key")
        if path == "/api/v1/healthz":
            return self._send({"status": "ok"})
        fake.keys.add(key)
        if key != KEY:
            return self._send({"detail": "Invalid API key"}, status=401)
        name = path.removeprefix("/api/v1/")
        answers = {
            "client/config": {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False, "fwdbwd_max_chunk_len": 7},
            "create_session": {"session_id": "session", "type": "create_session"},
            "session_heartbeat": {"type": "session_heartbeat"},
            "sessions/session/finish": {},
            "telemetry": {"status": "accepted"},
            "get_info": {
                "model_data": {"model_name": "nano"},
                "model_id": (body or {}) and dict_of(body).get("model_id"),
            },
            "weights_info": {"base_model": "nano", "is_lora": True, "lora_rank": 16, "train_unembed": False},
        }
        if name in answers:
            return self._send(answers[name])
        if name == "retrieve_future":
            found = fake.result(body["request_id"])
            if isinstance(found, bytes):
                return self._send(found, "application/x-protobuf")
            return self._send(found)
        if name == "asample":
            return self._send(fake.later(name, body) | {"sample_sequence_ids": [uuid.uuid4().hex]})
        if hasattr(fake, f"_{name}"):
            return self._send(fake.later(name, body))
        if name.endswith("/external_weights_urls") and "no download" not in fake.faults:
            files = ("adapter_config.json", "adapter_model.safetensors", "../../evil")
            urls = {file: f"{fake.url}/files/{file}" for file in files}
            return self._send({"urls": urls, "expires": "2099-01-01T00:00:00Z"})
        if name.endswith("/archive") and "no download" not in fake.faults:
            return self._send(b"", status=302, location=f"{fake.url}/archive")
        return self._send({"detail": "not here"}, status=404)

    def _send(self, body: Any, kind: str = "application/json", status: int = 200, location: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(data)


def dict_of(body: Any) -> dict[str, Any]:
    return body if isinstance(body, dict) else {}
