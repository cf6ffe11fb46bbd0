"""What a table must not say: what its records deny, what nobody played, what so few games cannot show."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from msgrpo import limits
from msgrpo.agent import Agent, Decision, LanguageAgent, OnText, Sampling, View
from msgrpo.episode import play_episode, read_episodes
from msgrpo.errors import GameFaultError, MsgrpoError, RecordError
from msgrpo.evals import command, match, plays
from msgrpo.evals.leaderboard import build
from msgrpo.evals.plays import check_consistent
from msgrpo.evals.record import records_in, seeds_of
from msgrpo.evals.run import evaluate
from msgrpo.evals.stats import bootstrap_mean, crossed_interval, few_seeds_interval, student_quantile
from msgrpo.evals.tables import csv_text
from msgrpo.evals.verify import ask_again, verify
from msgrpo.game import Game, Outcome, Scenario
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.models.paths import NANO_DIR, shipped_adapters
from msgrpo.prompt import Example, PromptTemplate, make_template
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.specs import cut_short
from tests.command_line import invoked as cli
from tests.evals_helpers import rewritten
from tests.tui_helpers import NIM, answer, scripted

LAKE, SNAKE, DUEL = (get_scenario(name) for name in ("frozen-lake", "snake", "snake-duel"))


def played(out: Path, *agents: Agent, scenario: Scenario = LAKE, episodes: int = 8, **more: Any) -> Path:
    asyncio.run(evaluate(list(agents), [scenario], episodes, out, **more))
    return out


# ── a goal with a cost for each step (4) ─────────────────────────────────────────────────────────────────────────


class Errand(Game):
    """Reaching the door is the goal; every step costs, so that success may have a negative return."""

    actions = ("on", "wait")

    def __init__(self, start_seed: int, chance_seed: int) -> None:
        super().__init__(6)
        self.left = 1 + start_seed % 3

    @property
    def success(self) -> bool | None:
        return self.left == 0

    def observe(self, player: str) -> str:
        return f"{self.left} to go, step {self.steps}"

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        self.left -= actions["player"] == "on"
        self._over = self.left == 0
        return {"player": -0.2}


MakeErrand = Callable[..., Scenario]


@pytest.fixture
def errand(monkeypatch: pytest.MonkeyPatch) -> MakeErrand:
    """Registers the errand, or one that goes otherwise."""

    def make(game: type[Game] = Errand, **more: Any) -> Scenario:
        found = Scenario("errand", "errand", "Go on.", 6, "[test]", game, actions=Errand.actions, goal=True, **more)
        monkeypatch.setitem(SCENARIOS, "errand", found)
        return found

    return make


def test_a_goal_that_costs_is_played_told_and_verified(errand: MakeErrand, tmp_path: Path) -> None:
    """`games check` and `verify` passed it, and the leaderboard called its record damaged."""
    played(tmp_path, RandomAgent(), scenario=errand())
    (file,) = tmp_path.glob("*/*.jsonl")
    assert verify(file).is_complete
    assert any(episode.success and sum(episode.returns.values()) < 0 for episode in read_episodes(file))
    board = command.merge([tmp_path], None, check=True)
    assert board.rows[0].successes is not None


# ── examples in the prompt, twice (5) ────────────────────────────────────────────────────────────────────────────


def test_an_evaluation_and_a_match_with_examples_go_on(tmp_path: Path) -> None:
    """A tuple of examples is a list in the record: the second start found other settings."""

    def agent(spec: str) -> Agent:
        made = scripted(spec, answer("up"))
        made.template = PromptTemplate(name="few", examples=(Example(state="a", answer="<action>up</action>"),))
        return made

    played(tmp_path, agent("nano"), episodes=2)
    played(tmp_path, agent("nano"), episodes=4)
    assert len(list(read_episodes(next(tmp_path.glob("nano/*.jsonl"))))) == 4
    pair = ("nano", "other")
    for starts in (1, 2):
        agents = {spec: agent(spec) for spec in pair}
        ((_, file),) = match.play(DUEL, agents, [pair], starts, tmp_path)
    assert len(list(read_episodes(file))) == 4


# ── who played (22) ──────────────────────────────────────────────────────────────────────────────────────────────


def test_random_and_optimal_are_played_again_by_their_seeds(tmp_path: Path) -> None:
    """Their names were believed: the best of seven random records, half of optimal's from random, each other's."""
    played(tmp_path, RandomAgent(), OptimalAgent(), episodes=12)
    random, optimal = tmp_path / "random" / "frozen-lake.jsonl", tmp_path / "optimal" / "frozen-lake.jsonl"
    assert "moves of random and optimal were played again" in verify(random).summary
    for name, file, other in (("random", random, optimal), ("optimal", optimal, random)):
        whole = file.read_text()
        file.write_text(other.read_text())
        rewritten(file, lambda rows, name=name: [row | {"agents": {"player": name}} for row in rows])
        with pytest.raises(RecordError, match=f"{name} would have played"):
            verify(file)
        with pytest.raises(RecordError, match=f"{name} would have played"):
            command.merge([tmp_path], None, check=True)
        file.write_text(whole)


def test_the_seats_of_a_match_are_played_again_too(tmp_path: Path) -> None:
    agents = {"optimal": OptimalAgent(), "random": RandomAgent()}
    ((_, file),) = match.play(DUEL, agents, [("optimal", "random")], 2, tmp_path)
    assert verify(file).is_complete

    def renamed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        swap = {"optimal": "random", "random": "optimal"}
        return [row | {"agents": {player: swap[spec] for player, spec in row["agents"].items()}} for row in rows]

    rewritten(file, renamed)
    with pytest.raises(RecordError, match="would have played"):
        verify(file)


def test_a_models_record_cannot_call_itself_what_all_are_measured_against(tmp_path: Path) -> None:
    played(tmp_path, scripted("nano", answer("up")), episodes=2)
    file = next(tmp_path.glob("nano/*.jsonl"))
    rewritten(file, lambda rows: [row | {"agents": {"player": "optimal"}} for row in rows])
    with pytest.raises(RecordError, match="holds answers in words"):
        plays.load([tmp_path], mix=True)
    played(tmp_path / "b", RandomAgent(), episodes=2)
    run = json.loads((tmp_path / "b" / "run.json").read_text())
    (tmp_path / "b" / "run.json").write_text(json.dumps(run | {"names": {"random": "optimal"}}))
    with pytest.raises(RecordError, match="takes for another agent"):
        plays.load([tmp_path / "b"])


@pytest.mark.parametrize("settings", [{"model": "m"}, {"model": "m", "parts": {"nano": {}, "human": {}}}])
@pytest.mark.parametrize("spec", ["endpoint:http://h/v1#m", "nano", "adapter:a"])
def test_a_language_model_has_answered_in_words(spec: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """The sibling of a model that calls itself `optimal`: the optimum's play under a model's name passed, since
    without a template nothing was looked at; and so did a seat that says it changed hands while its name does not.
    """
    file = played(tmp_path, OptimalAgent()) / "optimal" / "frozen-lake.jsonl"
    rewritten(file, lambda rows: [r | {"agents": {"player": spec}, "settings": {"player": settings}} for r in rows])
    with pytest.raises(RecordError, match="should have a prompt and an answer"):
        verify(file)


IMITATIONS = [
    *("Random ", "ran\u200bdom", "ｒandom", "Nano:frozen-lake"),
    *("r\u0430ndom", "rand\u03bfm", "r\u0301andom", "\u041d\u03c5man"),  # other alphabets
    *("random\ufe0f", "random\u3164", "\u115frandom", "random\u2800", "n\u0430no", "endp\u043eint:http://h/v1#m"),
]


@pytest.mark.parametrize("spec", [*IMITATIONS, "random"])
def test_no_recorded_agent_only_reads_like_one_of_ours(spec: str, tmp_path: Path) -> None:
    """The optimum's play as `Random ` passed: nobody played it again, and a reader takes it for random's. Siblings:
    letters of other alphabets, blanks that are letters by their category, and `verify`, which took any name.
    """
    file = played(tmp_path, RandomAgent()) / "random" / "frozen-lake.jsonl"
    rewritten(file, lambda rows: [row | {"agents": {"player": spec}} for row in rows])
    if spec == "random":
        assert plays.load([tmp_path])
    else:
        with pytest.raises(RecordError, match="reads like another agent's name"):
            plays.load([tmp_path])
        with pytest.raises(RecordError, match="reads like another agent's name"):
            verify(file)


@pytest.mark.parametrize("name", ["nano", "Human", "op\u200btimal", "endpoint:http://h/v1#m", "adapter:best"])
def test_no_agent_is_called_as_another_kind_of_agent_is(name: str, tmp_path: Path) -> None:
    """Only random, optimal and the others of the same table were refused: random could stand there as `nano`."""
    played(tmp_path, RandomAgent())
    run = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(run | {"names": {"random": name}}))
    assert "takes for another agent" in str(cli("leaderboard", str(tmp_path)).exception)
    told = cli(
        "eval", "random", "--scenario", "frozen-lake", "--name", f"random={name.lower()}", "--out", str(tmp_path)
    )
    assert "takes that for another agent" in str(told.exception)


@pytest.mark.parametrize(
    "names", [("best", "best"), ("best", "Best"), ("best", "b\u200best "), ("best", "b\u0435st")]
)
def test_a_name_that_two_evaluations_gave_to_two_agents_identifies_neither(
    names: tuple[str, str], tmp_path: Path
) -> None:
    """Names that only read alike stood in one table for two agents: they were compared sign by sign."""
    for place, name in enumerate(names):
        out = played(tmp_path / str(place), RandomAgent())
        rewritten(
            out / "random" / "frozen-lake.jsonl",
            lambda rows, place=place: [row | {"agents": {"player": f"mine-{place}"}} for row in rows],
        )
        run = (out / "run.json").read_text().replace('"random"', f'"mine-{place}"')
        (out / "run.json").write_text(json.dumps(json.loads(run) | {"names": {f"mine-{place}": name}}))
    labels = {play.label for play in plays.load([tmp_path / "0", tmp_path / "1"])[0]}
    assert labels == {f"{name} (mine-{place})" for place, name in enumerate(names)}


def test_lines_that_are_removed_and_played_again_are_named(tmp_path: Path) -> None:
    """Deleting lost episodes and starting again until all are won left nothing but the commands in card.md."""
    file = played(tmp_path, RandomAgent()) / "random" / "frozen-lake.jsonl"
    played(tmp_path, RandomAgent())
    assert not any("removed" in note for note in plays.load([tmp_path])[1])
    rewritten(file, lambda rows: rows[:5])
    assert "TAKEN OUT: 3 lines" in verify(file).summary  # also before it is started again
    played(tmp_path, RandomAgent())
    rewritten(file, lambda rows: rows[1:])
    played(tmp_path, RandomAgent())
    played(tmp_path, RandomAgent(), episodes=12)
    assert "TAKEN OUT: 4 lines were removed" in verify(file).summary
    for check in (False, True):
        assert any("4 lines were removed" in note for note in plays.load([tmp_path], check=check)[1])


def test_lines_that_are_removed_after_an_interruption_are_named(tmp_path: Path) -> None:
    """An evaluation that is stopped notes its lines, too: else it would be stopped before each removal."""

    class Stops(RandomAgent):
        asked = 0

        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            Stops.asked += 1
            if Stops.asked == 15:
                raise RuntimeError("stopped")
            return await super().act(view)

    with pytest.raises(RuntimeError, match="stopped"):
        played(tmp_path, Stops(), concurrency=1)
    file = tmp_path / "random" / "frozen-lake.jsonl"
    rewritten(file, lambda rows: rows[:-1])
    assert verify(file).taken_out == 1


@pytest.mark.parametrize("what", ["removed", "emptied"])
def test_verifying_a_folder_misses_the_record_that_is_not_there(what: str, tmp_path: Path) -> None:
    """Only records that are there were looked at: a scenario deleted for all agents was no finding, exit 0."""
    played(tmp_path, RandomAgent())
    played(tmp_path, RandomAgent(), scenario=SNAKE, episodes=2)
    assert cli("verify", str(tmp_path)).exit_code == 0
    record = tmp_path / "random" / "frozen-lake.jsonl"
    record.unlink() if what == "removed" else record.write_text("")
    told = cli("verify", str(tmp_path))
    assert (told.exit_code, "INCOMPLETE: missing: 8 episodes of frozen-lake by random" in told.stdout) == (1, True)


def test_asking_again_asks_whom_a_person_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played(tmp_path, scripted("nano", answer("up")), episodes=4)
    file = next(tmp_path.glob("nano/*.jsonl"))
    same = asyncio.run(ask_again(file, scripted("nano", answer("up")), 5))
    other = asyncio.run(ask_again(file, scripted("nano", answer("down")), 5))
    assert (same.turns, same.agree, other.agree) == (5, 5, 0)
    assert "asked again, the agent chose the recorded action in 5 of 5 turns" in same.summary
    assert "chat template" not in same.summary
    recorded, chat = file.read_text(), {"thinking": False}
    for settings in ({"chat": chat}, {"body": {"chat_template_kwargs": chat}}):  # in this process, at an endpoint
        said = json.dumps(settings, separators=(",", ":"))[1:-1]
        file.write_text(recorded.replace('"settings":{"player":{', f'"settings":{{"player":{{{said},'))
        agent = scripted("nano", answer("up"))
        thoughtful = asyncio.run(ask_again(file, agent, 5))
        other = "recorded with other arguments of the chat template: --chat '{\"thinking\": false}' asks so"
        assert thoughtful.summary.endswith(other)
        for also in ({"chat": chat}, {"body": {"chat_template_kwargs": chat, "min_p": 0.1}}):
            monkeypatch.setattr(agent, "settings", partial(dict, also))
            assert "chat template" not in asyncio.run(ask_again(file, agent, 5)).summary
    file.write_text(recorded.replace('"max_tokens":256', '"max_tokens":7'))
    asked_with(monkeypatch, brief := scripted("nano", answer("up")), how := [])
    asyncio.run(ask_again(file, brief, 1))
    assert [sampling for sampling, _ in how] == [Sampling(temperature=0.0, max_tokens=7)]  # at its own 256 it may say
    assert brief.sampling == Sampling()  # more, or less; and for who asks it next it is as it was
    made: list[dict[str, Any]] = []

    def make(spec: str, **given: Any) -> Agent:
        made.append(given)
        return scripted(spec, answer("up"))

    monkeypatch.setattr("msgrpo.specs.make_agent", make)
    done = cli("verify", str(file), "--ask", "1", "--agent", "nano", "--chat", json.dumps(chat))
    assert done.exit_code == 0
    assert made == [{"chat": chat}]
    refused = cli("verify", str(file), "--ask", "3")
    assert "a record's own agent is never asked" in str(refused.exception)


def asked_with(monkeypatch: pytest.MonkeyPatch, agent: LanguageAgent, how: list[tuple[Sampling, str]]) -> None:
    """Keep with which sampling and which instructions the agent is asked."""
    act = agent.act

    async def noted(view: View, *, on_text: OnText | None = None) -> Decision:
        how.append((agent.sampling, agent.template.name))
        return await act(view, on_text=on_text)

    monkeypatch.setattr(agent, "act", noted)


@pytest.mark.parametrize("sampling", [{"temperature": "hot"}, {"temperature": {}}, [1], "greedy"])
def test_asking_again_reads_sampling_settings_that_are_none(sampling: Any, tmp_path: Path) -> None:
    """The temperature of a damaged record ended in a traceback."""
    played(tmp_path, scripted("nano", answer("up")), episodes=1)
    file = next(tmp_path.glob("nano/*.jsonl"))
    rewritten(file, lambda rows: [row | {"settings": {"player": {"sampling": sampling}}} for row in rows])
    assert asyncio.run(ask_again(file, scripted("nano", answer("up")), 1)).summary.endswith("1 of 1 turn")


def test_each_record_is_asked_about_in_its_own_words_and_an_empty_one_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A match in the folder ended the asking; a record of an unknown prompt was asked as the record before it."""
    free = scripted("a", answer("up"))
    free.template = make_template("free")
    played(tmp_path, free, scripted("c", answer("up")), episodes=1)
    rewritten(
        tmp_path / "c" / "frozen-lake.jsonl",
        lambda rows: [row | {"settings": {"player": {"template": "of another version"}}} for row in rows],
    )
    match.play(DUEL, {"random": RandomAgent(), "optimal": OptimalAgent()}, [("random", "optimal")], 1, tmp_path / "b")
    asked_with(monkeypatch, asked := scripted("nano", answer("up")), how := [])
    monkeypatch.setattr("msgrpo.specs.make_agent", lambda spec, **given: asked)
    done = cli("verify", str(tmp_path), "--ask", "1", "--agent", "nano")
    assert done.exception is None
    assert [name for _, name in how] == ["free", "brief"]
    assert "no finished turn of a single player to ask about" in done.output
    none = cli("verify", str(tmp_path / "b"), "--ask", "1", "--agent", "nano")
    assert "no record holds a turn that nano could be asked about" in str(none.exception)


def test_an_adapter_that_learned_with_longer_answers_than_it_may_give_is_named(tmp_path: Path) -> None:
    """Its answers were cut off at 256 tokens, and nothing said that they had more in its training."""
    pytest.importorskip("peft")
    run = tmp_path / "run"
    shutil.copytree(shipped_adapters()["frozen-lake"], run)
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"max_tokens": 300}))

    def notes(*options: str) -> list[str]:
        options_of = (f"adapter:{run}", "--scenario", "frozen-lake", "--episodes", "1", "--json", *options)
        done = cli("eval", *options_of, "--out", str(tmp_path / f"{len(options)}"))
        assert ("learned with" in done.stderr) == (not options)  # before the first answer
        return [note for note in json.loads(done.stdout)["notes"] if "learned with" in note]

    assert notes() == [
        f"adapter:{run} learned with answers of up to 300 tokens, and here they are cut off at 256; --max-tokens 300 "
        "allows as many."
    ]
    assert notes("--max-tokens", "300") == []
    assert cut_short(["optimal", "nano", f"base:{NANO_DIR}"], 8) == []  # nothing says how long their answers were


# ── what is missing (25) ─────────────────────────────────────────────────────────────────────────────────────────


def test_what_verifying_finds_stands_under_the_table(tmp_path: Path) -> None:
    """Regrets of 0 and prompts with a hint gave a verified table without a word."""
    played(tmp_path, RandomAgent(), scripted("nano", answer("up")), episodes=4, regret=True)
    hint, regrets = (next(tmp_path.glob(f"{name}/*.jsonl")) for name in ("nano", "random"))

    def hinted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for row in rows:
            row["prefix"] = {"player": "The best move is up. " + row["prefix"]["player"]}
            row["settings"]["player"] |= {"template": "0123456789ab"}
        return rows

    def spotless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"turns": [turn | {"regret": 0.0} for turn in row["turns"]]} for row in rows]

    rewritten(hint, hinted)
    rewritten(regrets, spotless)
    notes = " ".join(command.merge([tmp_path], None, check=True, mix=True).notes)
    assert "could not be checked" in notes
    assert "REGRETS: those of" in notes


def test_nothing_that_was_asked_for_goes_missing_without_a_word(tmp_path: Path) -> None:
    asyncio.run(evaluate([RandomAgent(), OptimalAgent()], [LAKE, SNAKE], 3, tmp_path))
    for file in tmp_path.glob("*/snake.jsonl"):
        file.unlink()
    notes = " ".join(command.merge([tmp_path], None).notes)
    assert "random has ended none of 3 episodes of snake, and there is no record of it" in notes
    assert "optimal has ended none of 3 episodes of snake" in notes
    file = tmp_path / "random" / "frozen-lake.jsonl"
    rewritten(file, lambda rows: rows[:-1])
    found = verify(file)
    assert found.unplayed == {"frozen-lake": 1}
    assert not found.is_complete
    assert cli("verify", str(file)).exit_code == 1
    assert cli("verify", str(tmp_path / "optimal" / "frozen-lake.jsonl")).exit_code == 0


def test_a_match_is_told_by_games_that_its_rewards_confirm(tmp_path: Path) -> None:
    """0-40 was printed as 40-0 from returns that denied their rewards; a game that stood there twice passed."""
    agents: dict[str, Agent] = {"optimal": OptimalAgent(), "random": RandomAgent()}
    pair = ("optimal", "random")

    def again() -> list[match.Result]:
        records = match.play(DUEL, agents, [pair], 4, tmp_path)
        return match.report(DUEL, records, 4, tmp_path)[0]

    again()
    file = next((tmp_path / "match").glob("*.jsonl"))
    whole = file.read_text()

    def turned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"returns": {player: -value - 1 for player, value in row["returns"].items()}} for row in rows]

    rewritten(file, turned)
    with pytest.raises(RecordError, match="does not replay"):
        again()
    file.write_text(whole + whole.splitlines()[0] + "\n")
    with pytest.raises(RecordError, match="holds one game twice"):
        again()
    assert verify(file).twice == 1
    lines = whole.splitlines()
    file.write_text("\n".join(lines[1:]) + "\n")
    assert verify(file).starts == 1
    points, failed = match.points_of(file, pair, DUEL, 4)
    (low, high) = match.result(pair, points, failed).bounds
    assert low < high


# ── so few games (23, 26) ────────────────────────────────────────────────────────────────────────────────────────


class Slow(RandomAgent):
    """From its n-th turn on the evaluation is stopped, as Ctrl-C stops it."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns

    async def act(self, view: Any, *, on_text: Any = None) -> Any:
        self.turns -= 1
        if self.turns < 0:
            raise asyncio.CancelledError
        return await super().act(view)


def test_a_beginning_that_ends_before_a_long_game_has_no_interval(tmp_path: Path) -> None:
    """Three of eight stops said -1.000 [-1, -1] where the whole is -0.692."""
    solo = get_scenario("snake-solo")
    with pytest.raises(asyncio.CancelledError):
        played(tmp_path, Slow(260), scenario=solo, episodes=60)
    found, notes = plays.load([tmp_path])
    board = build(found, notes)
    assert found[0].is_biased
    for row in board.rows:
        assert math.isnan(row.return_low)
        assert math.isnan(row.return_high)
        assert "no interval" in command.tables.markdown(board)
    told = " ".join(board.notes)
    assert "no interval and no comparison" in told or "has no result that counts" in told
    assert board.pairs == []
    played(tmp_path, RandomAgent(), scenario=solo, episodes=60)  # the same command goes on
    whole = build(*plays.load([tmp_path]))
    assert not math.isnan(whole.rows[0].return_low)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 8, 30, 199])
@pytest.mark.parametrize("p", [0.9, 0.975, 0.999])
def test_students_quantiles_are_scipys(df: int, p: float) -> None:
    assert student_quantile(p, df) == pytest.approx(scipy_stats.t.ppf(p, df), rel=1e-6)


def test_the_interval_of_few_seeds_by_hand() -> None:
    """Two seeds, two starts: MS_seeds = MS_starts = MS_rest = 0.25; t with one degree of freedom is 12.706."""
    table, mean = np.array([[1.0, 0.0], [0.0, 0.0]]), 0.25
    half = 12.7062 * math.sqrt(0.25 / 4)  # MS_starts less MS_rest is 0
    assert few_seeds_interval(table) == pytest.approx((mean - half, mean + half), rel=1e-4)
    assert crossed_interval([[1.0, 0.0], [0.0, 0.0]], seed=0) == pytest.approx((mean - half, mean + half), rel=1e-4)
    assert math.isnan(few_seeds_interval(np.ones((2, 1)))[0])


def test_seeds_and_starts_have_each_their_own_part_of_the_interval() -> None:
    """Two seeds, three starts: MS_seeds = 2/3 with one degree of freedom (t = 12.706), MS_starts = 7/6 less MS_rest
    = 1/6 with two (t = 4.303).
    """
    half = math.sqrt((12.7062**2 * 2 / 3 + 4.30265**2 * 1) / 6)
    low, high = few_seeds_interval(np.array([[2.0, 0.0, 1.0], [1.0, 0.0, 0.0]]))
    assert (low, high) == pytest.approx((2 / 3 - half, 2 / 3 + half), rel=1e-4)
    half = math.sqrt(12.7062**2 * 49 / 6 / 6)  # MS_seeds = 49/6; MS_starts is 0, and less MS_rest no less
    low, high = few_seeds_interval(np.array([[3.0, 2.0, 3.0], [0.0, 1.0, 0.0]]))
    assert (low, high) == pytest.approx((1.5 - half, 1.5 + half), rel=1e-4)


def test_seeds_with_the_same_mean_are_not_certain() -> None:
    """Two seeds of 0.95 that failed at different starts said 0.95 [0.95, 0.95]: MS_seeds is 0, and MS_starts is below
    MS_rest = 10/199, whose t with 199 degrees of freedom is 1.972.
    """
    values = np.ones((2, 200))
    values[0, :10] = values[1, 10:20] = 0
    half = 1.97196 * math.sqrt(10 / 199 / 400)
    assert crossed_interval(list(values), seed=0) == pytest.approx((0.95 - half, 0.95 + half), abs=1e-6)


def coverage(seeds: int, starts: int, spread: float, experiments: int = 250) -> float:
    """How often the interval holds the mean over all seeds and starts: successes with a logit of start and seed."""
    generator = np.random.default_rng([seeds, int(10 * spread)])
    far = generator.normal(0, math.hypot(1.5, spread), 400_000)
    truth, hits = float((1 / (1 + np.exp(-(0.5 + far)))).mean()), 0
    for _ in range(experiments):
        logits = 0.5 + generator.normal(0, 1.5, starts) + generator.normal(0, spread, (seeds, 1))
        values = (generator.random((seeds, starts)) < 1 / (1 + np.exp(-logits))).astype(float)
        low, high = crossed_interval(list(values), seed=0, resamples=400)
        hits += low <= truth <= high
    return hits / experiments


@pytest.mark.parametrize("spread", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_intervals_over_seeds_hold_what_they_promise(seeds: int, spread: float) -> None:
    """With three seeds 82 to 89 % of the intervals held the mean, with two 73 %. 0.89 is 0.93 less three standard
    errors of 250 experiments; `benchmarks/coverage.py` has them by the thousand.
    """
    assert coverage(seeds, 200, spread) > 0.89


def test_a_mean_of_twenty_values_has_an_interval_that_holds(tmp_path: Path) -> None:
    """Of skewed values 90 % did. And one value has none."""
    generator, hits = np.random.default_rng(3), 0
    for _ in range(300):
        low, high = bootstrap_mean(generator.exponential(1, 20), seed=0, resamples=600)
        hits += low <= 1 <= high
    assert hits / 300 > 0.92
    assert all(map(math.isnan, bootstrap_mean([3.0], seed=0)))
    assert all(map(math.isnan, bootstrap_mean([2.0] * 20, seed=0)))  # nothing says how far others would lie
    assert bootstrap_mean([2.0] * 50, seed=0) == (2.0, 2.0)


# ── files that are none (L6, L8, L9) ─────────────────────────────────────────────────────────────────────────────


def test_pipes_devices_and_loops_are_no_records(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    for name in ("pipe.jsonl", "zero.jsonl", "loop.jsonl"):
        with pytest.raises(MsgrpoError):
            list(read_episodes(tmp_path / name))
        with pytest.raises(MsgrpoError):
            records_in([tmp_path / name])
    with pytest.raises(RecordError, match="no records"):
        records_in([tmp_path])


@pytest.mark.parametrize(
    "run",
    [
        {"repeats": {"random": {"frozen-lake": 10**9}}},
        {"asked": {"random": {"frozen-lake": 10**12}}},
        {"split": "dev"},
        {"of a later version": 10},
        {"prices": {"random": {"prompt": 1, "completion": 1, "of a later version": 10}}},
        {"commands": [{"at": "", "line": "", "of a later version": 10}]},
    ],
)
def test_what_no_evaluation_can_have_is_damage_and_shown(run: dict[str, Any], tmp_path: Path) -> None:
    """It said only that the file is damaged; a later version may have written it. What that one added was lost."""
    played(tmp_path, RandomAgent(), episodes=2)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | run))
    with pytest.raises(RecordError, match=r"is damaged, or of a later version: .* \(seen: (10+|'dev')\)"):
        command.merge([tmp_path], None)


def test_thousands_of_tellings_are_no_name(tmp_path: Path) -> None:
    played(tmp_path, RandomAgent(), episodes=1)
    file = next(tmp_path.glob("*/*.jsonl"))
    rewritten(file, lambda rows: [row | {"scenario": "snake" + 5000 * "~mirrored"} for row in rows])
    with pytest.raises(MsgrpoError, match="is retold 5000 times"):
        verify(file)


def test_no_escape_code_and_no_formula_gets_into_the_files(tmp_path: Path) -> None:
    played(tmp_path, RandomAgent(), scripted("nano", answer("up")), episodes=2, names={"nano": "=HYPERLINK(1)"})
    file = next(tmp_path.glob("nano/*.jsonl"))

    def escaped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for row in rows:
            row["settings"]["player"] |= {"x\x1b[2J": ["\x1b[2J", {"y\x1b": "z\x1b"}]}
        return rows

    rewritten(file, escaped)
    run = json.loads((tmp_path / "run.json").read_text())
    run["commands"] = [{"at": "\x1b[2J", "line": "msgrpo \x1b[2J"}]
    (tmp_path / "run.json").write_text(json.dumps(run))
    out = tmp_path / "tables"
    board = command.merge([tmp_path], out, mix=True)
    assert all("\x1b" not in path.read_text() for path in out.iterdir())
    assert "'=HYPERLINK" in csv_text(board)


def test_games_that_fail_are_counted_and_end_an_evaluation_when_there_are_too_many(
    errand: MakeErrand, tmp_path: Path
) -> None:
    class Seldom(Errand):
        def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
            if self.left == 2 and self.steps == 1:
                raise ZeroDivisionError("seldom")
            return super()._advance(actions)

    class Always(Errand):
        def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
            raise ZeroDivisionError("always")

    played(tmp_path / "a", RandomAgent(), scenario=errand(Seldom), episodes=20)
    board = command.merge([tmp_path / "a"], None)
    assert 0 < board.rows[0].failures["game_fault"] < 20
    assert verify(next(tmp_path.glob("a/*/*.jsonl"))).faultless == {}
    assert re.search(
        r"have no result.*ZeroDivisionError: seldom \(.*test_evals_honest.py:\d+\)", " ".join(board.notes)
    )
    said = r"ZeroDivisionError: always \(.*test_evals_honest.py:.*\(msgrpo games check errand looks for faults\)"
    with pytest.raises(GameFaultError, match=said):
        played(tmp_path / "b", RandomAgent(), scenario=errand(Always), episodes=40)
    played(tmp_path / "c", RandomAgent(), scenario=errand(Always), episodes=4)
    with pytest.raises(RecordError, match=r"\(msgrpo games check errand looks"):
        command.merge([tmp_path / "c"], None)


@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a limit may strike in a callback
@pytest.mark.usefixtures("nothing_has_hung")
def test_a_game_that_hangs_too_often_keeps_nobody_from_another(
    errand: MakeErrand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its third hang ended the evaluation: neither the other game nor the other agent was played."""
    monkeypatch.setattr(limits, "GAME_S", 0.4)
    hangs = []

    class Stuck(Errand):
        def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
            hangs.append(self.steps)
            time.sleep(60)
            return {}

    agents = [RandomAgent(), RandomAgent(spec="third")]
    with pytest.raises(GameFaultError, match="took longer") as error:
        asyncio.run(evaluate(agents, [errand(Stuck), LAKE], 8, tmp_path))
    assert "3 times" in str(error.value.fix)
    assert len(hangs) == limits.HANGS  # and none of those that go on, nor of the other agent's, hangs once more
    assert [len(list(read_episodes(tmp_path / name / "frozen-lake.jsonl"))) for name in ("random", "third")] == [8, 8]


@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a limit may strike in a callback
@pytest.mark.usefixtures("nothing_has_hung")
def test_answers_to_a_game_that_hangs_too_often_are_kept(
    errand: MakeErrand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its unfinished episodes they went as if those had ended."""
    monkeypatch.setattr(limits, "GAME_S", 0.4)

    class Late(Errand):
        def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
            if self.steps == 1:
                time.sleep(60)
            return {"player": 0.0}

    with pytest.raises(GameFaultError, match="took longer"):
        played(tmp_path, scripted("nano", answer("wait")), scenario=errand(Late), episodes=6)
    (record,) = tmp_path.glob("*/*.jsonl")
    _, *begun = record.with_suffix(".turns").read_text().splitlines()
    lost = [list(seeds_of(episode)) for episode in read_episodes(record)]
    assert len(lost) == 2
    assert len([line for line in begun if json.loads(line)["seeds"] not in lost]) == 4


async def test_a_game_without_an_end_is_no_result() -> None:
    episode = await play_episode(LAKE, {"player": RandomAgent()}, start_seed=0, chance_seed=0, sampling_seed=0)
    with pytest.raises(RecordError, match="outcome playing"):
        check_consistent(episode.model_copy(update={"outcome": Outcome.PLAYING}))


def test_a_match_of_a_game_by_turns_goes_on(tmp_path: Path) -> None:
    """What a player is paid while the other moves stands in no turn of its own: the sum of its rewards lacked it."""
    nim, agents = get_scenario(NIM), {"optimal": OptimalAgent(), "random": RandomAgent()}
    for starts in (2, 3):
        ((_, file),) = match.play(nim, agents, [("optimal", "random")], starts, tmp_path)
    assert len(list(read_episodes(file))) == 6


def test_a_budget_ends_in_good_order_and_biases_nothing() -> None:
    whole = plays.Play("a", "snake", {}, asked=200)
    whole.finished = dict.fromkeys(map(str, range(100)))  # type: ignore[arg-type]
    assert not whole.is_biased
    whole.interrupted = 1
    assert whole.is_biased
    whole.at_once = 50
    assert not whole.is_biased
    whole.at_once = 60
    assert whole.is_biased
    whole.unfinished = set(range(20))  # type: ignore[arg-type]
    assert not whole.is_biased  # they have ended too


def test_what_is_no_number_is_null_in_every_file(tmp_path: Path) -> None:
    played(tmp_path, RandomAgent(), OptimalAgent(), RandomAgent(spec="third"), scenario=SNAKE, episodes=1)
    command.merge([tmp_path], tmp_path)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert json.loads(texts["leaderboard.json"])["rows"][0]["return_low"] is None
    assert "no interval" in texts["leaderboard.md"]
    assert "nan" not in texts["leaderboard.html"].lower().replace("nano", "")
    result = cli("leaderboard", str(tmp_path), "--json")
    assert "NaN" not in result.output
    assert json.loads(result.output)["overall"] == []


@pytest.mark.parametrize(
    "reference",
    [lambda game, player: None, lambda game, player: [], lambda game, player: ["x"], lambda game, player: 1 // 0],
)
def test_a_reference_that_fails_costs_its_episodes(reference: Any, errand: MakeErrand, tmp_path: Path) -> None:
    played(tmp_path, OptimalAgent(), scenario=errand(reference=reference), episodes=4)
    (file,) = tmp_path.glob("*/*.jsonl")
    assert {episode.error for episode in read_episodes(file)} == {"game_fault"}
    assert verify(file).faultless == {}


def test_a_judge_that_fails_costs_no_episode(errand: MakeErrand, tmp_path: Path) -> None:
    played(tmp_path, RandomAgent(), scenario=errand(judge=lambda game, player: 1 // 0), episodes=3, regret=True)
    (file,) = tmp_path.glob("*/*.jsonl")
    assert {episode.error for episode in read_episodes(file)} == {None}


def test_a_start_that_fails_is_a_line_of_its_own_and_replays(errand: MakeErrand, tmp_path: Path) -> None:
    class Unlucky(Errand):
        def __init__(self, start_seed: int, chance_seed: int) -> None:
            if chance_seed % 5 == 0 and chance_seed:
                raise ValueError("no such luck")
            super().__init__(start_seed, chance_seed)

    played(tmp_path, RandomAgent(), scenario=errand(Unlucky), episodes=30)
    (file,) = tmp_path.glob("*/*.jsonl")
    lost = [episode for episode in read_episodes(file) if episode.error is not None]
    assert 0 < len(lost) < 30
    assert verify(file).failed.total() == len(lost)
    assert verify(file).faultless == {}


def test_a_lost_episode_of_who_asks_no_server_is_no_failure_of_one(tmp_path: Path) -> None:
    """Losses, relabelled so, left the score, and `verify` passed them."""
    played(tmp_path, RandomAgent(), scripted("adapter:runs/up", answer("up")))

    def relabelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "error": "connection", "turns": [], "returns": {}, "success": None} for row in rows]

    for file in records_in([tmp_path]):
        rewritten(file, relabelled)
        with pytest.raises(RecordError, match=r"says that it failed \(connection\), and nobody in it asks"):
            verify(file)


def test_a_lost_episode_is_no_fault_of_a_game_that_does_not_fail(tmp_path: Path) -> None:
    """An agent's losses, cut short and called the game's fault, left its score, and `verify` passed them."""
    played(tmp_path, scripted("nano", answer("up")), RandomAgent())
    file = next(tmp_path.glob("nano/*.jsonl"))

    def relabelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lost = {"error": "game_fault", "turns": [], "returns": {}, "success": None, "outcome": "playing"}
        return [row if row["success"] else {**row, **lost} for row in rows]

    rewritten(file, relabelled)
    assert verify(file).faultless == {"frozen-lake": 8}
    assert not verify(file).is_complete
    assert "8 episodes of frozen-lake lost by a fault" in " ".join(command.merge([tmp_path], None, check=True).notes)
