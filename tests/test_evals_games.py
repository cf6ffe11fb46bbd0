"""Evaluations of games that are at odds with their scenario: the game is named, and no record is called damaged."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

import pytest

from msgrpo import trust
from msgrpo.errors import GameFaultError, RecordError, UsageError
from msgrpo.evals.command import Options
from msgrpo.evals.failures import ATTEMPTS, FAILURE_SHARE, FEWEST_FAILURES
from msgrpo.evals.progress import EvalProgress
from msgrpo.evals.run import evaluate
from msgrpo.evals.suites import episode_seeds
from msgrpo.evals.verify import verify
from msgrpo.games import get_scenario
from msgrpo.references import OptimalAgent, RandomAgent
from tests.command_line import invoked
from tests.evals_helpers import eval_here
from tests.test_evals_ray import Here

FILE = """
from msgrpo.errors import GameFaultError
from msgrpo.game import Game, Scenario

class Odd(Game):
    actions = ("on", "back")

    def __init__(self, start_seed, chance_seed):
        super().__init__(3)
        self.start = start_seed
        {begin}

    def observe(self, player):
        return f"start {{self.start}}, step {{self.steps}}"

    def _advance(self, actions):
        return {{"player": 1.0}}

    {more}

scenario = Scenario("odd", "odd", "Go.", 3, "[test]", Odd, actions=Odd.actions, {fields})
"""


def odd_game(folder: Path, begin: str = "", more: str = "", fields: str = "") -> str:
    """The name of a game of three steps with something odd in it."""
    file = folder / "odd.py"
    file.write_text(FILE.format(begin=begin, more=more, fields=fields))
    return f"{file}:scenario"


def test_a_start_that_fails_is_named_each_time_it_is_asked_for(tmp_path: Path) -> None:
    """The second time was a RuntimeError: the fault had ended the iterator of starts, and `eval` asks twice."""
    name = odd_game(tmp_path, begin="raise ValueError('no start')")
    for _ in range(2):
        with pytest.raises(GameFaultError, match="no start"):
            episode_seeds(get_scenario(name), 1)
    with pytest.raises(GameFaultError, match="no start"):
        eval_here(tmp_path / "alone", agents=["random"], scenarios=[name])


@pytest.mark.parametrize("error", ["ValueError('no start')", "GameFaultError('no start', fatal=True)"])
async def test_a_game_whose_starts_fail_hides_no_other_games_and_no_other_agents_results(
    error: str, tmp_path: Path
) -> None:
    """Named first it hid all others, and the agents after the first had not played them; on Ray nobody had. And where
    two agents and the table waited for a start that hangs, which is fatal the third time, no table was written.
    """
    name = odd_game(tmp_path, begin=f"if start_seed > 130: raise {error}")
    both = [get_scenario(name), get_scenario("frozen-lake")]
    board = await asyncio.to_thread(
        eval_here, tmp_path / "e", agents=["random", "optimal"], scenarios=[one.id for one in both], episodes=50
    )
    sound = 25  # of the starts up to 130 that are for the test
    assert [(row.scenario, row.agent, row.episodes, row.asked) for row in board.rows] == [
        (name, "random", sound, 50),
        ("frozen-lake", "optimal", 50, 50),
        ("frozen-lake", "random", 50, 50),
    ]
    assert "no start" in board.fatal
    progress = EvalProgress()
    with pytest.raises(GameFaultError, match="no start"):
        await evaluate([RandomAgent()], both, 50, tmp_path / "ray", progress=progress, elsewhere=Here())
    await evaluate([RandomAgent()], both[1:], 50, tmp_path / "ray", progress=progress)  # it raised the first's fault
    ended = {file.stem: len(file.read_text().splitlines()) for file in (tmp_path / "ray").glob("*/*.jsonl")}
    assert (ended.pop("frozen-lake"), *ended.values()) == (50, sound)


@pytest.mark.parametrize("elsewhere", [None, Here()])
async def test_a_game_whose_moves_fail_hides_no_other_games_and_no_other_agents_results(
    elsewhere: Here | None, tmp_path: Path
) -> None:
    """Its eleventh failure ended the run: no agent played the games after it, and none came after the first agent."""
    name = odd_game(tmp_path, more="legal = None")
    both = [get_scenario(name), get_scenario("frozen-lake")]
    agents = [RandomAgent()] if elsewhere else [RandomAgent(), OptimalAgent()]
    for _ in range(4):  # once more than an episode is tried: what failed together uses up no attempt
        with pytest.raises(
            GameFaultError, match=r"random: \d+ of \d+ episodes of .*odd.py:scenario failed, the last"
        ):
            await evaluate(agents, both, 50, tmp_path / "e", elsewhere=elsewhere)
    ended = {file.parent.name: len(file.read_text().splitlines()) for file in tmp_path.glob("e/*/frozen-lake.jsonl")}
    assert ended == {agent.spec: 50 for agent in agents}


def test_how_an_evaluation_goes_on_is_said_once(tmp_path: Path) -> None:
    name = odd_game(tmp_path, more="legal = None")
    scenarios = ["--scenario", name, "--scenario", "frozen-lake"]
    ended = invoked("eval", "random", *scenarios, "--episodes", "20", "--out", str(tmp_path / "e")).exception
    assert isinstance(ended, RecordError)
    assert str(ended).count("start the same command again") == 1


async def test_every_game_that_stops_is_named(tmp_path: Path) -> None:
    """Only the first was: nothing said that the second had stopped before its end."""
    names = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        names.append(odd_game(folder, more="legal = None"))
    with pytest.raises(GameFaultError) as raised:
        await evaluate([RandomAgent()], [get_scenario(name) for name in names], 50, tmp_path / "e")
    assert all(f"episodes of {name} failed" in raised.value.message for name in names)


@pytest.mark.parametrize("elsewhere", [None, Here()])
async def test_failures_that_are_known_do_not_stop_a_second_start(elsewhere: Here | None, tmp_path: Path) -> None:
    """Played again, and alone, eleven of them stopped every start, and were forgiven: they were never given up."""
    game = get_scenario(odd_game(tmp_path, more="legal = lambda self, player: 1 / (self.start % 5) and self.actions"))
    for _ in range(ATTEMPTS):
        await evaluate([RandomAgent()], [game], 160, tmp_path / "e", elsewhere=elsewhere, concurrency=1)
    progress = EvalProgress()
    await evaluate([RandomAgent()], [game], 160, tmp_path / "e", progress=progress)
    assert (progress.given_up, progress.failed) == (160 - progress.finished_before, 0)
    assert FEWEST_FAILURES < progress.given_up < FAILURE_SHARE * 160


@pytest.mark.parametrize(
    ("oddity", "said"),
    [
        ({"begin": "self._over = True"}, "it is over at its start (terminated)"),
        ({"begin": "self.step_limit = 4"}, "it goes on after 3 steps; its limit is 3"),
        ({"fields": "goal=True"}, "success is None at the end, and its scenario says goal=True"),
        ({"more": "success = False"}, "success is False at the end, and its scenario says goal=False"),
    ],
)
def test_an_end_that_is_no_result_of_the_scenario_is_the_games_fault(
    oddity: dict[str, str], said: str, tmp_path: Path
) -> None:
    """Such episodes were recorded as results, and then the whole folder was called damaged."""
    name = odd_game(tmp_path, **oddity)
    with pytest.raises(RecordError, match=re.escape(f"{said} (msgrpo games check")):
        eval_here(tmp_path / "e", agents=["random"], scenarios=[name], episodes=3)
    assert verify(next((tmp_path / "e").glob("random/*.jsonl"))).failed.total() == 3


def test_a_game_without_a_reference_player_hides_no_other_agents_result(tmp_path: Path) -> None:
    """When all others had played, `optimal` ended the evaluation without a table, also where nobody had named it."""
    name = odd_game(tmp_path)
    board = eval_here(tmp_path / "e", agents=["random", "optimal"], scenarios=["frozen-lake", name], episodes=2)
    assert {(row.agent, row.scenario) for row in board.rows} == {
        ("random", "frozen-lake"),
        ("optimal", "frozen-lake"),
        ("random", name),
    }
    assert f"optimal is not in {name}: nothing is known to be optimal there." in board.notes
    assert Options(scenarios=[name]).specs() == ["nano", "random"]
    with pytest.raises(UsageError, match=r"optimal can play none of .*: nothing is known to be optimal there"):
        eval_here(tmp_path / "f", agents=["random", "optimal"], scenarios=[name], episodes=2)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    "reader",
    [
        ["leaderboard", "--json"],
        ["verify"],
        ["view", "--html", "page.html"],
        ["export", "--to", "inspect", "--out", "logs"],
    ],
)
def test_of_a_record_of_two_games_both_are_named_with_the_command(
    reader: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was named after the other, each with a command that ended in `…`."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        eval_here(tmp_path / "e", agents=["random"], scenarios=[odd_game(tmp_path / folder)], episodes=1)
    monkeypatch.setattr(trust, "_allowed", set())
    one, two = (f"{tmp_path / folder / 'odd.py'}:scenario" for folder in ("one", "two"))
    monkeypatch.chdir(tmp_path)
    command_line = [*reader, "e"]
    for allowed in ([], ["--allow", one]):
        monkeypatch.setattr("sys.argv", ["msgrpo", *allowed, *command_line])
        refused = invoked(*allowed, *command_line).exception
        assert isinstance(refused, UsageError)
        assert f"the game {two!r}" in refused.message
        missing = [] if allowed else ["--allow", one]
        wanted = ["msgrpo", *missing, "--allow", two, *allowed, *command_line]
        assert str(refused.fix).endswith(f": {shlex.join(wanted)}")
    assert invoked(*wanted[1:]).exception is None
