"""Prompt → token ids through the tokenizer's chat template."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgrpo.errors import LONGEST_REASON, ModelError, TookTooLongError
from msgrpo.limits import memory_within, within
from msgrpo.prompt import Prompt

_MARK = "\u241fcontent\u241f"
RENDER_S = 10.0  # seconds of one prompt: templates take milliseconds
RENDER_BYTES = 2**31  # of memory: templates take kilobytes
LONGEST = 200_000  # characters that a template may add to a prompt
PROVED_ON = 4  # prompts on which a short way is compared with the long one
FOR_TEMPLATES = {"tools", "documents"}  # the parameters of `apply_chat_template` that templates read
MOST_HEADS = 64  # beginnings of prompts whose tokens are kept


@dataclass
class _Head:
    """The lines with which prompts of one prefix begin, their token ids, and on how many they are still to prove."""

    text: str
    ids: list[int]
    to_prove: int = PROVED_ON


def _own_parameters(tokenizer: Any) -> set[str]:
    """The parameters of `apply_chat_template` that no template reads; one of them is another template."""
    named = inspect.signature(tokenizer.apply_chat_template).parameters.values()
    return {one.name for one in named if one.kind is not one.VAR_KEYWORD} - FOR_TEMPLATES


class ChatFormat:
    """The chat template, rendered once around a mark in whose place each prompt's text is put.

    That is right for most templates and wrong for those that trim the text, or look at it. So the first prompts are
    rendered both ways; at the first difference every prompt goes through the template itself. `arguments` are the
    template's own (Qwen3: `enable_thinking`).

    Most of a prompt is its prefix, so the prefix is made into tokens once, up to the start of its last line, where
    tokenizers of chat models begin a new token. That, too, is proved on the first prompts of each prefix, and is
    given up for a prefix where the ids differ.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        if ours := sorted(self.arguments.keys() & _own_parameters(tokenizer)):
            raise self._unusable(f"{', '.join(ours)} would change how it is used, not what it is told")
        if tokenizer.chat_template is None:
            raise ModelError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template",
                fix="use an instruction-tuned model",
            )
        if large := re.search(r"\d{7,}|\*\*", str(tokenizer.chat_template)):
            raise self._unusable(
                f"it holds {large[0][:20]!r}, which no template needs and memory may not have room for"
            )
        self._head, _, self._tail = self._rendered(Prompt("", _MARK)).partition(_MARK)
        self._to_prove = PROVED_ON
        self._backend = getattr(tokenizer, "backend_tokenizer", None)  # called by itself it costs half
        self._heads: dict[str, _Head] = {}
        self._by_mark = True

    def ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The token ids of each prompt, with the template's opening of the answer at the end."""
        texts = [self._text(prompt) for prompt in prompts]
        heads = [self._head_for(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        rests = self._encoded([text[len(head.text) :] for text, head in zip(texts, heads, strict=True)])
        rows = [head.ids + rest for head, rest in zip(heads, rests, strict=True)]
        for i, head in enumerate(heads):
            if head.to_prove:
                head.to_prove -= 1
                (whole,) = self._encoded([texts[i]])
                if whole != rows[i]:
                    head.text, head.ids, head.to_prove = "", [], 0
                    return self.ids(prompts)
        return rows

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        if self._backend is None:
            encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            return encoded
        self._backend.no_truncation()
        self._backend.no_padding()
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _head_for(self, prompt: Prompt, text: str) -> _Head:
        """The lines that the prompt has in common with the others of its prefix, if it has.

        The last line of the prefix goes on with the state, so it is not among them.
        """
        lines = prompt.prefix[: prompt.prefix.rfind("\n") + 1]
        begun = self._head + lines
        goes_on = prompt.prefix[len(lines) : len(lines) + 1]
        if not lines or not goes_on.strip() or not text.startswith(begun):
            return _Head("", [], 0)
        if begun not in self._heads:
            if len(self._heads) >= MOST_HEADS:
                self._heads.clear()
            self._heads[begun] = _Head(begun, self._encoded([begun])[0])
        return self._heads[begun]

    def _text(self, prompt: Prompt) -> str:
        if not self._by_mark or prompt.system:
            return self._rendered(prompt)
        text = self._head + prompt.prefix + prompt.state + self._tail
        if self._to_prove:
            self._to_prove -= 1
            whole = self._rendered(prompt)
            self._by_mark = text == whole
            return whole
        return text

    def _rendered(self, prompt: Prompt) -> str:
        """The template's text of a prompt. A template is somebody's program, so its time and its text are bounded."""
        asked = prompt.prefix + prompt.state
        try:
            with (
                within(RENDER_S, f"the chat template of {self.tokenizer.name_or_path!r}"),
                memory_within(RENDER_BYTES),
            ):
                text = self.tokenizer.apply_chat_template(
                    prompt.messages, tokenize=False, add_generation_prompt=True, **self.arguments
                )
        except TookTooLongError:
            raise self._unusable(f"it has not ended after {RENDER_S:g} s") from None
        except MemoryError:
            raise self._unusable(f"it asked for more than {RENDER_BYTES >> 30} GiB of memory") from None
        except Exception as error:  # whatever a program raises
            raise self._unusable(f"{str(error) or type(error).__name__}"[:LONGEST_REASON]) from error
        if not isinstance(text, str) or len(text) > len(asked) + len(prompt.system) + LONGEST:
            raise self._unusable(f"it makes {len(text):,} characters of {len(asked):,}")
        if prompt.state.strip() not in text:
            raise self._unusable("it leaves the prompt out, or changes it")
        return text

    def _unusable(self, why: str) -> ModelError:
        fix = f"its arguments are {self.arguments}: change them with --set chat=JSON" if self.arguments else None
        return ModelError(f"the chat template of {self.tokenizer.name_or_path!r} cannot be used: {why}", fix=fix)
