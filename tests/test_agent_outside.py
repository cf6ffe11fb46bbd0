"""Games from outside the package: by file, by module, by entry point; and what a record may not do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from msgrpo import run_log
from msgrpo.contract import check_game, examine
from msgrpo.episode import Episode, observation_of, play_episode
from msgrpo.errors import GameFaultError, UsageError
from msgrpo.evals.verify import first_difference, verify
from msgrpo.game import Game, Outcome, Scenario
from msgrpo.games import SCENARIOS, get_scenario, outside, recorded_scenario
from msgrpo.games.template import write
from msgrpo.prompt import PromptTemplate
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.serve.env_session import Catalogue, Move, Session
from msgrpo.train.beside import train_and_watch

ROOT = Path(__file__).resolve().parents[1]
NIM = f"{ROOT / 'examples' / 'nim.py'}:scenario"
EXAMPLES = [NIM, "examples.corridor:scenario"]


def msgrpo(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a person runs it, in a folder of theirs."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "msgrpo.cli", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_keep_the_contract_and_are_called_what_they_were_asked_for(name: str) -> None:
    scenario = get_scenario(name)
    assert scenario.id == name
    check_game(scenario, plays=8)
    assert get_scenario(name) is scenario


async def test_nim_is_played_in_turns_and_won_by_who_begins_well() -> None:
    """Its theory: who meets a multiple of four loses against perfect play; late rewards go to the last turn."""
    scenario = get_scenario(NIM)
    for start in range(8):
        agents = dict(zip(scenario.players, (OptimalAgent(), RandomAgent()), strict=True))
        stones = scenario.new(start, 0).stones  # type: ignore[attr-defined]
        episode = await play_episode(scenario, agents, start_seed=start, chance_seed=0, sampling_seed=start)
        players = [turn.player for turn in episode.turns]
        assert players == [scenario.players[i % 2] for i in range(len(players))]
        if stones % 4:
            assert episode.returns == {"first": 1.0, "second": -1.0}
        for player in scenario.players:
            assert sum(turn.paid for turn in episode.turns_of(player)) == episode.returns[player]
        loser = next(turn for turn in reversed(episode.turns) if episode.returns[turn.player] < 0)
        assert (loser.reward, loser.late) == (0.0, -1.0)
        assert first_difference(episode) is None
        episode.turns[0].late += 1
        assert "more in later reward" in str(first_difference(episode))


def test_actions_that_are_not_legal_now_are_a_failure_of_their_own() -> None:
    from msgrpo.agent import ParseFailure, parse_action

    actions, legal = ("one", "two", "three"), ("one",)
    assert parse_action("<action>two</action>", actions, legal).failure is ParseFailure.NOT_NOW
    assert parse_action("<action>four</action>", actions, legal).failure is ParseFailure.ILLEGAL
    assert parse_action("<action>ONE</action>", actions, legal).action == "one"
    assert parse_action("<action>e4</action>", (), ("e4", "d4")).action == "e4"
    for capture in ("bxc3", "Bxc3"):  # in chess the case tells the pawn from the bishop
        assert parse_action(f"<action>{capture}</action>", (), ("bxc3", "Bxc3")).action == capture
    game = get_scenario(NIM).new(0, 0)
    while game.legal(game.to_move[0]) == game.actions:
        game.step({game.to_move[0]: "one"})
    assert observation_of(game, game.to_move[0]).endswith("Legal now: one, two.")


class Short(Game):
    """A game of one step, in which nothing is legal once it is over."""

    def __init__(self) -> None:
        super().__init__(step_limit=3)

    def legal(self, player: str) -> tuple[str, ...]:
        return () if self._over else self.actions

    def observe(self, player: str) -> str:
        return "over" if self._over else "begin"

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        self._over = True
        return {"player": 1.0}


def test_a_game_that_is_over_need_name_no_action() -> None:
    """The app and a server show its last state."""
    scenario = Scenario("short", "short", "A rule.", 3, "[ours]", lambda start, luck: Short())
    game = scenario.new(0, 0)
    assert observation_of(game, "player") == "begin"
    game.step({"player": "up"})
    assert observation_of(game, "player") == "over"
    catalogue = Catalogue([])
    catalogue.scenarios["short"] = scenario
    session = Session(catalogue)
    session.reset()
    last = session.step(Move(action="up"))
    assert (last.text, last.error, last.reward, last.done) == ("over", None, 1.0, True)


def test_a_game_that_goes_on_names_an_action(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Short, "legal", lambda game, player: ())
    with pytest.raises(GameFaultError, match="names no action"):
        observation_of(Short(), "player")


def test_the_module_of_the_current_folder_is_found(tmp_path: Path) -> None:
    write(tmp_path / "cards.py")
    done = msgrpo("games", "cards:scenario", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "On the table:" in done.stdout


def test_what_the_template_writes_plays_checks_and_is_evaluated(tmp_path: Path) -> None:
    """As a new user, in an empty folder: every command that `games new` names, but for the long ones."""
    done = msgrpo("games", "new", "my_game.py", cwd=tmp_path)
    assert done.returncode == 0
    assert len((tmp_path / "my_game.py").read_text().splitlines()) < 60
    assert "msgrpo train my_game.py:scenario" in done.stderr
    assert msgrpo("games", "new", "my_game.py", cwd=tmp_path).returncode == 2
    (tmp_path / "my games").mkdir()
    spaced = msgrpo("games", "new", "my games/game.py", cwd=tmp_path)
    assert "msgrpo games check 'my games/game.py:scenario'" in spaced.stderr  # it can be pasted
    checked = json.loads(msgrpo("games", "check", "my_game.py:scenario", "--json", cwd=tmp_path).stdout)
    assert [rule["breach"] for rule in checked["rules"]] == [None] * len(checked["rules"])
    told = msgrpo("games", "check", "my_game.py:scenario", cwd=tmp_path)
    assert f"all {len(checked['rules'])} rules hold" in told.stderr
    played = msgrpo("play", "my_game.py:scenario", "--agent", "optimal", "--plain", cwd=tmp_path)
    assert "On the table" in played.stdout
    assert "all steps played" in played.stdout
    arguments = ("--scenario", "my_game.py:scenario", "--episodes", "12", "--out", "ev", "--json")
    board = msgrpo("eval", "optimal", "random", *arguments, cwd=tmp_path)
    assert board.returncode == 0, board.stderr
    rows = {row["agent"]: row["return_mean"] for row in json.loads(board.stdout)["rows"]}
    assert rows["optimal"] > rows["random"]
    assert subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "my_game.py"], cwd=tmp_path, capture_output=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ).returncode == 0  # fmt: skip
    refused = msgrpo("verify", "ev", cwd=tmp_path)  # a record alone loads no code
    assert refused.returncode == 2
    assert "msgrpo --allow my_game.py:scenario" in refused.stderr
    allowed = msgrpo("--allow", "my_game.py:scenario", "verify", "ev", cwd=tmp_path)
    assert allowed.returncode == 0, allowed.stderr


def test_rules_that_changed_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "my_game.py")
    arguments = ("--scenario", "my_game.py:scenario", "--episodes", "12", "--out", "ev")
    assert msgrpo("eval", "random", *arguments, cwd=tmp_path).returncode == 0
    text = (tmp_path / "my_game.py").read_text()
    (tmp_path / "my_game.py").write_text(text.replace("1 point if you are right", "one point if you are right"))
    done = msgrpo("--allow", "my_game.py:scenario", "leaderboard", "ev", cwd=tmp_path)
    assert done.returncode == 2
    assert "the rules of my_game.py:scenario changed" in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\nscenario = 1 / 0\n", r"ZeroDivisionError: .* \(.*broken.py:2\)"),
        ("def f(:\n", r"SyntaxError: .* \(.*broken.py:1\)"),
        ("import nowhere_at_all\n", r"ModuleNotFoundError: .* \(.*broken.py:1\)"),
        ("scenario = 3\n", "is a int"),
        ("other = 3\n", "has no 'scenario'"),
        ("def scenario():\n    return None\n", "is a NoneType"),
        ("def scenario():\n    raise KeyError('k')\n", r"KeyError: 'k' \(.*broken.py:2\)"),
    ],
)
def test_a_file_that_is_no_game_is_told_with_its_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(UsageError, match=says) as error:
        get_scenario(f"{tmp_path / 'broken.py'}:scenario")
    assert error.value.fix


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("actions=['a', 'b']", r"actions of the Scenario 't' is \['a', 'b'\], a list"),
        ("players=['me']", "players of the Scenario 't' is .*, a list"),
        ("step_limit='4'", "step_limit of the Scenario 't' is '4', a str"),
        ("step_limit=True", "step_limit of the Scenario 't' is True, a bool"),
        ("rules=b'play'", "rules of the Scenario 't' is b'play', a bytes"),
        ("actions=('a', 5)", "5 is no name of a player or an action"),
        ("family=5", "family of the Scenario 't' is 5, a int"),
        ("goal='yes'", "goal of the Scenario 't' is 'yes', a str"),
        ("make=None", "make of the Scenario 't' is None, a NoneType"),
        ("reference='best'", "reference of the Scenario 't' is 'best', a str"),
        ("step_limit=0", "'t' has the players .* and the step limit 0"),
        ("players=()", r"'t' has the players \(\) and the step limit"),
    ],
)
def test_a_scenario_whose_fields_have_another_type_is_refused_by_name(field: str, says: str, tmp_path: Path) -> None:
    """A list of actions ended an evaluation in a traceback, a limit that was text as well; from Python too. A goal
    that was text made records that were called damaged; a reference player that was none was the game's fault.
    """
    file = tmp_path / "typed.py"
    given = f"**dict(id='t', family='t', rules='', step_limit=4, source='', make=Game) | dict({field})"
    file.write_text(f"from msgrpo.game import Game, Scenario\nscenario = Scenario({given})\n")
    with pytest.raises(UsageError, match=f"typed.py:scenario' cannot be loaded: .*{says}"):
        get_scenario(f"{file}:scenario")
    with pytest.raises(UsageError, match=says):
        replace(get_scenario("snake"), id="t", **eval(f"dict({field})"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:scenario", "there is no file"),
        ("no module:scenario", "names no module"),
        ("nowhere_at_all:scenario", "cannot be loaded: ModuleNotFoundError"),
        ("examples.corridor:nothing", "has no 'nothing'"),
        ("gym:Nothing-v0", "no Gymnasium environment"),
        ("gym:CartPole-v1", "is no MiniGrid level"),
        ("spiel:nothing", "OpenSpiel has no game"),
        ("spiel:nfg_game", "OpenSpiel has no game 'nfg_game'"),  # needs a file; it was an IndexError
        ("babyai-got", "no scenario is named"),
    ],
)
def test_names_that_lead_nowhere_say_what_was_looked_for(
    name: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=says):
        get_scenario(name)
    assert "Available games" not in capfd.readouterr().err  # OpenSpiel prints them all by itself


def test_a_game_whose_name_no_record_can_hold_is_refused_before_it_runs(tmp_path: Path) -> None:
    """Its episodes were recorded under another name: no table had a row of it, and all failures stayed unknown."""
    file = tmp_path / "my\x1bgame.py"
    file.write_text("raise ValueError('it ran')")
    with pytest.raises(UsageError, match="holds what cannot be printed"):
        get_scenario(f"{file}:scenario")


def test_an_installed_package_offers_its_game(tmp_path: Path) -> None:
    """examples/packaged as pip lays it out: the module, and metadata with the entry point of its pyproject.toml."""
    packaged = ROOT / "examples" / "packaged"
    offered = tomllib.loads((packaged / "pyproject.toml").read_text())["project"]["entry-points"]["msgrpo.scenarios"]
    shutil.copytree(packaged / "msgrpo_cards", tmp_path / "msgrpo_cards")
    metadata = tmp_path / "msgrpo_cards-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: msgrpo-cards\nVersion: 0.1\n")
    broken = "another = msgrpo_cards:nothing"  # it hid all other games from the list
    (metadata / "entry_points.txt").write_text(f"[msgrpo.scenarios]\ncards = {offered['cards']}\n{broken}\n")
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    listed = msgrpo("games", "--json", cwd=tmp_path, PYTHONPATH=path)
    assert [one["id"] for one in json.loads(listed.stdout)][-1] == "cards"
    assert "'another' cannot be loaded: AttributeError" in listed.stderr
    done = msgrpo(
        "eval", "optimal", "--scenario", "cards", "--episodes", "12", "--out", "ev", cwd=tmp_path, PYTHONPATH=path
    )
    assert done.returncode == 0, done.stderr
    assert msgrpo("verify", "ev", cwd=tmp_path, PYTHONPATH=path).returncode == 0  # an installed package is trusted


@pytest.mark.parametrize(
    "name", ["os:getcwd", "evil.py:scenario", "subprocess:run", "spiel:efg_game(filename=/etc/passwd)"]
)
def test_a_record_loads_no_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: to import whatever a file that came by mail names."""
    monkeypatch.setattr(outside, "_found", lambda name: pytest.fail(f"{name} was loaded"))
    with pytest.raises(UsageError, match="not loaded because a record says so"):
        recorded_scenario(name)
    episode = Episode(
        scenario=name, start_seed=0, chance_seed=0, sampling_seed=0, agents={}, settings={}, outcome=Outcome.TRUNCATED
    )
    (tmp_path / "record.jsonl").write_text(episode.model_dump_json() + "\n")
    with pytest.raises(Exception, match="not loaded because a record says so"):
        verify(tmp_path / "record.jsonl")


def test_libraries_are_not_imported_before_they_are_asked_for() -> None:
    program = (
        "import sys, msgrpo.games\n"
        "msgrpo.games.get_scenario('snake')\n"
        "print([name for name in ('minigrid', 'pyspiel', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "extra"), [("babyai-goto", "minigrid"), ("spiel:tic_tac_toe", "openspiel")])
def test_an_extra_that_is_missing_is_one_line(name: str, extra: str, tmp_path: Path) -> None:
    for package in ("minigrid", "pyspiel"):  # stand-ins that fail as a package does that is not there
        (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('no {package}', name='{package}')\n")
    done = msgrpo("games", name, cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.returncode == 2
    assert "pip install " in done.stderr
    assert f"[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_prompt_lists_actions_only_where_they_are_few() -> None:
    few, many = get_scenario("spiel:tic_tac_toe"), get_scenario("spiel:hex")
    assert "x(0,0), x(0,1)" in PromptTemplate().render(few, "").prefix
    assert "those that the state names as legal" in PromptTemplate().render(many, "").prefix
    assert all("{" not in PromptTemplate().render(scenario, "").prefix for scenario in SCENARIOS.values())


def test_a_process_that_is_asked_by_a_name_plays_the_same_game() -> None:
    assert not examine(get_scenario("snake"), plays=1, name="snake").breaches


def test_a_file_without_a_scenarios_name_is_told_what_it_has_and_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "my_game.py"
    file.write_text("open('ran', 'w')\nlake = Scenario('x')\ndef made() -> msgrpo.game.Scenario: ...\nother = 1\n")
    said = msgrpo("play", "my_game.py", "--plain", cwd=tmp_path).stderr
    assert "my_game.py:lake or my_game.py:made" in said
    assert not (tmp_path / "ran").exists()
    file.write_text("not python at all")
    assert "my_game.py:NAME" in msgrpo("play", "my_game.py", "--plain", cwd=tmp_path).stderr


def test_commands_that_are_printed_quote_a_folder_with_a_space(tmp_path: Path) -> None:
    file = tmp_path / "a run"
    file.write_text("")
    with pytest.raises(UsageError) as of_run:
        run_log.settings(file)
    assert f"--replay '{file}'" in str(of_run.value)
    with pytest.raises(UsageError) as watched:
        train_and_watch([], tmp_path / "not there")
    assert f"--run '{tmp_path / 'not there'}' --plain" in str(watched.value)
