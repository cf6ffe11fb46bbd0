"""The session and the match, without Textual."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from msgrpo.agent import Completion, Decision, ParseFailure
from msgrpo.episode import Episode, decide, play_episode
from msgrpo.errors import GameError, GameFaultError, RecordError, UsageError
from msgrpo.evals.verify import first_difference
from msgrpo.game import Outcome
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.tui.agents import HUMAN, HumanAgent
from msgrpo.tui.choices import run_choices
from msgrpo.tui.export import episode_line, file_stem
from msgrpo.tui.match import Match, new_match
from msgrpo.tui.series import verdict
from msgrpo.tui.session import Frame, Session, Setup, Sitting, ending, names_of, short_name
from tests.hostile_games import Walk, scenario


def seat(spec: str, temperature: float = 1.0):
    return {"random": RandomAgent, "optimal": OptimalAgent, HUMAN: HumanAgent}[spec]()


async def finish(session: Session) -> Session:
    while not session.over:
        views = {player: session.view(player) for player in session.waiting()}
        for player, decision in (await decide(session.agents, views)).items():
            session.answer(player, decision)
        session.commit()
    return session


def solo(spec: str = "random", scenario: str = "snake", seed: int = 3) -> Session:
    return new_match(Setup(scenario, spec, seed=seed), seat).sessions[0]


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_session_plays_what_play_episode_plays(scenario: str) -> None:
    match = new_match(Setup(scenario, "random", "random", seed=5), seat)
    session = await finish(match.sessions[0])
    agents = {player: RandomAgent() for player in session.players}
    expected = await play_episode(get_scenario(scenario), agents, start_seed=5, chance_seed=5, sampling_seed=5)
    assert session.episode.model_dump() == expected.model_dump()


def test_nothing_is_played_before_everybody_has_answered() -> None:
    session = new_match(Setup("snake-duel", "random", "random"), seat).sessions[0]
    session.answer("snake1", Decision("up"))
    assert session.waiting() == ["snake2"]
    with pytest.raises(GameError, match="waiting for snake2"):
        session.commit()


async def test_the_cursor_follows_only_when_it_shows_the_present() -> None:
    session = solo("optimal")
    for _ in range(3):
        session.answer("snake1", Decision("up"))
        session.commit()
        if session.over:
            break
    assert session.live
    session.seek(1)
    assert (session.cursor, session.live) == (1, False)
    session.seek(-5)
    assert session.cursor == 0
    session.seek(99)
    assert session.cursor == session.last


async def test_tallies_add_up_reward_invalid_tokens_and_seconds() -> None:
    session = solo(scenario="frozen-lake-slippery")
    said = Completion("hm", "stop", prompt_tokens=10, completion_tokens=2, latency_s=0.5)
    session.answer("player", Decision(None, ParseFailure.NO_TAG, None, said))
    tally = session.commit().tallies["player"]
    assert (tally.total, tally.invalid, tally.tokens, tally.seconds) == (0.0, 1, 12, 0.5)


async def test_taking_over_in_the_past_forgets_the_future_and_signs_the_record() -> None:
    session = await finish(solo("optimal"))
    session.seek(4)
    session.take_over("snake1")
    assert (session.last, session.over, len(session.episode.turns)) == (4, False, 4)
    assert session.episode.agents == {"snake1": "optimal"}
    session.answer("snake1", Decision("up"))
    session.commit()
    assert session.episode.agents == {"snake1": "optimal+human"}
    assert session.episode.settings["snake1"]["parts"] == {
        "optimal": {"model": "dynamic programming or search"},
        "human": {"model": "a person"},
    }
    session.hand_back("snake1")
    await finish(session)
    again = Session.replay(Episode.model_validate_json(episode_line(session.episode)), "play")
    assert again.frames[-1].board == session.frames[-1].board


async def test_rewinding_and_playing_the_same_moves_has_the_same_luck() -> None:
    session = await finish(solo("optimal", "frozen-lake-slippery"))
    boards = [frame.board for frame in session.frames]
    session.seek(1)
    session.rewind()
    await finish(session)
    assert [frame.board for frame in session.frames] == boards


async def test_a_replay_shows_every_frame_and_refuses_a_changed_record() -> None:
    played = await finish(solo())
    record = played.episode.model_copy(deep=True)
    session = Session.replay(record, "play")
    assert session.cursor == 0
    assert [f.board for f in session.frames] == [f.board for f in played.frames]
    record.turns[1].state = "another text"
    with pytest.raises(RecordError, match=r"step 1 of .* differs .*: what the player read then is another text"):
        Session.replay(record, "play")
    record.turns[1].state = played.episode.turns[1].state
    record.turns[1].reward = 7.0
    with pytest.raises(RecordError, match="step 1 of the record differs"):
        Session.replay(record, "play")


async def test_what_is_taken_back_takes_its_late_reward_along() -> None:
    """Rewound before the last move and played to the end again, the record still replays."""
    nim = f"{Path(__file__).resolve().parents[1] / 'examples' / 'nim.py'}:scenario"
    match = new_match(Setup(nim, "optimal", "random", seed=2), seat)
    session = await finish(match.sessions[0])
    assert any(turn.late for turn in session.episode.turns)
    session.seek(session.last - 1)
    session.rewind()
    assert not any(turn.late for turn in session.episode.turns)
    await finish(session)
    assert first_difference(session.episode) is None


async def test_a_step_whose_game_fails_leaves_the_record_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step fails once after its rewards are written, the last one of which comes late, and is then played."""
    nim = f"{Path(__file__).resolve().parents[1] / 'examples' / 'nim.py'}:scenario"
    session = new_match(Setup(nim, "optimal", "random", seed=2), seat).sessions[0]

    def failing(*arguments: object) -> Frame:
        raise GameFaultError("no board")

    while not session.over:
        views = {player: session.view(player) for player in session.waiting()}
        for player, decision in (await decide(session.agents, views)).items():
            session.answer(player, decision)
        before = session.episode.model_copy(deep=True)
        with monkeypatch.context() as patch:
            patch.setattr(Frame, "of", failing)
            with pytest.raises(GameFaultError):
                session.commit()
        assert session.episode == before
        session.commit()
    assert any(turn.late for turn in session.episode.turns)
    assert first_difference(session.episode) is None


async def test_a_replay_of_a_torn_duel_is_refused() -> None:
    match = new_match(Setup("snake-duel", "random", "random"), seat)
    record = (await finish(match.sessions[0])).episode.model_copy(deep=True)
    record.turns.pop()
    with pytest.raises(RecordError, match="step needs one action for each"):
        Session.replay(record, "play")


def test_two_agents_of_a_one_player_game_get_a_board_each_from_the_same_start() -> None:
    match = new_match(Setup("snake", "random", "optimal", seed=9), seat)
    first, second = match.sessions
    assert first.frame.board == second.frame.board
    assert [s.agents["snake1"].spec for s in match.sessions] == ["random", "optimal"]


def test_a_duel_without_a_named_opponent_is_against_optimal() -> None:
    (session,) = new_match(Setup("snake-duel", "human"), seat).sessions
    assert [agent.spec for agent in session.agents.values()] == ["human", "optimal"]


@pytest.mark.parametrize(
    ("setup", "mode"),
    [
        (Setup("snake", "random"), "watch"),
        (Setup("snake", "random", step=True), "step"),
        (Setup("snake", "human"), "play"),
        (Setup("snake", "human", "random"), "race"),
        (Setup("snake", "random", "optimal"), "compare"),
        (Setup("snake-duel", "human"), "duel"),
    ],
)
def test_modes(setup: Setup, mode: str) -> None:
    assert setup.mode == mode


async def test_verdict_and_endings() -> None:
    match = new_match(Setup("frozen-lake", "optimal", "random", seed=3), seat)
    assert verdict(match) == ""
    for session in match.sessions:
        await finish(session)
    assert ending(match.sessions[0], match.sessions[0].frames[-1]) == "goal reached"
    assert verdict(match).startswith("optimal +1")
    lost = match.sessions[1]
    expected = {Outcome.TERMINATED: "fell in the hole at (", Outcome.TRUNCATED: "out of steps at ("}
    assert not lost.game.success
    assert ending(lost, lost.frames[-1]).startswith(expected[lost.game.outcome])


async def test_of_one_agent_in_both_seats_a_sentence_names_the_side() -> None:
    match = new_match(Setup("snake-duel", "random", "random", seed=2), seat)
    duel = await finish(match.sessions[0])
    assert duel.title("snake1") == "random · snake1"
    assert ending(duel, duel.frames[-1]) == duel.frames[-1].ending
    assert verdict(match) == "snake1 0 · snake2 -1  —  snake1 wins"


async def test_a_sitting_keeps_returns_by_scenario_and_agent() -> None:
    sitting = Sitting()
    session = await finish(solo("optimal"))
    sitting.add(session)
    assert sitting.of(session, "snake1") == [session.episode.returns["snake1"]]
    assert sitting.of(solo("random"), "snake1") == []


async def test_the_shorter_of_two_games_waits_at_its_end() -> None:
    match = Match([await finish(solo("random", "frozen-lake")), await finish(solo("optimal", "frozen-lake"))])
    match.seek(match.last)
    assert match.live
    assert all(session.cursor == session.last for session in match.sessions)


async def test_a_file_is_named_after_game_agents_and_seed() -> None:
    assert file_stem(await finish(solo("optimal"))) == "snake-optimal-seed3"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("nano", "nano"),
        ("nano:snake", "nano:snake"),
        ("adapter:runs/fl/", "fl"),
        ("endpoint:http://h:1/v1#Qwen/Q", "Qwen/Q"),
        ("dqn:runs/d", "d"),
        ("adapter:runs/snake", "adapter:snake"),
        ("endpoint:http://h:1/v1#frozen-lake", "endpoint:frozen-lake"),
        ("adapter:runs/optimal", "adapter:optimal"),  # as if the reference had played
        ("endpoint:http://h:1/v1#Nano", "endpoint:Nano"),
        ("endpoint:http://h:1/v1#base:7b", "endpoint:base:7b"),
    ],
)
def test_short_names(spec: str, name: str) -> None:
    assert short_name(spec) == name


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["adapter:runs/a/seed-0", "adapter:runs/b/seed-0", "nano"], ["a/seed-0", "b/seed-0", "nano"]),
        (["adapter:runs/x", "dqn:runs/x", "base:x"], ["adapter:runs/x", "dqn:runs/x", "base:x"]),
        (["endpoint:http://h:1/v1#Q/q", "endpoint:http://h:2/v1#Q/q"], ["h:1/v1#Q/q", "h:2/v1#Q/q"]),
        (["adapter:a/snake", "adapter:a/b/snake"], ["adapter:a/snake", "b/snake"]),
        (["adapter:runs/a/x/", "adapter:runs/b/x"], ["a/x", "b/x"]),  # a shell completes a folder with a slash
        (["adapter:a/x/", "adapter:a/x"], ["adapter:a/x/", "adapter:a/x"]),
        (["nano", "nano"], ["nano", "nano"]),
    ],
)
def test_agents_of_one_short_name_are_told_apart(specs: list[str], names: list[str]) -> None:
    assert [names_of(specs)[spec] for spec in specs] == names


def test_a_run_that_is_called_like_a_game_is_listed_with_its_kind(tmp_path: Path) -> None:
    """`snake (snake)` stood in the list of agents, and `snake · snake` above the board."""
    # the third is an export that goes on, or was killed; the last drives the terminal that shows it
    for name in ("snake", "fl", ".fl.0a1b2c3d.part", "x\x1b]0;title\x07"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    assert sorted(choice.title for choice in run_choices(tmp_path)) == ["adapter:snake (trained)", "fl (trained)"]


def test_unknown_scenarios_are_refused() -> None:
    with pytest.raises(UsageError, match="snke"):
        new_match(Setup("snke", "random"), seat)


def test_a_board_that_is_none_is_the_games_fault() -> None:
    """`msgrpo play` ended in an AttributeError."""
    told = scenario(type("Told", (Walk,), {"board": lambda self: "a board"}))
    with pytest.raises(GameFaultError, match=r"board\(\) gave 'a board', no msgrpo.game.Board"):
        Session(told, {"player": RandomAgent()}, 0)


def test_the_session_loads_no_textual_and_the_app_no_torch() -> None:
    code = (
        "import sys, msgrpo.tui.session, msgrpo.tui.export, msgrpo.tui.plain;"
        "assert 'textual' not in sys.modules, 'textual';"
        "import msgrpo.tui.app, msgrpo.tui.launch, msgrpo.tui.keys;"
        "bad = [m for m in ('torch','transformers','peft','vllm') if m in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
