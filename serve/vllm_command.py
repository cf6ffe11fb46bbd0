"""The vLLM command and environment of one server; built without starting anything."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msgrpo.errors import UsageError
from msgrpo.files import expanded, is_folder
from msgrpo.loopback import bracketed, is_loopback
from msgrpo.models.gguf_file import cache_folder, is_gguf
from msgrpo.models.paths import NANO, base_path
from msgrpo.serve.adapters import Adapter, same_base, served_rank

Engine = Literal["cuda", "cpu"]

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
NAMED = "--adapter NAME=DIR, --name NAME for the base"  # how a person names models
KEY_VARIABLE = "MSGRPO_API_KEY"
DRAIN_S = 10  # requests in flight may end in this time after a stop
CACHE_GIB, CACHE_GIB_NANO = 4, 1  # of keys and values, on a CPU
RUNTIME_SLOTS = 5  # adapters that one batch may mix when clients load their own: rollouts ahead have so many versions
_OWNED = (
    *("--model", "--served-model-name", "--host", "--port", "--uds", "--api-key", "--lora-modules"),
    *("--enable-lora", "--root-path", "--config", "--headless", "--grpc"),
    *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"),
    "--enable-ssl-refresh",
)


@dataclass(frozen=True)
class Request:
    """What a person asked for, with every default filled in. `name` is the base's model name."""

    base: str = NANO
    adapters: tuple[Adapter, ...] = ()
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    runtime_adapters: Path | None = None  # clients may load adapters from below this folder
    runtime_rank: int = 16  # the largest rank that those may have
    dtype: str | None = None  # overrides the base's own dtype on a GPU
    gpu_share: float | None = None  # share of the GPU's memory; None: vLLM's default
    extra: tuple[str, ...] = ()  # vLLM's own options, passed on


@dataclass(frozen=True)
class Launch:
    """A command, the variables that it needs beside the caller's environment, and the model names that it serves."""

    command: list[str]
    environment: dict[str, str]
    host: str
    port: int
    models: list[str]
    key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://{bracketed(self.host)}:{self.port}/v1"

    def shell(self) -> str:
        """One line for a shell. The key is left to the variable that it comes from, which must be set there."""
        settings = {name: shlex.quote(value) for name, value in self.environment.items()}
        if self.key:
            settings["VLLM_API_KEY"] = f'"${{{KEY_VARIABLE}:?}}"'
        return " ".join(["env", *(f"{name}={value}" for name, value in settings.items()), shlex.join(self.command)])


def common_base(adapters: tuple[Adapter, ...], asked: str | None) -> str:
    """The base of all adapters; nano when nothing is asked for. Raises UsageError when they differ."""
    base = asked or (adapters[0].base if adapters else NANO)
    for adapter in adapters:
        if not same_base(adapter.base, base):
            raise UsageError(
                f"the adapter {adapter.folder} was trained on {adapter.base}, not on {base}",
                fix="one server has one base: start one for each. Is it a copy of the same model? "
                "Then name it in the adapter's adapter_config.json (base_model_name_or_path)",
            )
    return base


def base_name(base: str) -> str:
    """The model name of a base: `nano`, a hub name, or the name of its folder or GGUF file."""
    there = base != NANO and (is_gguf(base) or is_folder(expanded(base)))
    return expanded(base).resolve().name if there else base


def build(request: Request, engine: Engine, weights: str | None = None) -> Launch:
    """The launch of `request`. `weights` is where the base's files are, when that is already known.

    Raises UsageError for names that clash, options that msgrpo sets itself, and an open host without a key.
    """
    base = request.name or base_name(request.base)
    names = [base, *(adapter.name for adapter in request.adapters)]
    _check_names(names)
    _check_extra(request.extra)
    if not is_loopback(request.host) and not request.key:
        raise UsageError(f"{request.host} can be reached by others: it needs a key", fix=f"set {KEY_VARIABLE}")
    if not re.fullmatch(r"[\w.:-]+", request.host, re.ASCII):
        raise UsageError(f"--host {request.host!r} is no host", fix="--host 127.0.0.1")
    weights = weights or base_path(request.base)
    # The last of two equal options wins: defaults come before the caller's options, required ones after them.
    command = [
        *(sys.executable, "-P", "-m", ENTRY),  # -P: nothing in the present folder is imported
        *_tuned(request, engine),
        *request.extra,
        *("--model", weights, "--served-model-name", base),
        *("--host", request.host, "--port", str(request.port)),
        *_lora(request, base),
    ]
    command += ["--middleware", "msgrpo.serve.guard.Guard"]
    return Launch(
        command, _environment(request, engine, weights), request.host, request.port, names, request.key or None
    )


def _tuned(request: Request, engine: Engine) -> list[str]:
    options = ["--uvicorn-log-level", "warning", "--shutdown-timeout", str(DRAIN_S)]
    # Otherwise the base's generation_config.json (Qwen2.5's penalises repetition) changes what clients ask for.
    options += ["--generation-config", "vllm"]
    if engine == "cpu":
        # A seeded request whose prompt is split by chunked prefill kills the CPU engine. Blocks of 32 (the default
        # is 128) let short prompts share their prefix. float32 is what nano computes in, in process.
        options += ["--dtype", "float32", "--block-size", "32", "--no-enable-chunked-prefill"]
    elif request.dtype or request.base == NANO:
        options += ["--dtype", request.dtype or "float32"]
    if request.max_model_len is not None:
        options += ["--max-model-len", str(request.max_model_len)]
    if request.tensor_parallel_size > 1:
        options += ["--tensor-parallel-size", str(request.tensor_parallel_size)]
    if request.data_parallel_size > 1:
        options += ["--data-parallel-size", str(request.data_parallel_size)]
    if request.adapters or request.runtime_adapters:
        slots = len(request.adapters) + (RUNTIME_SLOTS if request.runtime_adapters else 0)
        rank = max([adapter.rank for adapter in request.adapters] + [1])
        rank = max(rank, request.runtime_rank) if request.runtime_adapters else rank
        options += ["--max-lora-rank", str(served_rank(rank)), "--max-loras", str(slots)]
    if (
        request.runtime_adapters
    ):  # training needs the log-probabilities of the distribution that answers were drawn from
        options += ["--logprobs-mode", "processed_logprobs"]
    if request.gpu_share is not None and engine == "cuda":
        options += ["--gpu-memory-utilization", str(request.gpu_share)]
    return options


def _lora(request: Request, base: str) -> list[str]:
    if not request.adapters and not request.runtime_adapters:
        return []
    modules = [
        json.dumps({"name": adapter.name, "path": str(adapter.folder), "base_model_name": base})
        for adapter in request.adapters
    ]
    return ["--enable-lora", *(["--lora-modules", *modules] if modules else [])]


def _environment(request: Request, engine: Engine, weights: str) -> dict[str, str]:
    environment = {
        "PYTHONSAFEPATH": "1",  # import nothing from the folder in which the command was started
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",  # the adapter resolvers among them have no path confinement
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if request.runtime_adapters else "0",
        "VLLM_API_KEY": request.key or "",  # not on the command line, where `ps` shows it
    }
    if Path(weights).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if engine == "cpu":  # without it vLLM wants 92 % of the machine's memory, and does not start where less is free
        chosen = CACHE_GIB_NANO if request.base == NANO else CACHE_GIB
        environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", str(chosen))
        # torch compiles for the first request for log-probabilities. By itself it does so, with all its headers, into
        # the folder that ends with the server: a C++ compiler was at work for ten seconds after each start.
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ and _can_write(cache_folder("inductor")):
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder("inductor"))
        environment["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    if request.runtime_adapters:
        environment["MSGRPO_ADAPTER_ROOT"] = str(request.runtime_adapters.resolve())
        environment["MSGRPO_SERVED_BASE"] = request.base
        environment["MSGRPO_SERVED_WEIGHTS"] = weights
        environment["MSGRPO_SERVED_ADAPTERS"] = json.dumps([str(adapter.folder) for adapter in request.adapters])
    return environment


def child_environment(launch: Launch, ours: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the child: the caller's, with the launch's variables over it."""
    return dict(ours) | launch.environment


def _check_names(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two models would be named {name!r}", fix=f"name them apart: {NAMED}")
        if not is_model_name(name):
            raise UsageError(f"{name!r} is no model name", fix=f"give it one of letters, digits and . _ - /: {NAMED}")


def is_model_name(name: str) -> bool:
    """Whether a name is a valid model name for clients, URLs and folders."""
    odd = any(c.isspace() or c in "#\"'" or not c.isprintable() for c in name)
    return bool(name) and not name.startswith("-") and ".." not in name.split("/") and not odd


def _check_extra(extra: tuple[str, ...]) -> None:
    """Refuse abbreviations of our own options too, since vLLM's parser accepts them."""
    for word in extra:
        option = re.split("[=.]", word)[0].replace("_", "-")
        if re.match("--[a-z]", option) and any(owned.startswith(option) for owned in _OWNED):
            raise UsageError(
                f"{option} is set by msgrpo serve itself",
                fix="use its own --host, --port, --base, --name, --adapter, and a reverse proxy for TLS and paths",
            )


def _can_write(folder: Path) -> bool:
    """Whether the folder can be written, or made."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return there.is_dir() and os.access(there, os.W_OK)
