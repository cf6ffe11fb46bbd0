"""Models in GGUF files, the format of llama.cpp: converted once into a folder that everything else can read.

The weights of such a file are mostly of four to eight bits. They are de-quantised, so what plays and is trained is a
model with rounded weights and not the original one. The folder lies in a cache and is named by the file's name and
SHA-256; a second start finds it there. No torch before something is converted.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from msgrpo.errors import ModelError, first_line, no_memory
from msgrpo.extras import needs
from msgrpo.files import check_regular, digest, expanded, open_lock, replace_json, replacing_folder, users_folder
from msgrpo.models.headers import save_base
from msgrpo.output import say
from msgrpo.text import counted

FACTS = "gguf.json"  # in a converted folder: the file that it was made of
CONVERSION = 2  # of the folder's name: what an older one made is made again (1 had not the file's splitting rule)
SCALED = "rope_freqs.weight"  # Llama 3.1's factors of the positions' frequencies
RULE = "tokenizer.ggml.pre"  # the name of the rule by which text is split before it becomes tokens
MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_FIELDS = 100_000  # of a header, and tensors
MOST_ITEMS = 4_000_000  # of a list: a vocabulary, or its merges
MOST_DIMENSIONS = 8
LONGEST_HEADER = 256 * 2**20  # bytes: a vocabulary of 250,000 tokens takes ten million
# The header's types by their number: scalars as `struct` writes them.
SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT = 32  # bytes, where a header names no other: the weights begin at a multiple of it
NO_BASES = {"general", "tokenizer", "t5", "umt5"}  # of transformers' list: fields of every file; no causal models


def is_gguf(base: str | Path) -> bool:
    """Whether a base is named as a GGUF file."""
    return str(base).lower().endswith(".gguf")


def cache_folder(of: str = "gguf") -> Path:
    """Where converted models lie, or something else: in $MSGRPO_CACHE, or in msgrpo in the user's cache."""
    own = os.environ.get("MSGRPO_CACHE")
    return (expanded(own) if own else users_folder("XDG_CACHE_HOME", ".cache")) / of


def checksum(file: Path) -> str:
    """The SHA-256 of the file. Raises ModelError where it cannot be read."""
    try:
        seen = file.stat()
        if not file.is_file():
            raise ModelError(f"{file} is no file", fix="give the path of a GGUF file")
        return _checksum(file, seen.st_size, seen.st_mtime_ns)
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> ModelError:
    return ModelError(
        f"the model {file} cannot be read: {error.strerror or error}",
        fix="check the path, and who may read it",
    )


@lru_cache(maxsize=64)
def _checksum(file: Path, size: int, changed_ns: int) -> str:
    return digest(file)


def folder_of(file: Path) -> Path:
    """Where the converted model lies, or will lie."""
    return cache_folder() / f"{file.stem}-{checksum(file)[:12]}-{CONVERSION}"


def named(file: Path) -> str:
    """How records name the model: the file's name and its SHA-256."""
    return f"{file.name} sha256:{checksum(file)}"


def ready(file: Path) -> Path:
    """The folder of the converted model; converts it where that has not been done.

    Written aside and moved into its place at once; of several processes one converts and the others wait. Raises
    ModelError for a file that is damaged, of another format, or of an architecture that is not read here.
    """
    folder = folder_of(file)
    if folder.is_dir():
        return folder
    header = check(file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(file, folder):
            if not folder.is_dir():
                _convert(file, folder, header)
    except OSError as error:
        raise ModelError(
            f"{file} cannot be converted into {folder}: {error.strerror or error}",
            fix="free some space there, or set MSGRPO_CACHE to a folder that can be written",
        ) from error
    return folder


@contextmanager
def _alone(file: Path, folder: Path) -> Iterator[None]:
    with open_lock(folder.parent / f".{folder.name}.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = f"fuser {shlex.quote(lock.name)} names it"
            say(f"waiting: another process converts {file}, or is stopped as it does ({who})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.parent.glob(f".{folder.name}.*.part"):  # by a converter that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield


def _convert(file: Path, folder: Path, header: Header) -> None:
    with needs(f"the model {file.name}", "gguf"):
        import gguf  # noqa: F401
    with replacing_folder(folder) as part:
        parameters = _save_dequantised(file, part, header.rule)
        if parameters != header.parameters:  # what it has no name for it passes over without a word
            raise ModelError(
                f"the model {file} holds {header.parameters:,} parameters, and transformers reads {parameters:,}",
                fix="give the model as a folder with safetensors",
            )
        facts = {"file": file.name, "sha256": checksum(file), "bytes": file.stat().st_size}
        facts |= {"architecture": header.architecture, "parameters": parameters, "splitting": header.rule}
        facts["weights"] = "de-quantised, in bfloat16"
        replace_json(part / FACTS, facts)


def _save_dequantised(file: Path, folder: Path, rule: str | None) -> int:
    """Write the model and its tokenizer as transformers does; returns the number of parameters.

    transformers does not take over the rule by which the file's text is split, so it is set here. A model that was
    loaded from a GGUF file counts as quantised and cannot be saved: its weights are copied into one that is made from
    the same settings without that mark.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
    from transformers.utils import logging

    from msgrpo.models.splitting import TEXTS, split_as

    logging.disable_progress_bar()
    vars(modeling_gguf_pytorch_utils)["tqdm"] = logging.tqdm  # its own bar heeds no such word, and drew over the app
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        if rule is not None:
            split_as(tokenizer.backend_tokenizer, rule)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
        )
        settings = loaded.config.to_dict() | {"dtype": "bfloat16", "_name_or_path": file.name}
        settings.pop("quantization_config", None)
        plain = type(loaded)(type(loaded.config).from_dict(settings)).to(torch.bfloat16)
        plain.load_state_dict(loaded.state_dict())
    except Exception as error:  # a damaged file raises nearly anything, in gguf and in transformers
        fix = "fetch the file again; or give a folder with safetensors instead"
        if no_memory(error) is not None:
            fix = "take a smaller model, or make room: other programs may hold the memory"
        raise ModelError(f"the model {file} cannot be converted: {first_line(error)}", fix=fix) from error
    if lost := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
        raise ModelError(
            f"the model {file} lacks {counted(len(lost), 'tensor')}, like {lost[0]}", fix="fetch the file again"
        )
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    save_base(plain, tokenizer, folder)
    again = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if any(again(text).input_ids != tokenizer(text).input_ids for text in TEXTS):
        raise ModelError(
            f"the model {file} splits text by the rule {rule}, and transformers reads its tokenizer as a "
            f"{type(again).__name__}, which splits it by another",
            fix="give the model as a folder with safetensors",
        )
    return sum(parameter.numel() for parameter in plain.parameters())


def check(file: Path) -> Header:
    """The file's header, after a look at it alone.

    Raises ModelError for another format, a header that is damaged or absurdly long, one file of several, and an
    architecture or a rule of splitting text that is not known.
    """
    header = _header(file)
    _check_whole(file, header)
    with needs(f"the model {file.name}", "gguf"):
        import gguf  # noqa: F401
    _check_known(file, header)
    if (size := file.stat().st_size) < (whole := header.weights_at + _weights_bytes(header)):
        raise ModelError(
            f"the model {file} is cut off: it has {size:,} bytes, and by its header {whole:,}",
            fix="fetch the file again",
        )
    return header


def _check_whole(file: Path, header: Header) -> None:
    """Raise ModelError for one file of several, and for a number of layers that cannot be."""
    parts = header.fields.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        raise ModelError(
            f"the model {file} is one of {str(parts)[:60]} files",
            fix="join them: llama-gguf-split --merge FIRST.gguf WHOLE.gguf",
        )
    layers = header.fields.get(f"{header.architecture}.block_count", 0)
    if not isinstance(layers, int) or not 0 <= layers <= len(header.tensors):
        raise ModelError(
            f"the model {file} is damaged: it claims {str(layers)[:60]} layers and holds "
            f"{counted(len(header.tensors), 'tensor')}",
            fix="fetch the file again",
        )


def _check_known(file: Path, header: Header) -> None:
    """Raise ModelError for what transformers does not read from GGUF, and for a model that nobody can ask."""
    with needs(f"the model {file.name}", "train"):
        from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

        from msgrpo.models.splitting import KNOWN
    fields, architecture = header.fields, header.architecture
    known = set(GGUF_SUPPORTED_ARCHITECTURES) - NO_BASES
    known -= {name for name in known if "_" in name}  # no file is named so, and of the experts' width nothing is read
    if architecture not in known:
        raise ModelError(
            f"the model {file} has the architecture {architecture[:60]!r}, which is not read from GGUF here; known: "
            f"{', '.join(sorted(known))}",
            fix="give the model as a folder with safetensors",
        )
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    if SCALED in header.tensors or scaling != "none":
        raise ModelError(
            f"the model {file} scales its positions ({SCALED if SCALED in header.tensors else scaling}), which "
            f"transformers does not read from GGUF",
            fix="give the model as a folder with safetensors",
        )
    if header.rule is not None and header.rule not in KNOWN:
        raise ModelError(
            f"the model {file} splits text into tokens by the rule {header.rule[:60]!r}, which is not known here; "
            f"known: {', '.join(sorted(KNOWN))}",
            fix="give the model as a folder with safetensors, which holds its rule",
        )
    if "tokenizer.chat_template" not in fields:
        raise ModelError(
            f"the model {file} has no chat template, so nobody knows how it is to be asked",
            fix="use an instruction-tuned model",
        )


def _weights_bytes(header: Header) -> int:
    """How many bytes the weights take by the header, as far as it names kinds of weights that are known."""
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    ends = [0]
    for tensor in header.tensors.values():
        if tensor.kind in sizes:
            block, block_bytes = sizes[tensor.kind]
            ends.append(tensor.offset + tensor.elements // block * block_bytes)
    return max(ends)


def parameters(file: Path) -> int:
    """How many parameters the file's list of tensors has. Raises ModelError as `check` does."""
    return _header(file).parameters


@dataclass(frozen=True)
class Tensor:
    """What a header says of a tensor."""

    elements: int
    kind: int  # of its weights, by gguf's number
    offset: int  # from where the weights begin


@dataclass(frozen=True)
class Header:
    """What a file's header says."""

    fields: dict[str, Any]  # scalars and texts; a list is None
    tensors: dict[str, Tensor]
    weights_at: int  # where in the file they begin

    @property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors.values())

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", "none"))

    @property
    def rule(self) -> str | None:
        """The name of the rule by which text is split for byte-level BPE; None of another tokenizer, or unnamed."""
        named = self.fields.get(RULE)
        return str(named) if self.fields.get("tokenizer.ggml.model") == "gpt2" and named else None


def _header(file: Path) -> Header:
    """Raises ModelError for a file that is damaged."""
    try:
        return _read_header(file)
    except OSError as error:
        raise _unreadable(file, error) from error
    except (UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"the model {file} is damaged: its header {error}", fix="fetch the file again") from error


def _read_header(file: Path) -> Header:
    """Scalars and texts by name, lists passed over. Raises ValueError for what no header holds."""
    check_regular(file)
    size = min(file.stat().st_size, LONGEST_HEADER)
    with file.open("rb") as handle:
        magic = handle.read(4)
        if magic != MAGIC:
            raise ModelError(
                f"{file} is no GGUF file: it begins with {magic!r}, not {MAGIC!r}", fix="fetch the file again"
            )
        reader = _Header(handle, size)
        version, tensors, count = reader.number("I"), reader.number("Q"), reader.number("Q")
        if version not in VERSIONS:
            raise ModelError(f"{file} is GGUF of version {version}; read are {' and '.join(map(str, VERSIONS))}")
        if not 0 < tensors <= MOST_FIELDS or count > MOST_FIELDS:
            raise ValueError(f"lists {tensors:,} tensors and {count:,} fields")
        fields = {}
        for _ in range(count):
            name, kind = reader.text(), reader.number("I")
            fields[name] = reader.value(kind)
        listed = dict(reader.tensor() for _ in range(tensors))
        alignment = fields.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"aligns its weights by {str(alignment)[:60]}")
        return Header(fields, listed, -(-handle.tell() // alignment) * alignment)


@dataclass
class _Header:
    """Reads a header's values one after another, never beyond `size` bytes."""

    handle: BinaryIO
    size: int

    def take(self, length: int) -> bytes:
        if length > self.size - self.handle.tell():
            raise ValueError(f"wants {length:,} bytes at {self.handle.tell():,}, of {self.size:,}")
        return self.handle.read(length)

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"holds a value of type {kind}")
        of, length = self.number("I"), self.number("Q")
        if length > MOST_ITEMS:
            raise ValueError(f"holds a list of {length:,} items")
        if of == STRING:
            for _ in range(length):
                self.take(self.number("Q"))
        elif of in SCALARS:
            self.take(length * struct.calcsize(f"<{SCALARS[of]}"))
        else:
            raise ValueError(f"holds a list of type {of}")
        return None

    def tensor(self) -> tuple[str, Tensor]:
        name = self.text()
        dimensions = self.number("I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"lists a tensor of {dimensions} dimensions")
        shape = [self.number("Q") for _ in range(dimensions)]
        return name, Tensor(prod(shape), self.number("I"), self.number("Q"))


@dataclass(frozen=True)
class Converted:
    """A model in the cache."""

    folder: Path
    file: str
    sha256: str
    bytes: int  # on this disk


def converted() -> list[Converted]:
    """The models in the cache."""
    models = []
    for facts in sorted(cache_folder().glob(f"*/{FACTS}")):
        with suppress(OSError, ValueError, KeyError, TypeError):  # somebody's own folder
            values = from_json(facts.read_bytes())
            size = sum(file.stat().st_size for file in facts.parent.iterdir())
            models.append(Converted(facts.parent, str(values["file"]), str(values["sha256"]), size))
    return models
