"""The rules by which text is split into pieces before byte-level BPE makes tokens of them, by llama.cpp's names.

A GGUF file names its rule and does not hold it. A model that is read by another rule than it was made for gets other
tokens for the same text, and nothing says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


RULES: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: _split(_WORDS % r"\p{N}"),
    "llama-bpe": lambda: _split(_WORDS % r"\p{N}{1,3}"),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(False),
}
# Other names that llama.cpp (src/llama-vocab.cpp) gives to the same rules.
_SAME = {
    "qwen2": ("deepseek-r1-qwen", "hunyuan", "megrez", "solar-open", "stablelm2"),
    "llama-bpe": ("dbrx", "falcon-h1", "falcon3", "lfm2", "llama-v3", "llama3", "pixtral", "smaug-bpe"),
    "smollm": ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "starcoder"),
    "gpt-2": ("exaone4", "granite-docling", "jais", "mpt", "olmo", "phi-2", "trillion"),
}
KNOWN = {name: rule for rule, others in _SAME.items() for name in (rule, *others)}
# Where a whole piece is in the vocabulary it is one token, whatever the merges would make of it.
_WHOLE_PIECES = ("falcon-h1", "falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "pixtral")
# Texts by which rules are told apart.
TEXTS = (
    "It's 1,234.5 metres; we'll see (12,34) twice...\n\n  Then --stop!?  ",
    "Ünïcode, 中文, emoji 🙂, tab\tand\r\nlines; x=10_000 == y[3]",
)


def split_as(tokenizer: Tokenizer, name: str) -> None:
    """Make the tokenizer split text by the rule of this name, one of `KNOWN`."""
    tokenizer.pre_tokenizer = RULES[KNOWN[name]]()
    if name in _WHOLE_PIECES:
        tokenizer.model.ignore_merges = True
