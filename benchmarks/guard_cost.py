"""What the guard adds to one request: the only code of ours between a client and vLLM.

    python benchmarks/guard_cost.py --result benchmarks/results/guard-cost.json

Microseconds of an ASGI application that does nothing, behind the guard with the right key and bare, in turn; and
that difference as a share of the fastest answer in `serve-overhead.json`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from statistics import median

from machine import options, write

from msgrpo.serve.guard import App, Guard, Message, Receive, Scope, Send

KEY = "a key as long as those that msgrpo makes"


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    pass


async def receive() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def send(message: Message) -> None:
    raise AssertionError(f"the guard refused: {message}")


async def microseconds(app: App, requests: int) -> float:
    scope = {
        "type": "http",
        "path": "/v1/chat/completions",
        "headers": [(b"content-type", b"application/json"), (b"authorization", f"Bearer {KEY}".encode())],
    }
    began = time.perf_counter()
    for _ in range(requests):
        await app(scope, receive, send)
    return 1e6 * (time.perf_counter() - began) / requests


async def measure(rounds: int, requests: int) -> tuple[float, float]:
    """Medians over the rounds: guarded, bare."""
    os.environ["VLLM_API_KEY"] = KEY
    guarded = Guard(nothing)
    pairs = [(await microseconds(guarded, requests), await microseconds(nothing, requests)) for _ in range(rounds)]
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--served", type=Path, default=Path("benchmarks/results/serve-overhead.json"))
    given = parser.parse_args()
    guarded, bare = asyncio.run(measure(given.rounds, given.requests))
    fastest = min(row["total_ms"] for row in json.loads(given.served.read_text())["summary"])
    result = {
        "guarded_us": guarded,
        "bare_us": bare,
        "fastest_answer_ms": fastest,
        "share_of_it": (guarded - bare) / (1000 * fastest),
    }
    write(given.result, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
