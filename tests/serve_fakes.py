"""Stand-ins for the serve tests: adapters without torch, and a child that acts as vLLM does."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

from msgrpo.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from msgrpo.models.paths import NANO_DIR
from msgrpo.serve.adapters import base_shapes
from msgrpo.serve.preflight import free_port
from msgrpo.serve.vllm_command import Launch

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_safetensors(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Zeros of these shapes in float32."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        count = 1
        for side in shape:
            count *= side
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + 4 * count]}
        end += 4 * count
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def nano_lora_shapes(rank: int = 8) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape of a LoRA of this rank on every linear layer of nano."""
    shapes = {}
    for name, shape in base_shapes(NANO_DIR).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in _TARGETS and name.endswith(".weight"):
            shapes[f"base_model.model.{module}.lora_A.weight"] = (rank, shape[1])
            shapes[f"base_model.model.{module}.lora_B.weight"] = (shape[0], rank)
    return shapes


def write_adapter(
    folder: Path, *, rank: int = 8, shapes: dict[str, tuple[int, ...]] | None = None, **config: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "peft_type": "LORA",
        "base_model_name_or_path": "nano",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": list(_TARGETS),
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(values | config))
    write_safetensors(folder / ADAPTER_WEIGHTS, nano_lora_shapes(rank) if shapes is None else shapes)
    return folder


# Behaves as vLLM does at its worst: it ignores SIGTERM, has a child of its own, and leaves shared memory behind.
FAKE_VLLM = """
import http.server, json, multiprocessing.shared_memory, multiprocessing.resource_tracker, signal, subprocess
import sys, time
port, models = int(sys.argv[1]), sys.argv[2].split(",")
options = sys.argv[3:]
if "dies" in options:
    print("(APIServer pid=7) ERROR 11-21 10:00:00 [core.py:1] ValueError: the fake one cannot start")
    sys.exit(3)
if "stubborn" in options:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
memory = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
multiprocessing.resource_tracker.unregister(memory._name, "shared_memory")
print("shared memory", memory.name, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path != "/health" or "starting" not in options
        if "busy" in options and self.path == "/v1/models":
            options.remove("busy")
            time.sleep(600)
        body = json.dumps({"data": [{"id": name, "parent": None} for name in models]}).encode()
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer.request_queue_size = 256
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
print("serving", flush=True)
server.serve_forever()
"""


def fake_launch(*options: str, models: tuple[str, ...] = ("nano",), lists: tuple[str, ...] | None = None) -> Launch:
    """A launch of the fake. It lists `lists`, by default the models that the launch promises."""
    port = free_port()
    command = [sys.executable, "-c", FAKE_VLLM, str(port), ",".join(lists or models), *options]
    return Launch(command, {"PYTHONPATH": str(Path(__file__).parents[1])}, "127.0.0.1", port, list(models))
