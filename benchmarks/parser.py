"""How the time of ψ grows with the length of an answer: text that loops on the tag, plain words, and open reasoning.

    python benchmarks/parser.py --result benchmarks/results/parser.json

Each text is doubled in length four times; the figure is the exponent of the growth, 1 where time is linear. The
loop once cost the square: 64 s for 20,000 tags.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

from machine import facts

from msgrpo.agent import parse_action, thought

TEXTS = {
    "an open tag again and again": "<action>",
    "closed tags": "<action>up</action> ",
    "words": "the apple is near ",
    "reasoning that never ends": "<think> hm ",
    "angle brackets": "<<<>>></",
}
ACTIONS = ("up", "down", "left", "right")
REPEATS = (20_000, 40_000, 80_000, 160_000)


def seconds(text: str) -> float:
    """The median of five."""
    found = []
    for _ in range(5):
        began = time.perf_counter()
        parse_action(text, ACTIONS)
        thought(text)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    result: dict[str, object] = {"machine": facts(), "repeats": REPEATS}
    for name, piece in TEXTS.items():
        times = [seconds(piece * repeat) for repeat in REPEATS]
        exponent = math.log(times[-1] / times[0]) / math.log(REPEATS[-1] / REPEATS[0])
        result[name] = {"seconds": times, "exponent": exponent}
        print(f"{name}: {times[0] * 1000:.1f} ms for {REPEATS[0]:,}, exponent {exponent:.2f}")
    given.result.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
