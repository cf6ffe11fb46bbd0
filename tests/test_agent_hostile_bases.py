"""Bases and adapters from elsewhere, and prompts beyond a context: each is one clear error, and no neighbour's."""

from __future__ import annotations

import asyncio
import builtins
import json
import math
import shutil
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from msgrpo.agent import Sampling
from msgrpo.errors import EndpointError, ModelError
from msgrpo.models import loading
from msgrpo.models.loading import load_adapted, load_base
from msgrpo.models.local import LocalModel
from msgrpo.models.lora import ADAPTER_CONFIG
from msgrpo.models.paths import NANO_DIR
from msgrpo.prompt import ChatFormat, Prompt
from tests.serve_fakes import nano_lora_shapes, write_adapter


def test_an_adapters_folder_brings_no_template_among_the_templates_arguments(tmp_path: Path) -> None:
    """What its config.json says of `chat` was handed on as it was: another template, which nobody had looked at, and
    whose number of a hundred million digits no signal interrupts.
    """
    tokenizer = loading.nano().tokenizer
    with pytest.raises(ModelError, match="chat_template, tokenize would change how it is used"):
        ChatFormat(tokenizer, {"chat_template": "{{ 9 ** 9 }}", "tokenize": True, "enable_thinking": False})
    assert ChatFormat(tokenizer, {"enable_thinking": False, "tools": None}).arguments


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of nano, to be changed."""
    folder = tmp_path / "base"
    shutil.copytree(NANO_DIR, folder, ignore=shutil.ignore_patterns("adapters"))
    return folder


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_a_bases_own_code_is_never_run_and_nobody_is_asked_whether_it_may(
    where: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on the terminal, and `y` ran it; an adapter that names such a base did as well."""

    def nobody(*prompt: object) -> str:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr(builtins, "input", nobody)
    (base / "evil.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w')\nclass Evil: pass\n")
    own = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    kind = {"model_type": "evil"} if where == "config.json" else {"tokenizer_class": "Evil"}
    changed(base / where, auto_map=own, **kind)
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=str(base))
    for load in (lambda: load_base(str(base)), lambda: load_adapted(adapter)):
        if where == "config.json":  # for a tokenizer transformers has a class of its own
            with pytest.raises(ModelError, match="code of its own"):
                load()
        else:
            load()
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    "named",
    [
        {"_attn_implementation": "some/kernel"},
        {"attn_implementation": "some/kernel:fast"},
        {"text_config": {"layers": [{"_attn_implementation_internal": {"a": "some/kernel"}}]}},
    ],
)
def test_compiled_code_of_a_hub_is_not_asked_for(named: dict[str, Any], base: Path) -> None:
    """The sibling of code beside a base: transformers fetches a kernel that its config names, and loads it."""
    changed(base / "config.json", **named)
    with pytest.raises(ModelError, match="compiled code from a hub"):
        load_base(str(base))


def test_what_is_no_base_is_said_in_a_sentence(base: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(base / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    run = write_adapter(tmp_path / "run")
    (run / "config.json").write_text('{"scenario": "snake"}')
    long = base.parent / "long"
    shutil.copytree(base, long)
    (long / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    for name, says in {
        str(pickled): "only pickled weights",
        str(run): "names no model_type",
        str(long): "list of tensors",
        "x" * 950: "is no folder and no hub name",
        "a/" + "x" * 5000: "cannot be loaded",
        "/etc": "cannot be loaded",
        "../../x": "is no folder and no hub name",
    }.items():
        with pytest.raises(ModelError, match=says):
            load_base(name)


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client tries ten times, with 46 s of pauses between; they are noted here, and not waited for."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    pauses: list[float] = []
    sleep, me = time.sleep, threading.current_thread()
    monkeypatch.setattr(time, "sleep", lambda s: pauses.append(s) if threading.current_thread() is me else sleep(s))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_base("somebody/some-model")
    assert pauses == []


@pytest.mark.parametrize(
    "config",
    [
        {"r": 10**9}, {"r": 0}, {"r": -1}, {"r": "8"}, {"r": 8.5}, {"lora_alpha": math.nan}, {"lora_alpha": 1e308},
        {"rank_pattern": {"q_proj": 10**7}}, {"rank_pattern": {"(([a-z0-9_.])+)+!": 8}},
        {"rank_pattern": {f"of.many.{i}": 8 for i in range(10_000)}},  # each is tried on each layer
        {"alpha_pattern": [1]},
        {"layer_replication": [[0, 1]] * 2000}, {"modules_to_save": ["lm_head"]}, {"peft_type": "PROMPT_TUNING"},
        {"peft_type": "XLORA"}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "corda"},
        {"megatron_config": {"a": 1}},
    ],
)  # fmt: skip
def test_an_adapter_that_asks_for_more_than_its_layers_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "fl", **config)
    with pytest.raises(ModelError, match="no plain LoRA"):
        load_adapted(folder)


def test_a_pattern_from_a_file_is_not_run_over_the_layers(tmp_path: Path) -> None:
    """`(([a-z0-9_.])+)+!` took more than a minute: the layers are those that the weights name."""
    folder = write_adapter(tmp_path / "fl", target_modules="(([a-z0-9_.])+)+!")
    model, _ = load_adapted(folder)
    assert model is not None


def test_an_adapter_of_other_names_or_a_config_of_megabytes_is_refused(tmp_path: Path) -> None:
    """Where only some of the names were another's, PEFT left those weights out without a word, and the rest played.
    Looked for: all that loads an adapter (the trainer's own loading compares every name; `serve` leaves it to vLLM).
    """
    shapes = {f"renamed.{name}": shape for name, shape in nano_lora_shapes().items()}
    with pytest.raises(ModelError):
        load_adapted(write_adapter(tmp_path / "renamed", shapes=shapes))
    for old, new in (("layers.0.", "layers.99."), ("layers.0.mlp.down_proj", "layers.0.mlp.dawn_proj")):
        shapes = {name.replace(old, new): shape for name, shape in nano_lora_shapes().items()}
        with pytest.raises(ModelError, match=r"layers are none of the base's, like model\.layers\."):
            load_adapted(write_adapter(tmp_path / new, shapes=shapes))
    large = write_adapter(tmp_path / "large")
    (large / ADAPTER_CONFIG).write_text(json.dumps({"x": "y" * 20_000_000}))
    with pytest.raises(ModelError, match="no config has more"):
        load_adapted(large)


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return loading.nano()


def long(words: int) -> Prompt:
    return Prompt("", " ".join(["hole"] * words))


async def test_the_length_of_an_answer_depends_on_its_own_prompt_alone(model: LocalModel) -> None:
    """Beside a prompt of 2,040 tokens an answer of 22 became one of 8."""
    short = Prompt("", "a hole and a goal")
    beyond = next(words for words in range(500, 4000) if len(model.chat.ids([long(words)])[0]) > model.context - 6)
    sampling = Sampling(max_tokens=40)
    alone = await model.complete(short, sampling, 3)
    beside, full = await asyncio.gather(model.complete(short, sampling, 3), model.complete(long(beyond), sampling, 4))
    assert alone.completion_tokens > 6
    assert beside.token_ids == alone.token_ids
    assert full.prompt_tokens + full.completion_tokens <= model.context
    assert full.completion_tokens <= 6


async def test_a_prompt_beyond_the_context_is_no_answer_and_its_neighbours_have_theirs(model: LocalModel) -> None:
    short = Prompt("", "a hole and a goal")
    found = await asyncio.gather(
        model.complete(long(4000), Sampling(), 1), model.complete(short, Sampling(), 2), return_exceptions=True
    )
    assert isinstance(found[0], EndpointError)
    assert found[0].kind == "context_length"
    assert not isinstance(found[1], BaseException)


def test_one_model_answers_two_event_loops_at_once(model: LocalModel) -> None:
    """The second loop's answers were completed from the first one's thread, and never came."""
    answers: dict[str, list[Any]] = {}

    def ask(name: str) -> None:
        async def many() -> None:
            answers[name] = []
            for seed in range(6):
                got = await asyncio.gather(
                    *(model.complete(Prompt("", f"{name} {i}"), Sampling(max_tokens=8), seed) for i in range(3))
                )
                answers[name] += [one.token_ids for one in got]
            await model.close()

        asyncio.run(many())

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [len(answers[name]) for name in ("one", "two")] == [18, 18]
