"""`msgrpo export RUN --to merged | gguf | hub`: what was trained here, in files that other tools load.

Nothing is uploaded. The files are written beside `--out` and take its name in one move.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgrpo.errors import ModelError, MsgrpoError, UsageError, first_line
from msgrpo.extras import needs
from msgrpo.files import new_parents, replace_json, replace_text, replacing_folder
from msgrpo.models.asked import TAUGHT, trained_as
from msgrpo.models.card import card, shown_base, shown_setting
from msgrpo.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter_config
from msgrpo.prompt import Asked

DTYPES = {"merged": ("bfloat16", "float16", "float32"), "gguf": ("float16", "bfloat16", "float32", "q8_0"), "hub": ()}
LONGEST_NAME = 80  # characters of a hub's name, which with its owner's may have 96
MUCH = 0.1  # of the adapter's change, by which rounding moves the weights


@dataclass(frozen=True)
class Order:
    """What is to be written: the run, the folder and the place that it is moved to, how weights are stored (None: the
    usual way).
    """

    run: Path
    folder: Path
    place: Path
    name: str
    dtype: str | None


def export_run(run: Path, to: str, out: Path, dtype: str | None = None) -> list[str]:
    """Write the files and return what a person should know, the next command last.

    What is asked for is checked before torch is loaded. Raises UsageError for a folder that holds something,
    ModelError for a run without an adapter or what cannot be written in that form.
    """
    if dtype is not None and dtype not in DTYPES[to]:
        known = ", ".join(DTYPES[to]) or "none: the adapter is copied as it is"
        raise UsageError(f"--dtype {dtype!r} is no way to write --to {to}", fix=f"known: {known}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} is there already", fix="choose another --out")
    read_adapter_config(run)
    asked = trained_as(run)
    with needs(f"--to {to}", "train"):
        from msgrpo.models.loading import teacher_of
        from msgrpo.models.merged import Adapter
    try:
        with new_parents(out), replacing_folder(out) as part:
            changes = Adapter.of(run).changes  # what is damaged is not handed on
            *notes, command = WRITERS[to](Order(run, part, out, run.resolve().name, dtype))
            teacher = {key: shown_setting(name) for key, name in teacher_of(run).items()}
            taught = asked.model_dump(exclude_defaults=True) | teacher  # it is asked as the run was
            replace_json(part / TAUGHT, taught)
    except MsgrpoError:
        raise
    except Exception as error:  # the disk, or one of three libraries that write models
        fix = "choose another --out" if isinstance(error, OSError) else None
        raise ModelError(f"{run} could not be written to {out}: {first_line(error)}", fix=fix) from error
    unchanged = [] if changes else ["the adapter changes nothing: what is written plays as its base does"]
    return [*notes, *unchanged, *_asked(asked), command]


def _asked(asked: Asked) -> list[str]:
    """How the run was asked in training, where that was not as usual: the weights do not hold it, the card does."""
    said = f"it was trained with {asked.said}; ask it so elsewhere too: README.md has it"
    long = f"its answers had up to {asked.max_tokens} tokens in training: allow as many elsewhere"
    return [*([said] if asked.options else []), *([long] if asked.length else [])]


def _rounded(lost: float | None, dtype: str) -> list[str]:
    if lost is None:
        return []
    keeps = "; --dtype float32 keeps it" if lost > MUCH else ""
    return [f"rounding to {dtype} moved the weights by {lost:.1%} of the adapter's change{keeps}"]


def _merged(order: Order) -> list[str]:
    from torch import bfloat16, float16, float32

    from msgrpo.models.merged import write_merged

    dtypes = {None: None, "bfloat16": bfloat16, "float16": float16, "float32": float32}
    chosen, lost = write_merged(order.run, order.folder, dtypes[order.dtype])
    replace_text(order.folder / "README.md", card(order.run, order.name, merged=True))
    rounded = _rounded(lost, str(chosen).removeprefix("torch."))
    played = ["--agent", f"base:{order.place}", *trained_as(order.run).length]
    return [*rounded, f"play it: msgrpo play SCENARIO {shlex.join(played)}"]


def _gguf(order: Order) -> list[str]:
    with needs("--to gguf", "gguf"):
        from msgrpo.models.gguf_writer import as_stored, write_gguf, write_gguf_adapter
    from msgrpo.models.merged import lost_in, merged

    model, tokenizer, adapter = merged(order.run)
    if not adapter.whole:
        raise ModelError(
            f"the adapter {order.run} holds more than a LoRA's two matrices a layer (DoRA's do): no GGUF adapter can",
            fix="--to merged, and then llama.cpp's convert_hf_to_gguf.py on that folder",
        )
    dtype = order.dtype or "float16"
    file = order.folder / f"{order.name}-{dtype}.gguf"
    rounded = _rounded(lost_in(model, adapter, lambda weight: as_stored(weight, dtype)), dtype)
    notes = write_gguf(model, tokenizer, adapter.base, file, order.name, dtype)
    write_gguf_adapter(adapter, model.config, order.folder / f"{order.name}-lora.gguf", order.name)
    replace_text(order.folder / "README.md", card(order.run, order.name, merged=True))
    asked = trained_as(order.run)
    played = ["--agent", f"endpoint:http://127.0.0.1:8080/v1#{order.name}", *asked.options, *asked.length]
    return [
        *rounded,
        *notes,
        f"{order.name}-lora.gguf is the adapter alone, for a GGUF file of its base",
        f"serve it: llama-server -m {shlex.quote(str(order.place / file.name))} --port 8080",
        f"play it: msgrpo play SCENARIO {shlex.join(played)}",
    ]


def _hub(order: Order) -> list[str]:
    """The adapter and its card; a path of this machine is left out of the adapter's config."""
    config = read_adapter_config(order.run)
    config["base_model_name_or_path"] = shown_base(config["base_model_name_or_path"])
    replace_json(order.folder / ADAPTER_CONFIG, config)
    shutil.copyfile(order.run / ADAPTER_WEIGHTS, order.folder / ADAPTER_WEIGHTS)
    replace_text(order.folder / "README.md", card(order.run, order.name, merged=False))
    notes = [f"read it first: {order.place / 'README.md'}"]
    if "/" not in config["base_model_name_or_path"]:
        notes.append("its base is on no hub, so others cannot load the adapter: --to merged holds all that they need")
    upload = ["hf", "upload", f"YOUR-NAME/{hub_name(order.name)}", str(order.place)]
    return [*notes, f"upload it: {shlex.join(upload)}"]


def hub_name(folder: str) -> str:
    """A folder's name as a hub takes it: letters, digits and _ . - where those last two stand alone and within, and
    no .git at its end.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder)
    short = re.sub(r"[.-]{2,}", "-", name)[:LONGEST_NAME].strip(".-")
    return re.sub(r"(\.git)+$", "", short) or "adapter"


WRITERS: dict[str, Callable[[Order], list[str]]] = {"merged": _merged, "gguf": _gguf, "hub": _hub}
