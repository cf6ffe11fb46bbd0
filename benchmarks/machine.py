"""What all scripts here share: their options, and the result file, which says where it was measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu() -> str | None:
    if _version("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def facts() -> dict[str, Any]:
    """Processor, cores, GPU, versions, and the command that made the result."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": _gpu(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "command": " ".join(["python", *sys.argv]),
    }


def options(about: str | None, *, result: bool = False) -> argparse.ArgumentParser:
    """The options of a script, whose first lines are its help; with `result` also where its figures go."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if result:
        parser.add_argument("--result", type=Path, required=True)
    return parser


def write(file: Path, found: Mapping[str, Any]) -> None:
    """Write a result; where it does not say itself on which machine, the facts of this one are added."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": facts(), **found}, indent=2) + "\n")
