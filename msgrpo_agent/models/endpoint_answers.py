"""The body of a chat completion as a `Completion`: its text, token counts and the probabilities of the actions.

Servers send every shape. A body that holds no answer is a `BadBodyError`; where there is an answer, it stays, and
what else cannot be read (a token count, the alternatives to a token) counts as missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgrpo.agent import Completion, FinishReason, action_span
from msgrpo.episode import MOST_TOKENS
from msgrpo.models.endpoint_failures import BadBodyError, shown
from msgrpo.text import printable

LONGEST_NAME = 200  # characters of what a server calls itself
_UNFINISHED = ("error", "abort")  # how gateways and vLLM end an answer that failed half-way


def parsed(text: str, what: str) -> Any:
    """The value of JSON. Raises BadBodyError where it is none."""
    try:
        return json.loads(text, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise BadBodyError(f"status 200, but {what} is no JSON: {text[:80]!r}") from error


def _whole(digits: str) -> int:
    """A whole number of JSON; one that no count can be, thousands of digits long, is −1 and so none."""
    return int(digits) if len(digits) < 20 else -1


def checked(body: Any) -> dict[str, Any]:
    """The body of a chat completion, or BadBodyError for what servers send with status 200 in its place."""
    if not isinstance(body, dict):
        raise BadBodyError(f"status 200, but the body is no object: {str(body)[:80]!r}")
    choices = body.get("choices")
    if not choices:
        raise no_answer(body.get("error"), f"choices is {str(choices)[:80]!r}")
    choice = choices[0] if isinstance(choices, list) else None
    if not isinstance(choice, dict):
        raise BadBodyError(f"status 200, but choices is {str(choices)[:80]!r}")
    if choice.get("error") or choice.get("finish_reason") in _UNFINISHED:
        raise no_answer(choice.get("error"), f"finish_reason is {str(choice.get('finish_reason'))[:80]!r}")
    if not isinstance(choice.get("message"), dict) and choice.get("finish_reason") != "content_filter":
        raise BadBodyError(f"status 200, but the message is {str(choice.get('message'))[:80]!r}")
    return body


def no_answer(error: Any, otherwise: str) -> BadBodyError:
    """What a server says in place of an answer; OpenRouter's errors hold the status of its provider."""
    code = error.get("code") if isinstance(error, dict) else None
    reason = shown(json.dumps(error)[:200]) if error else otherwise
    return BadBodyError(f"status 200, but no answer: {reason}", code if isinstance(code, int) else None)


def completion(body: Mapping[str, Any], latency_s: float, retries: int, actions: Sequence[str]) -> Completion:
    """A checked body as a Completion. A token count that is missing, or none, is 0: the answer stays.

    Raises BadBodyError where something has another type than the protocol says.
    """
    try:
        return _completion(body, latency_s, retries, actions)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise BadBodyError(f"status 200, but the answer cannot be read: {error}") from error


def _completion(body: Mapping[str, Any], latency_s: float, retries: int, actions: Sequence[str]) -> Completion:
    choice = body["choices"][0]
    message = choice.get("message") or {}
    usage = body["usage"] if isinstance(body.get("usage"), dict) else {}
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return Completion(
        text=text_of(message.get("content")) or text_of(message.get("refusal")),
        finish_reason=_finish_reason(choice.get("finish_reason")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        latency_s=latency_s,
        reasoning=reasoning_of(message),
        action_probabilities=_probabilities(content, actions) if actions else None,
        retries=retries,
        model=_served(body),
    )


def _served(body: Mapping[str, Any]) -> str | None:
    """Which model the server says has answered, and its fingerprint of the system."""
    names = [text for name in ("model", "system_fingerprint") if (text := text_of(body.get(name)).strip())]
    return printable(" ".join(names)[:LONGEST_NAME]) or None


def text_of(content: Any) -> str:
    """A string, or the text parts of a list of parts, or nothing; what UTF-8 cannot hold is marked."""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content.encode("utf-8", "replace").decode() if isinstance(content, str) else ""


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    return text_of(message.get("reasoning")) or text_of(message.get("reasoning_content")) or None


def objects(given: Any) -> list[dict[str, Any]]:
    """The objects of a list; nothing where it is none: a server's chunks have every shape."""
    return [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []


def _count(given: Any) -> int:
    """A number of tokens, or 0 for what is none: other types, negative numbers, and those beyond MOST_TOKENS."""
    whole = isinstance(given, int) or (isinstance(given, float) and given.is_integer())
    return int(given) if whole and 0 <= given <= MOST_TOKENS else 0


def _finish_reason(given: Any) -> FinishReason:
    if given == "length":
        return "length"
    return "content_filter" if given == "content_filter" else "stop"


def _probabilities(content: Any, actions: Sequence[str]) -> dict[str, float] | None:
    """`action_probabilities`, and None where the server's alternatives cannot be read: the answer stays."""
    try:
        return action_probabilities(content or [], actions)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None


def action_probabilities(tokens: Sequence[Mapping[str, Any]], actions: Sequence[str]) -> dict[str, float] | None:
    """P over the legal actions from the alternatives to the token that follows the `<action>` that the parser reads.

    Each alternative counts for the one action that begins with it; the rest is left out and the sum made 1.
    None where the server gave no alternatives, the answer has no tag, or no alternative begins an action.
    """
    texts = [str(token.get("token") or "") for token in tokens]
    span = action_span("".join(texts))
    if span is None:
        return None
    position, offset = span[0], 0
    for token, text in zip(tokens, texts, strict=True):
        if offset <= position < offset + len(text):
            return _over_actions(token.get("top_logprobs") or [], text[: position - offset], actions)
        offset += len(text)
    return None


def _over_actions(
    alternatives: Sequence[Mapping[str, Any]], head: str, actions: Sequence[str]
) -> dict[str, float] | None:
    mass = dict.fromkeys(actions, 0.0)
    for alternative in alternatives:
        text = str(alternative.get("token") or "")
        begins = text.removeprefix(head).partition("<")[0].strip().casefold()
        fits = [action for action in actions if begins and action.casefold().startswith(begins)]
        if text.startswith(head) and len(fits) == 1:
            logprob = float(alternative.get("logprob", -math.inf))
            mass[fits[0]] += math.exp(logprob) if logprob <= 0 else math.nan  # no probability is above 1
    total = sum(mass.values())
    return {action: m / total for action, m in mass.items()} if total > 0 else None  # also where one is no number
