"""Bases in GGUF files: converted once, named by their checksum, refused in one sentence where they are damaged."""

from __future__ import annotations

import fcntl
import json
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors import SafetensorError

from msgrpo.errors import ModelError
from msgrpo.models import gguf_file
from msgrpo.models.loading import based, load_adapted, load_base
from msgrpo.models.paths import absolute, parameters_of, shipped_adapters
from msgrpo.serve.preflight import local_weights

gguf = pytest.importorskip("gguf", reason="pip install 'msgrpo[gguf]'")

LETTERS = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256)]]
BYTES = LETTERS + [chr(256 + n) for n in range(256 - len(LETTERS))]  # as byte-level BPE writes the 256 bytes
ADAPTER = shipped_adapters()["frozen-lake"]
SPECIAL = ["<|im_start|>", "<|im_end|>"]
WIDE, HIDDEN, LAYERS = 64, 128, 2
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(
    file: Path,
    *,
    architecture: str = "qwen2",
    template: str | None = TEMPLATE,
    drop: str = "",
    rule: str = "qwen2",
    extra: str = "",
    merges: tuple[str, ...] = ("a b",),
) -> Path:
    """A tiny model with random weights, partly in eight bits."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDE)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    words = [*BYTES, *(merge.replace(" ", "") for merge in merges), *SPECIAL]
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(words) - 2) + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(len(words) - 1)
    writer.add_eos_token_id(len(words) - 1)
    writer.add_pad_token_id(len(words) - 1)
    if template is not None:
        writer.add_chat_template(template)
    generator = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        if name == drop:
            return
        weights = generator.normal(0, 0.05, shape).astype(np.float32)
        if len(shape) == 2 and "blk" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weights)

    if extra:
        add(extra, 8)
    add("token_embd.weight", len(words), WIDE)
    add("output_norm.weight", WIDE)
    for n in range(LAYERS):
        for part, shape in {
            "attn_norm": (WIDE,),
            "ffn_norm": (WIDE,),
            "attn_q": (WIDE, WIDE),
            "attn_k": (WIDE // 2, WIDE),
            "attn_v": (WIDE // 2, WIDE),
            "attn_output": (WIDE, WIDE),
            "ffn_gate": (HIDDEN, WIDE),
            "ffn_up": (HIDDEN, WIDE),
            "ffn_down": (WIDE, HIDDEN),
        }.items():
            add(f"blk.{n}.{part}.weight", *shape)
        biases = {"attn_q": WIDE, "attn_k": WIDE // 2, "attn_v": WIDE // 2} if architecture == "qwen2" else {}
        for part, width in biases.items():
            add(f"blk.{n}.{part}.bias", width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MSGRPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def test_a_file_is_converted_once_and_named_by_its_checksum(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "tiny.gguf")
    model = based(str(file))
    assert capsys.readouterr().err == ""  # a bar of transformers was drawn over the app's screen
    checksum = gguf_file.checksum(file)
    assert model.name == "tiny.gguf"
    assert model.extra_settings == {"weights": f"tiny.gguf sha256:{checksum}"}
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert folder.name == f"tiny-{checksum[:12]}-{gguf_file.CONVERSION}"
    facts = json.loads((folder / "gguf.json").read_text())
    assert facts["architecture"] == "qwen2"
    assert facts["parameters"] == parameters_of(str(file)) == sum(p.numel() for p in model.model.parameters())
    assert not hasattr(model.model.config, "quantization_config")
    assert not list(cache.glob("*.part"))
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]  # a cache that several people share

    def never(*arguments: Any) -> int:
        raise AssertionError("it is there already")

    monkeypatch.setattr(gguf_file, "_save_dequantised", never)
    load_base(str(file))
    (line,) = (finding for finding in examine_cache() if finding.part == "gguf models")
    assert f"tiny.gguf ({checksum[:12]})" in line.state
    assert absolute(str(file)) == str(file)
    assert local_weights(str(file), download=False) == folder  # what vLLM is given


# Merges that a text reaches only where the rule leaves both sides in one piece.
MERGES = ("1 2", "12 3", "Ġ 1", "Ġ a", "' s", "Ġ Ġ", "( b", "a b", "Ċ Ċ")
TEXTS = ("ab 12 123 1234 (b  ab's IT'S\n\n x=10_000 == y[3]\n", "Step 12 of 8. You (0,3).  Goal (3,0)\r\n", "  a  1")


@pytest.mark.parametrize("rule", ["qwen2", "llama-bpe", "smollm", "gpt-2", "starcoder", "llama3"])
def test_text_becomes_the_tokens_that_llama_cpp_makes_of_it(tmp_path: Path, rule: str) -> None:
    """The file names its rule of splitting text, and transformers does not take it over.

    SmolLM2 was read by GPT-2's rule: "12" was one token instead of two, in every one of 200 prompts, without a word.
    """
    xllamacpp = pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    file = write(tmp_path / "tiny.gguf", architecture="llama", rule=rule, merges=MERGES)
    tokenizer = load_base(str(file))[1]
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.warmup, settings.verbosity = str(file), 256, False, 0
    llama = xllamacpp.Server(settings)
    for text in TEXTS:
        asked = {"content": text, "add_special": False}
        theirs = httpx.post(f"{llama.listening_address}/tokenize", json=asked, timeout=30).json()["tokens"]
        assert tokenizer(text, add_special_tokens=False).input_ids == theirs


def test_rules_split_digits_as_their_names_promise(tmp_path: Path) -> None:
    """The same without llama.cpp: what a rule makes of a number."""
    pieces = {"qwen2": ["1", "2", "3"], "smollm": ["1", "2", "3"], "llama-bpe": ["123"], "gpt-2": ["123"]}
    for rule, expected in pieces.items():
        file = write(tmp_path / f"{rule}.gguf", architecture="llama", rule=rule, merges=MERGES)
        tokenizer = load_base(str(file))[1]
        assert tokenizer.convert_ids_to_tokens(tokenizer("123", add_special_tokens=False).input_ids) == expected


def examine_cache() -> list[Any]:
    from msgrpo import doctor

    return [doctor._cache()]


def test_the_weights_are_those_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf")
    model, tokenizer = load_base(str(file))
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    there = reader["blk.1.ffn_down.weight"]
    expected = gguf.dequantize(there.data, there.tensor_type)
    own = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    np.testing.assert_allclose(own, expected, atol=1e-3)  # bfloat16
    assert tokenizer.decode(tokenizer("right <action>")["input_ids"]) == "right <action>"


def test_who_waits_for_another_process_that_converts_says_so(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waited without a word, and without end where the other was stopped."""
    file = write(tmp_path / "small.gguf")
    folder = gguf_file.folder_of(file)
    cache.mkdir(parents=True)
    with (cache / f".{folder.name}.lock").open("w") as held, ThreadPoolExecutor() as aside:
        fcntl.flock(held, fcntl.LOCK_EX)
        coming = aside.submit(gguf_file.ready, file)
        for _ in range(6000):
            if said := capsys.readouterr().err:
                break
            sleep(0.01)
        folder.mkdir()  # as the other has made it
        fcntl.flock(held, fcntl.LOCK_UN)
        assert coming.result() == folder
    assert (
        said == f"waiting: another process converts {file}, or is stopped as it does (fuser {held.name} names it)\n"
    )


def test_of_a_conversion_that_was_cut_off_nothing_is_left(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "tiny.gguf")
    real = gguf_file._save_dequantised

    def cut_off(source: Path, folder: Path, rule: str | None) -> int:
        real(source, folder, rule)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "_save_dequantised", cut_off)
        with pytest.raises(KeyboardInterrupt):
            gguf_file.ready(file)
    assert not any(path.is_dir() for path in cache.iterdir())
    killed = cache / f".{gguf_file.folder_of(file).name}.x.part"  # what a kill leaves
    killed.mkdir()
    assert gguf_file.ready(file).is_dir()
    assert not killed.exists()


def test_memory_that_a_conversion_lacks_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was advised to fetch the file again."""

    def lacking(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lacking)
    with pytest.raises(ModelError, match="cannot be converted") as caught:
        gguf_file.ready(write(tmp_path / "tiny.gguf"))
    assert "take a smaller model" in str(caught.value.fix)


def test_a_full_disk_for_the_cache_is_one_sentence(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors has an exception of its own for it, which ended in a traceback."""

    def full(*arguments: Any, **options: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(ModelError, match="No space left on device") as refused:
        load_base(str(write(tmp_path / "tiny.gguf")))
    assert "MSGRPO_CACHE" in (refused.value.fix or "")
    assert not any(path.is_dir() for path in cache.iterdir())


@pytest.mark.parametrize("name", ["base.gguf", "base"])
def test_an_adapter_whose_base_has_moved_names_both(tmp_path: Path, name: str) -> None:
    config = json.loads((ADAPTER / "adapter_config.json").read_text())
    moved = tmp_path / "adapter"
    shutil.copytree(ADAPTER, moved)
    gone = str(tmp_path / name)
    (moved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": gone}))
    with pytest.raises(ModelError) as refused:
        load_adapted(moved)
    assert refused.value.message == f"the adapter {moved} was trained on {gone}, which is not there"
    assert str(moved / "adapter_config.json") in (refused.value.fix or "")


def header(*fields: bytes, version: int = 3, tensors: int = 1, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(fields) if count is None else count) + b"".join(fields)


def text_field(name: str, value: str) -> bytes:
    return text(name) + struct.pack("<I", gguf_file.STRING) + text(value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def number_field(name: str, value: int) -> bytes:
    return text(name) + struct.pack("<II", 4, value)


def tensor(name: str) -> bytes:
    return text(name) + struct.pack("<IQIQ", 1, 1, 0, 0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no GGUF file"),
        (b"<html>not found</html>", "is no GGUF file: it begins with b'<htm'"),
        (header(version=1), "version 1"),
        (header(version=1 << 24), "version 16777216"),
        (header(tensors=2**60), "lists 1,152,921,504,606,846,976 tensors"),
        (header(count=3), "is damaged: its header wants 8 bytes"),
        (header(struct.pack("<Q", 2**60) + b"name"), "wants 1,152,921,504,606,846,976 bytes"),
        (header(text("a") + struct.pack("<IIQ", 9, 8, 2**60)), "is damaged"),
        (header(text("a") + struct.pack("<IIQ", 9, 9, 1)), "a list of type 9"),
        (header(text("a") + struct.pack("<I", 77)), "a value of type 77"),
        (header(text("a") + struct.pack("<IIQ", 9, 0, 10**8)), "a list of 100,000,000 items"),
        (header(text_field("split.count", "many")) + tensor("t"), "one of many files"),
        # made without a look, a million layers took hours
        (
            header(text_field("general.architecture", "llama"), number_field("llama.block_count", 10**6))
            + tensor("t"),
            "claims 1000000 layers and holds 1 tensor",
        ),
    ],
)
def test_what_is_no_whole_gguf_file_is_refused_by_its_header(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError) as refused:
        load_base(str(file))
    assert said in refused.value.message


def test_files_that_cannot_be_used_are_refused_in_one_sentence(tmp_path: Path, cache: Path) -> None:
    for problem, file in {
        "cannot be read: No such file": tmp_path / "missing.gguf",
        "the architecture 'clip'": write(tmp_path / "other.gguf", architecture="clip"),
        "the architecture 'general'": write(tmp_path / "general.gguf", architecture="general"),
        "no chat template": write(tmp_path / "bare.gguf", template=None),
        "scales its positions (rope_freqs.weight)": write(tmp_path / "scaled.gguf", extra="rope_freqs.weight"),
        "and transformers reads": write(tmp_path / "more.gguf", extra="blk.0.attn_gate_of_tomorrow.weight"),
        "as a Qwen2Tokenizer, which splits it by another": write(
            tmp_path / "mixed.gguf", rule="gpt-2", merges=MERGES
        ),
        "splits text into tokens by the rule 'unheard-of'": write(tmp_path / "rule.gguf", rule="unheard-of"),
        "lacks 1 tensor, like model.layers.1.mlp.down_proj.weight": write(
            tmp_path / "hole.gguf", drop="blk.1.ffn_down.weight"
        ),
    }.items():
        with pytest.raises(ModelError) as refused:
            load_base(str(file))
        assert problem in refused.value.message
        assert refused.value.fix
    assert not any(path.is_dir() for path in cache.iterdir())


def test_of_a_file_that_is_cut_off_both_lengths_are_said(tmp_path: Path) -> None:
    """A copy that was broken off was told in a library's words, after most of it had been converted."""
    file = write(tmp_path / "cut.gguf")
    whole = file.read_bytes()
    for missing in (1, len(whole) // 2):
        file.write_bytes(whole[:-missing])
        with pytest.raises(ModelError) as refused:
            gguf_file.check(file)
        sizes = f"it has {len(whole) - missing:,} bytes, and by its header {len(whole):,}"
        assert refused.value.message == f"the model {file} is cut off: {sizes}"
    file.write_bytes(whole)
    assert gguf_file.check(file).architecture == "qwen2"


def test_only_architectures_that_a_file_can_have_are_named_as_known(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        gguf_file.check(write(tmp_path / "experts.gguf", architecture="qwen3moe"))
    known = refused.value.message.split("known: ")[1].split(", ")
    assert {"llama", "qwen2", "qwen3"} <= set(known)
    assert not {"general", "tokenizer", "qwen3_moe", "t5"} & set(known)
