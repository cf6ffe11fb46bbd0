"""A merged model, and its adapter alone, as GGUF files: what llama.cpp, Ollama and LM Studio read.

Where the base was a GGUF file, its header (settings, tokenizer, chat template) is copied and the weights replaced.
Else the header is written from the model's config and tokenizer. llama.cpp knows rules of splitting text by name
only; the rule is found by a trial: that of `RULES` by which all of msgrpo's prompts become the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, TokenType
from tokenizers import Tokenizer
from torch import Tensor, from_numpy

from msgrpo.episode import observation_of
from msgrpo.errors import ModelError
from msgrpo.files import expanded
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.models.gguf_file import RULE, is_gguf
from msgrpo.models.merged import Adapter
from msgrpo.models.splitting import KNOWN, RULES, TEXTS
from msgrpo.prompt import PromptTemplate

KINDS = {
    "float32": GGMLQuantizationType.F32,
    "float16": GGMLQuantizationType.F16,
    "bfloat16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
}
FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32, "q8_0": 7}  # llama.cpp's numbers of them
ARCHITECTURES = {"qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3, "llama": MODEL_ARCH.LLAMA}
BLOCK = 32  # values that q8_0 scales together
NOT_COPIED = ("GGUF.", "general.file_type", "general.quantization_version", "split.", "general.alignment")
PROBES = 20  # starts of each scenario whose prompts are tried


def write_gguf(model: Any, tokenizer: Any, base: str, file: Path, name: str, dtype: str) -> list[str]:
    """Write the model; returns what a person should know of the file."""
    layout = Layout.of(model.config)
    writer = gguf.GGUFWriter(file, layout.architecture)
    notes = _header(writer, layout, model, tokenizer, base, name)
    writer.add_file_type(FILE_TYPES[dtype])
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for tensor, weight in model.state_dict().items():
        if not (tied and tensor == "lm_head.weight"):
            _add(writer, layout.name(tensor), layout.arranged(tensor, weight.float().numpy()), dtype)
    _finish(writer)
    return notes


def write_gguf_adapter(adapter: Adapter, config: Any, file: Path, name: str) -> None:
    """Write the adapter alone, in float32: `llama-cli -m BASE.gguf --lora FILE`."""
    layout = Layout.of(config)
    writer = gguf.GGUFWriter(file, layout.architecture)
    writer.add_type("adapter")
    writer.add_name(name)
    writer.add_string("adapter.type", "lora")
    ranks = {a.shape[0] for a, _ in adapter.layers.values()}
    writer.add_float32("adapter.lora.alpha", float(*ranks) if len(ranks) == 1 else 0.0)  # either way the scale is 1
    for layer, (a, b) in adapter.layers.items():
        tensor = layout.name(f"{layer}.weight")
        writer.add_tensor(f"{tensor}.lora_a", np.ascontiguousarray(a.numpy()))
        writer.add_tensor(f"{tensor}.lora_b", np.ascontiguousarray(layout.arranged(f"{layer}.weight", b.numpy())))
    _finish(writer)


@dataclass(frozen=True)
class Layout:
    """How llama.cpp names and orders the weights of an architecture."""

    architecture: str
    config: Any
    names: Any

    @classmethod
    def of(cls, config: Any) -> Layout:
        """Raises ModelError for an architecture that is not written here."""
        kind = str(config.model_type)
        rope = getattr(config, "rope_parameters", None) or {}
        if kind not in ARCHITECTURES or rope.get("rope_type", "default") != "default":
            seen = kind if kind not in ARCHITECTURES else f"{kind} with positions of the kind {rope['rope_type']}"
            raise ModelError(
                f"a model of the architecture {seen} is not written as GGUF here; known: {', '.join(ARCHITECTURES)}",
                fix="--to merged, and then llama.cpp's convert_hf_to_gguf.py on that folder",
            )
        return cls(kind, config, gguf.get_tensor_name_map(ARCHITECTURES[kind], config.num_hidden_layers))

    def name(self, tensor: str) -> str:
        given = self.names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if given is None:
            raise ModelError(f"llama.cpp has no name for the weights {tensor} of a {self.architecture}")
        return str(given)

    def arranged(self, tensor: str, weight: np.ndarray) -> np.ndarray:
        """In llama's query and key the two halves of a head's rows are interleaved; all else is as it is."""
        part = tensor.rsplit(".", 2)[-2]
        if self.architecture != "llama" or part not in ("q_proj", "k_proj"):
            return weight
        heads = self.config.num_attention_heads if part == "q_proj" else self.config.num_key_value_heads
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)


def _header(writer: Any, layout: Layout, model: Any, tokenizer: Any, base: str, name: str) -> list[str]:
    if is_gguf(base):
        rule, notes = splitting_rule(tokenizer.backend_tokenizer)
        named = _copy_header(writer, expanded(base))
        same = KNOWN.get(named) == rule
        writer.add_tokenizer_pre(named if same else rule)
        writer.add_name(name)
        if not same:
            notes.append(f"{Path(base).name} itself names the rule {named}, by which the training did not split text")
        return [f"settings and tokenizer are those of {Path(base).name}", *notes]
    config = layout.config
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_vocab_size(config.vocab_size)
    return _add_tokenizer(writer, tokenizer, config)


def _copy_header(writer: Any, file: Path) -> str:
    """Everything that the base's own header says, but for what is said of its weights; returns its rule's name."""
    fields = gguf.GGUFReader(file).fields
    for key, field in fields.items():
        if key.startswith(NOT_COPIED) or key in ("general.architecture", "general.name", RULE):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=inner)
    return str(fields[RULE].contents()) if RULE in fields else "default"


def _add_tokenizer(writer: Any, tokenizer: Any, config: Any) -> list[str]:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    if state["model"]["type"] != "BPE" or state["model"].get("byte_fallback"):
        raise ModelError(
            "the tokenizer is no byte-level BPE, and no other is written as GGUF here",
            fix="--to merged, and then llama.cpp's convert_hf_to_gguf.py on that folder",
        )
    rule, notes = splitting_rule(tokenizer.backend_tokenizer)
    words = {place: word for word, place in state["model"]["vocab"].items()}
    kinds = dict.fromkeys(words, TokenType.NORMAL)
    for added in state["added_tokens"]:
        words[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    places = range(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list([words.get(place, f"[PAD{place}]") for place in places])
    writer.add_token_types([kinds.get(place, TokenType.UNUSED) for place in places])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in state["model"]["merges"]])
    for add, place in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if place is not None:
            add(place)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    return notes


def splitting_rule(tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """The name of the rule by which every one of msgrpo's prompts becomes the same tokens, and what was seen.

    Raises ModelError where there is none: the model would read other tokens than it was trained on.
    """
    prompts, others = list(probes()), list(TEXTS)
    agreeing = {}
    for name, rule in RULES.items():
        trial = Tokenizer.from_str(tokenizer.to_str())
        trial.pre_tokenizer = rule()
        agreeing[name] = [_same(tokenizer, trial, texts) for texts in (prompts, others)]
    name = max(agreeing, key=lambda one: agreeing[one])
    of_prompts, of_others = agreeing[name]
    if of_prompts < len(prompts):
        raise ModelError(
            f"llama.cpp has no rule that splits text as this tokenizer does: the nearest, {name}, gives the same "
            f"tokens for {of_prompts} of {len(prompts)} prompts",
            fix="--to merged writes a folder that transformers and vLLM load",
        )
    notes = [f"llama.cpp's rule {name} gives the same tokens for all {len(prompts)} prompts that were tried"]
    if of_others < len(others):
        notes.append("other texts may be split differently: the tokenizer's own rule is none of llama.cpp's")
    return name, notes


def probes() -> Iterator[str]:
    """The prompts of every scenario's first training starts."""
    for name in SCENARIOS:
        scenario = get_scenario(name)
        for start in range(PROBES):
            game = scenario.new(start, start)
            prompt = PromptTemplate().render(scenario, observation_of(game, game.to_move[0]))
            yield prompt.prefix + prompt.state


def _same(one: Tokenizer, other: Tokenizer, texts: Iterable[str]) -> int:
    return sum(one.encode(text).ids == other.encode(text).ids for text in texts)


def as_stored(weight: Tensor, dtype: str) -> Tensor:
    """The weight as it is read again from a file of this dtype."""
    values = weight.float().numpy()
    kind = _kind(values, dtype)
    return from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind))


def _kind(weight: np.ndarray, dtype: str) -> GGMLQuantizationType:
    """Vectors stay in float32, and a matrix whose rows q8_0 cannot part into blocks is written in float16."""
    kind = KINDS[dtype] if weight.ndim > 1 else GGMLQuantizationType.F32
    return GGMLQuantizationType.F16 if kind == GGMLQuantizationType.Q8_0 and weight.shape[-1] % BLOCK else kind


def _add(writer: Any, name: str, weight: np.ndarray, dtype: str) -> None:
    kind, weight = _kind(weight, dtype), np.ascontiguousarray(weight)
    writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
