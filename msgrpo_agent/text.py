"""Text that comes from outside (a model, a server, a file) is cleaned once, where it enters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

ANSWER_TOKENS = 256  # that a model's answer may have, where nothing else is said

# Control characters but tab and newline (C1 and DEL too), line and paragraph separators, characters that turn the
# direction of the text around, and halves of surrogate pairs, which no terminal and no file can hold.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with U+FFFD for each character that drives a terminal instead of being shown; \\r\\n becomes \\n."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def printable_data(value: Any) -> Any:
    """Nested data of JSON with every string in it, names included, made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): printable_data(item) for key, item in value.items()}
    return [printable_data(item) for item in value] if isinstance(value, (list, tuple)) else value


def as_json(value: Any, indent: int | None = None) -> str:
    """JSON text with null for NaN and infinite numbers, such as a missing interval."""
    return json.dumps(_numbers(value), indent=indent, allow_nan=False)


def _numbers(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, (list, tuple)) else value


def interval_text(low: float | None, high: float | None, form: str = "+.3f") -> str:
    """An interval as text, or `[no interval]`."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return "[no interval]"
    return f"[{low:{form}}, {high:{form}}]"


Clean = Annotated[str, AfterValidator(printable)]  # a field of what may come from anywhere
CleanData = Annotated[dict[str, Any], AfterValidator(printable_data)]  # the same, of nested data


def counted(number: int, what: str, one: str = "", many: str = "") -> str:
    """`1 update`, `2 updates`; with a verb of each kind, `1 update has`, `2 updates have`."""
    verb = one if number == 1 else many
    return f"{number} {what}{'' if number == 1 else 's'}{verb and f' {verb}'}"


def duration(seconds: float) -> str:
    """`42 s`, `3:05 min` or `2:10 h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"
