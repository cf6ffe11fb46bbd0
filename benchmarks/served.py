"""How many episodes go the same way through a server and in process, and why the others do not.

    msgrpo serve --adapter runs/x &
    msgrpo eval adapter:runs/x --scenario frozen-lake --temperature 0 --out runs/here
    msgrpo eval --endpoint http://127.0.0.1:8000/v1 --model x --scenario frozen-lake --temperature 0 --out runs/there
    python benchmarks/served.py runs/here/AGENT/frozen-lake.jsonl runs/there/AGENT/frozen-lake.jsonl \\
        --result benchmarks/results/served.json

Both records hold greedy episodes of the same starts. Episodes are compared answer by answer, to the first that
differs: after it the two play different games. With `--adapter runs/x` each first difference is explained: the
log-probabilities, in float32, of the two tokens where the answers part. Where they are close, rounding decides.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import options, write

from msgrpo.episode import Episode, Turn, read_episodes
from msgrpo.evals.exported import prompt_of

Start = tuple[int, int]
Parted = tuple[Episode, Turn, Turn]


def by_start(file: Path) -> dict[Start, Episode]:
    return {(one.start_seed, one.chance_seed): one for one in read_episodes(file) if one.error is None}


def first_difference(here: Sequence[Turn], there: Sequence[Turn]) -> tuple[Turn, Turn] | None:
    """The first turns with other answers; None where all are alike."""
    for one, other in zip(here, there, strict=False):
        if one.state != other.state:
            raise SystemExit(f"the records hold different games: {one.state!r} and {other.state!r}")
        if one.answer != other.answer:
            return one, other
    return None


def where_they_part(here: dict[Start, Episode], there: dict[Start, Episode]) -> list[Parted]:
    both = sorted(here.keys() & there.keys())
    pairs = ((here[start], first_difference(here[start].turns, there[start].turns)) for start in both)
    return [(episode, *pair) for episode, pair in pairs if pair is not None]


def explained(parted: Sequence[Parted], adapter: Path) -> list[dict[str, Any]]:
    """The two tokens at which each pair of answers parts, and their log-probabilities in float32."""
    import torch

    from msgrpo.models.loading import load_adapted
    from msgrpo.models.local import LocalModel

    model, tokenizer = load_adapted(adapter, dtype="float32")
    asked, found = LocalModel("adapter", model, tokenizer).chat, []
    for episode, one, other in parted:
        (prompt,) = asked.ids([prompt_of(episode, one)])
        texts = (tokenizer.encode(turn.answer, add_special_tokens=False) for turn in (one, other))
        a, b = ([*text, tokenizer.eos_token_id] for text in texts)  # one may be the other's beginning
        first = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *a[:first]]])).logits[0, -1].float()
        logprobs = logits.log_softmax(-1)
        tokens = {"here": a[first], "there": b[first]}
        found.append({where: [tokenizer.decode([t]), round(float(logprobs[t]), 3)] for where, t in tokens.items()})
    return found


def compared(here: dict[Start, Episode], there: dict[Start, Episode], parted: Sequence[Parted]) -> dict[str, Any]:
    both = sorted(here.keys() & there.keys())
    return {
        "episodes": len(both),
        "only in one record": len(here.keys() ^ there.keys()),
        "the same answers to the end": len(both) - len(parted),
        "the same actions to the end": sum(
            [t.action for t in here[start].turns] == [t.action for t in there[start].turns] for start in both
        ),
        "the same result": sum(here[start].returns == there[start].returns for start in both),
        "turns compared": sum(len(here[start].turns) for start in both),
        "where they part": [
            {"step": one.step, "here": one.answer, "there": other.answer} for _, one, other in parted
        ],
    }


if __name__ == "__main__":
    parser = options(__doc__, result=True)
    parser.add_argument("here", type=Path)
    parser.add_argument("there", type=Path)
    parser.add_argument("--adapter", type=Path, help="whose answers they are: explains where they part")
    given = parser.parse_args()
    here, there = by_start(given.here), by_start(given.there)
    parted = where_they_part(here, there)
    result = compared(here, there, parted)
    if given.adapter is not None:
        result["tokens where they part, log-probabilities in float32"] = explained(parted, given.adapter)
    write(given.result, result)
    print(json.dumps(result, indent=1))
