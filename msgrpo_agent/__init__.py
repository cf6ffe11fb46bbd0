"""msgrpo: language-model agents for text-mediated stochastic games, trained with MS-GRPO (arXiv 2508.10839).

    import msgrpo

    lake = msgrpo.get_scenario("frozen-lake")
    agent = msgrpo.make_agent("nano:frozen-lake")

The names below are what a user of the library needs. Each is imported when it is first asked for, so that `import
msgrpo` loads no torch. Training is `from msgrpo.train.loop import train`: `msgrpo.train` is the package.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msgrpo.contract import check_game as check_game
    from msgrpo.episode import play_episode as play_episode
    from msgrpo.episode import read_episodes as read_episodes
    from msgrpo.evals import leaderboard, plays
    from msgrpo.evals.run import evaluate as evaluate
    from msgrpo.evals.verify import verify as verify
    from msgrpo.game import Game as Game
    from msgrpo.game import Scenario as Scenario
    from msgrpo.games import get_scenario as get_scenario
    from msgrpo.prompt import PromptTemplate as PromptTemplate
    from msgrpo.specs import make_agent as make_agent

    build_leaderboard, load_plays = leaderboard.build, plays.load

__version__ = "0.1.0"

# Threads that wait for each other must not hold the core that one of them needs: beside another busy program an
# update of nano takes longer without this (`benchmarks/beside.py` measures it). OpenMP reads it when torch is loaded,
# so a script imports msgrpo before torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOMES = {  # name -> its module, and what it is called there if that is another name
    "Game": "msgrpo.game",
    "Scenario": "msgrpo.game",
    "build_leaderboard": "msgrpo.evals.leaderboard:build",
    "check_game": "msgrpo.contract",
    "evaluate": "msgrpo.evals.run",
    "load_plays": "msgrpo.evals.plays:load",
    "verify": "msgrpo.evals.verify",
    "PromptTemplate": "msgrpo.prompt",
    "get_scenario": "msgrpo.games",
    "make_agent": "msgrpo.specs",
    "play_episode": "msgrpo.episode",
    "read_episodes": "msgrpo.episode",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'msgrpo' has no attribute {name!r}")
    module, _, there = _HOMES[name].partition(":")
    return getattr(import_module(module), there or name)
