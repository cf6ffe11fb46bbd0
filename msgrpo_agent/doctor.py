"""Report what is installed, what can run here, and the command that closes each gap."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement

from msgrpo.extras import EXTRAS
from msgrpo.install import install_command
from msgrpo.models.gguf_file import cache_folder, converted
from msgrpo.text import counted

LONGEST_S = 120  # for importing one package
DISTRIBUTION = {"stable_baselines3": "stable-baselines3", "textual_serve": "textual-serve", "pyspiel": "open_spiel"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `fix` is the command that helps, None where none is needed."""

    part: str
    ok: bool
    state: str
    fix: str | None = None


def examine() -> list[Finding]:
    """Look at Python, the extras, the GPU and vLLM; imports nothing heavy into this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = Finding(
        "python", True, f"{platform.python_version()} on {platform.machine()}, {counted(cores or 1, 'core')}"
    )
    return [here, *map(_extra, EXTRAS), _gpu(), _vllm(), _cache()]


def _extra(name: str) -> Finding:
    missing = [package for package in EXTRAS[name] if find_spec(package) is None]
    if missing:
        return Finding(name, False, f"missing: {', '.join(missing)}", install_command(name))
    if unfit := _unfit(name):
        return Finding(name, False, ", ".join(unfit), install_command(name))
    versions = [f"{package} {_version(package)}" for package in EXTRAS[name]]
    return Finding(name, True, ", ".join(versions))


def _version(package: str) -> str:
    try:
        return version(DISTRIBUTION.get(package, package))
    except PackageNotFoundError:
        return "(no metadata)"


def _unfit(*extras: str) -> list[str]:
    """Packages of a version that these extras do not allow. pip does not warn of them when it installs others."""
    unfit = []
    for wanted in map(Requirement, requires("msgrpo") or ()):
        if wanted.marker is None or not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        with suppress(PackageNotFoundError):
            if not wanted.specifier.contains(found := version(wanted.name), prereleases=True):
                unfit.append(f"{wanted.name} is {found}, needed is {wanted.specifier}")
    return unfit


def _gpu() -> Finding:
    if find_spec("torch") is None:
        return Finding("gpu", False, "unknown without torch", install_command("train"))
    asked = _ask("import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')")
    name = asked.stdout.strip()
    return Finding("gpu", bool(name), name or "none: training and rollouts run on the CPU")


def _vllm() -> Finding:
    if not sys.platform.startswith("linux"):
        return Finding("serve", False, f"vLLM does not run on {sys.platform}")
    extra = "serve" if _gpu().ok else "serve-cpu"
    if find_spec("vllm") is None:
        return Finding("serve", False, "vLLM is not installed", install_command(extra))
    if unfit := _unfit("serve", "serve-cpu"):
        return Finding("serve", False, ", ".join(unfit), install_command(extra))
    asked = _ask("import vllm; print(vllm.__version__)")
    if asked.returncode == 0:
        return Finding("serve", True, f"vLLM {asked.stdout.strip().splitlines()[-1]}")
    last = asked.stderr.strip().splitlines()[-1] if asked.stderr.strip() else "unknown reason"
    # CUDA builds of these arrive beside the CPU build of torch and break the import of vLLM.
    fix = "pip uninstall -y torchvision torchaudio torchcodec" if "torchvision" in asked.stderr else None
    return Finding("serve", False, f"vLLM cannot be imported: {last}", fix)


def _cache() -> Finding:
    """What GGUF files were converted into; the folder may be removed at any time."""
    models = converted()
    size = sum(model.bytes for model in models) / 2**30
    names = ", ".join(f"{model.file} ({model.sha256[:12]})" for model in models)
    state = (
        f"{len(models)} converted, {size:.1f} GiB in {cache_folder()}: {names}" if models else "none was converted"
    )
    return Finding("gguf models", True, state)


def _ask(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", program]  # -P: nothing in the present folder is imported
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {LONGEST_S} s")
