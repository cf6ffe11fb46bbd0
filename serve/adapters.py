"""Adapters on disk: which there are, and whether vLLM may serve one on a given base.

vLLM accepts an adapter that was trained for another model's shape without a word, so the shapes are compared here,
from the headers of the safetensors files: no torch is imported and no weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgrpo.errors import LONGEST_REASON, ModelError, RunError
from msgrpo.files import is_folder, is_part, replacing_folder
from msgrpo.models.headers import Shapes, tensor_shapes
from msgrpo.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_of, by_layer, read_adapter_config
from msgrpo.models.paths import adapters_base, base_path
from msgrpo.run_log import CONFIG, read_rows, trained_on

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM's --max-lora-rank takes
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")  # others change the base's own weights
_UNSERVABLE = ("lm_head", "embed_tokens")  # vLLM has no LoRA layer for these


@dataclass(frozen=True)
class Adapter:
    """A complete adapter that vLLM supports. `name` is the model name clients ask for; `folder` has no links."""

    name: str
    folder: Path
    base: str
    rank: int


@dataclass(frozen=True)
class TrainedAdapter:
    """One line of `msgrpo adapters`. `problem` says why it cannot be served; None when nothing speaks against it."""

    name: str
    folder: str
    base: str | None
    scenario: str | None
    result: str | None
    problem: str | None


def served_rank(rank: int) -> int:
    """The smallest rank that vLLM can be started with for adapters of this rank. Raises ModelError above 512."""
    for allowed in RANKS:
        if rank <= allowed:
            return allowed
    raise ModelError(f"vLLM serves adapters up to rank {RANKS[-1]}, this one has {rank}")


def base_shapes(folder: Path) -> Shapes:
    """The shapes of every weight of a base model's folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no safetensors weights", fix="give the folder of a model in that format")
    return {name: shape for file in files for name, shape in tensor_shapes(file).items()}


def read_adapter(folder: Path, name: str | None = None) -> Adapter:
    """The adapter in `folder`, named after it. Raises ModelError when incomplete or not supported by vLLM."""
    if not is_folder(folder):
        raise ModelError(f"there is no adapter folder {folder}", fix="msgrpo adapters lists those under runs/")
    if not (folder / ADAPTER_WEIGHTS).is_file() and list(folder.glob("adapter_model.*")):
        raise ModelError(
            f"{folder} holds its weights in another format than safetensors", fix=f"convert them to {ADAPTER_WEIGHTS}"
        )
    folder = folder.resolve()
    config = read_adapter_config(folder)
    refused = _unsupported(config)
    if refused:
        raise ModelError(f"vLLM cannot serve the adapter {folder}: {'; '.join(refused)}", fix="train a plain LoRA")
    rank = max([config["r"], *config.get("rank_pattern", {}).values()])
    served_rank(rank)
    for module, (a, b) in _pairs(folder).items():
        if module.rpartition(".")[2] in _UNSERVABLE:
            raise ModelError(f"vLLM cannot serve the adapter {folder}: it changes {module}", fix="leave that one out")
        if a[0] != b[1] or a[0] > rank:
            raise ModelError(f"the adapter {folder} contradicts itself: {module} has rank {a[0]}, the config {rank}")
    return Adapter(name or folder.name, folder, config["base_model_name_or_path"], rank)


def check_fits(adapter: Adapter, base: Path) -> None:
    """Raise ModelError unless every layer of the adapter has the shape of the base's layer of that name."""
    shapes = base_shapes(base)
    for module, (a, b) in _pairs(adapter.folder).items():
        weight = shapes.get(f"{module}.weight")
        if weight is None and any(name.startswith(f"{module}.") for name in shapes):
            continue  # a quantised layer is packed, so its stored shape differs
        if weight is None:
            raise ModelError(
                f"the adapter {adapter.folder} was not made for {adapter.base}: it has no layer {module}",
                fix="serve it with the base that it was trained on",
            )
        if weight != (b[0], a[1]):
            raise ModelError(
                f"the adapter {adapter.folder} was not made for {adapter.base}: "
                f"{module} is {'x'.join(map(str, weight))} there, the adapter's is {b[0]}x{a[1]}",
                fix="serve it with the base that it was trained on",
            )


def same_base(first: str, second: str) -> bool:
    """Whether two names mean the same base: the same folder, or the same hub name."""
    a, b = Path(base_path(first)), Path(base_path(second))
    return a.resolve() == b.resolve() if is_folder(a) and is_folder(b) else first == second


def write_version(root: Path, name: str, files: Mapping[str, bytes]) -> None:
    """Write an adapter's files as the folder `name`, which appears in one move. Raises OSError."""
    with replacing_folder(root / name) as part:
        for file, data in files.items():
            (part / file).write_bytes(data)


def list_runs(root: Path) -> list[TrainedAdapter]:
    """Every adapter folder below `root` (or `root` itself), with what its run wrote about itself."""
    folders = (file.parent for file in sorted(root.rglob(ADAPTER_CONFIG)))
    return [_describe(folder) for folder in folders if not is_part(folder)]  # one that is being exported is not there


def _describe(folder: Path) -> TrainedAdapter:
    base, problem = None, None
    try:
        base = base_of(folder)
        adapter = read_adapter(folder)
        if is_folder(base_path(adapters_base(folder))):
            check_fits(adapter, Path(base_path(base)))
    except ModelError as error:
        problem = error.message
    scenario = trained_on(folder / CONFIG)  # an adapter that was not trained here has no such file
    said = [text and text[:LONGEST_REASON] for text in (base, scenario, _result(folder), problem)]
    return TrainedAdapter(folder.resolve().name, str(folder), *said)


def _result(run: Path) -> str | None:
    """The score of the first and of the last evaluation of a run; None where its metrics cannot be read."""
    try:
        rows = [row for row in read_rows(run) if row["kind"] == "eval"]
        score = rows[-1]["score"]
        return f"{score} {rows[0][score]:.3g} → {rows[-1][score]:.3g} after update {rows[-1]['step']}"
    except (RunError, OSError, IndexError, KeyError, TypeError, ValueError):
        return None  # nothing evaluated yet, or not written by a run


def _unsupported(config: dict[str, Any]) -> list[str]:
    """What vLLM's own PEFT reader would refuse in an adapter's config: one reason each."""
    refused = []
    ranks = config.get("rank_pattern", {})
    if not isinstance(ranks, dict) or not all(isinstance(rank, int) for rank in ranks.values()):
        refused.append(f"its rank_pattern is {ranks!r}")
    if config.get("peft_type", "LORA") != "LORA":
        refused.append(f"its type is {config['peft_type']}, not LORA")
    alpha = config.get("lora_alpha")
    scaled = isinstance(alpha, (int, float)) and math.isfinite(alpha)
    if not isinstance(config.get("r"), int) or config["r"] < 1 or not scaled:
        refused.append("its config names no rank (r) and lora_alpha")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        refused.append("it trains biases")
    named = {
        "use_dora": "DoRA",
        "modules_to_save": "modules_to_save",
        "layer_replication": "layer replication",
        "alora_invocation_tokens": "activated LoRA",
        "use_bdlora": "block-diagonal LoRA",
        "use_qalora": "QALoRA",
    }
    refused += [f"it uses {text}" for key, text in named.items() if config.get(key)]
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        refused.append(f"init_lora_weights={init} changes the base's weights")
    return refused


def _pairs(folder: Path) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Layer name → shapes of (A, B): r x in and out x r."""
    shapes = tensor_shapes(folder / ADAPTER_WEIGHTS)
    layers = by_layer(shapes)
    for module, parts in layers.items():
        for part, name in parts.items():
            if part not in ("A", "B") or not module or len(shapes[name]) != 2:
                raise ModelError(f"vLLM cannot serve the adapter {folder}: {name} is not part of a plain LoRA")
    lonely = [module for module, parts in layers.items() if len(parts) != 2]
    if lonely or not layers:
        raise ModelError(
            f"{folder} is no complete adapter: " + (f"{lonely[0]} lacks a half" if lonely else "it is empty")
        )
    return {module: (shapes[parts["A"]], shapes[parts["B"]]) for module, parts in layers.items()}
