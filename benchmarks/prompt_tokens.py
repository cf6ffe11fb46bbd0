"""How long the prompts of a template are, and how much of them every turn has for itself.

    python benchmarks/prompt_tokens.py brief benchmarks/prompts/last-four-turns.toml --result FILE.json

Counted on the rows of `msgrpo teach`, which come in the order of play: mean tokens of a prompt, the tokens that all
prompts begin with (computed once), and the mean of what is left.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from machine import options, write

from msgrpo.games import get_scenario
from msgrpo.models.loading import load_base
from msgrpo.models.shared_prefix import common_prefix_length
from msgrpo.prompt import ChatFormat, make_template
from msgrpo.train.nano.teach import rows_of

if __name__ == "__main__":
    parser = options(__doc__, result=True)
    parser.add_argument("prompts", nargs="+", help="brief, none, free, or a file")
    parser.add_argument("--base", default="nano")
    parser.add_argument("--scenario", default="frozen-lake")
    parser.add_argument("--turns", type=int, default=400)
    given = parser.parse_args()
    chat, scenario, found = ChatFormat(load_base(given.base)[1]), get_scenario(given.scenario), {}
    for name in given.prompts:
        rows = itertools.islice(rows_of(scenario, 0, make_template(name)), given.turns)
        prompts = chat.ids([row.prompt for row, *_ in rows])
        shared, mean = common_prefix_length(prompts), sum(map(len, prompts)) / len(prompts)
        found[Path(name).stem] = {"turns": len(prompts), "tokens": mean, "shared": shared, "own": mean - shared}
        print(name, found[Path(name).stem])
    write(given.result, {"base": given.base, "prompts": found})
