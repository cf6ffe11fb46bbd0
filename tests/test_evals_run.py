"""Interruptions: nothing lost, nothing doubled, no failed request turned into a move."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from msgrpo.agent import Agent, Completion, Decision, LanguageAgent, OnText, ParseFailure, Sampling, View
from msgrpo.episode import Turn, new_episode, observation_of, read_episodes
from msgrpo.errors import EndpointError, GameError, ModelError, MsgrpoError, RecordError, UsageError
from msgrpo.evals import command, leaderboard, plays, suites
from msgrpo.evals.budget import Budget
from msgrpo.evals.failures import ATTEMPTS, FEWEST_FAILURES
from msgrpo.evals.partial import Partial
from msgrpo.evals.progress import EvalProgress, shown
from msgrpo.evals.record import Price, Record, changing_run, folder_name, read_run, seeds_of
from msgrpo.evals.run import evaluate
from msgrpo.evals.suites import EpisodeSeeds, episode_seeds
from msgrpo.evals.verify import verify
from msgrpo.game import Judgement, Scenario
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.models.endpoint import EndpointModel
from msgrpo.models.generation import Row
from msgrpo.models.loading import nano
from msgrpo.models.local import LocalModel
from msgrpo.prompt import Prompt
from msgrpo.references import OptimalAgent, RandomAgent
from tests.command_line import PROGRAM
from tests.evals_helpers import eval_here
from tests.fake_server import Behaviour, FakeServer, Request, answer, hang, player, reply, reset
from tests.train_helpers import recorded_batches

LAKE = get_scenario("frozen-lake")


async def no_wait(seconds: float) -> None:
    await asyncio.sleep(0)


def served(server: FakeServer, **arguments: Any) -> LanguageAgent:
    return LanguageAgent("endpoint:fake", EndpointModel(server.url, "fake", sleep=no_wait, **arguments))


@dataclass
class Counting:
    """A random agent that counts its episodes and fails where it is told."""

    spec: str = "counting"
    fails: int = 0
    kind: str = "server_error"
    fatal: bool = False
    begun: list[int] = field(default_factory=list)

    def settings(self) -> dict[str, Any]:
        return {"model": "counting"}

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        await asyncio.sleep(0)
        if view.game.steps == 0:
            self.begun.append(view.seed)
            if self.fails:
                self.fails -= 1
                raise EndpointError("down", kind=self.kind, fatal=self.fatal)
        return await RandomAgent().act(view)

    async def close(self) -> None:
        """Nothing to close."""


def lines(out: Path, spec: str = "counting", scenario: str = "frozen-lake") -> list[Any]:
    return list(read_episodes(out / folder_name(spec) / f"{scenario}.jsonl"))


async def test_every_agent_plays_the_same_episodes(tmp_path: Path) -> None:
    await evaluate([Counting("a"), Counting("b")], [LAKE], 6, tmp_path, concurrency=4)
    wanted = set(episode_seeds(LAKE, 6))
    assert {seeds_of(e) for e in lines(tmp_path, "a")} == {seeds_of(e) for e in lines(tmp_path, "b")} == wanted


async def test_a_finished_evaluation_plays_nothing_and_a_longer_one_only_the_rest(tmp_path: Path) -> None:
    agent = Counting()
    for episodes, begun in ((4, 4), (4, 4), (7, 7)):
        await evaluate([agent], [LAKE], episodes, tmp_path)
        assert len(agent.begun) == begun
    assert len({seeds_of(e) for e in lines(tmp_path)}) == 7


async def test_a_failed_episode_is_recorded_apart_and_tried_again_at_the_next_start(tmp_path: Path) -> None:
    agent = Counting(fails=2)
    await evaluate([agent], [LAKE], 5, tmp_path)
    assert [e.error for e in lines(tmp_path)].count("server_error") == 2
    await evaluate([agent], [LAKE], 5, tmp_path)
    (play,), _ = plays.load([tmp_path])
    assert len(play.finished) == 5
    assert len(play.failed) == 2


async def test_an_outage_uses_no_attempts_up(tmp_path: Path) -> None:
    for _ in range(ATTEMPTS + 1):
        await evaluate([Counting(fails=1)], [LAKE], 1, tmp_path)
    agent = Counting()
    await evaluate([agent], [LAKE], 1, tmp_path)
    assert len(agent.begun) == 1


async def test_the_rate_is_the_present_agents(tmp_path: Path) -> None:
    clock = iter(range(10_000))
    progress = EvalProgress(clock=lambda: float(next(clock)))
    await evaluate([Counting()], [LAKE], 20, tmp_path, progress=progress)
    before = progress.rate
    progress.begin(Counting("another"), 20)
    assert before > 0 == progress.rate


async def test_an_episode_that_always_fails_is_given_up_and_played_again_when_asked(tmp_path: Path) -> None:
    for _ in range(ATTEMPTS):
        await evaluate([Counting(fails=1, kind="context_length")], [LAKE], 1, tmp_path)
    progress, agent = EvalProgress(), Counting()
    await evaluate([agent], [LAKE], 1, tmp_path, progress=progress)
    assert agent.begun == []
    assert progress.given_up == 1
    await evaluate([agent], [LAKE], 1, tmp_path, retry_failed=True)
    assert len(agent.begun) == 1


async def test_a_fatal_failure_stops_at_once_and_keeps_what_is_finished(tmp_path: Path) -> None:
    await evaluate([Counting()], [LAKE], 2, tmp_path)
    agent = Counting(fails=1, fatal=True)
    with pytest.raises(EndpointError, match="down"):
        await evaluate([agent], [LAKE], 50, tmp_path, concurrency=2)
    assert len(agent.begun) <= 2
    assert len(lines(tmp_path)) - 2 in (0, 1)  # the other one in flight may have ended with its first step


async def test_too_many_failures_stop_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="11 of 11 episodes failed") as caught:
        await evaluate([Counting(fails=1000)], [LAKE], 100, tmp_path, concurrency=1)
    assert caught.value.fatal
    assert len(lines(tmp_path)) == FEWEST_FAILURES + 1


async def test_a_run_that_is_cancelled_goes_on_where_it_was(tmp_path: Path) -> None:
    agent = Counting()
    progress = EvalProgress()
    running = asyncio.ensure_future(evaluate([agent], [LAKE], 30, tmp_path, concurrency=3, progress=progress))
    while progress.done < 5:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    kept = len(lines(tmp_path))
    assert 5 <= kept < 30
    again = Counting()
    await evaluate([again], [LAKE], 30, tmp_path)
    assert len(again.begun) == 30 - kept
    assert len({seeds_of(e) for e in lines(tmp_path)}) == len(lines(tmp_path)) == 30


async def test_kill_9_loses_at_most_the_torn_line(tmp_path: Path) -> None:
    await evaluate([Counting()], [LAKE], 4, tmp_path)
    path = tmp_path / "counting" / "frozen-lake.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # the writer was killed inside the fourth line
    agent = Counting()
    await evaluate([agent], [LAKE], 4, tmp_path)
    assert len(agent.begun) == 1
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from msgrpo.evals.progress import EvalProgress
from msgrpo.evals.run import evaluate
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.references import RandomAgent
def die(progress):
    if progress.done == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(evaluate([RandomAgent()], [get_scenario("frozen-lake")], 20, Path(sys.argv[1]),
                     progress=EvalProgress(on_change=die)))
"""


def test_killed_again_and_again_the_result_is_that_of_a_clean_run(tmp_path: Path) -> None:
    for after in ("3", "4", "99"):
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "killed"), after], check=False)
        assert done.returncode == (0 if after == "99" else -9)
    asyncio.run(evaluate([RandomAgent()], [LAKE], 20, tmp_path / "clean"))
    killed, clean = ({seeds_of(e): e.turns for e in lines(tmp_path / name, "random")} for name in ("killed", "clean"))
    assert len(lines(tmp_path / "killed", "random")) == 20
    assert killed == clean


async def test_a_full_disk_stops_the_run_and_leaves_a_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [3000]

    def write(file: int, data: bytes) -> int:
        """What a disk with little room does: a short write first, then an error."""
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(len(data), room[0])
        room[0] -= taken
        return real(file, data[:taken])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(RecordError, match="No space left"):
            await evaluate([Counting()], [LAKE], 20, tmp_path, concurrency=1)
    kept = lines(tmp_path)
    assert 0 < len(kept) < 20
    assert (tmp_path / "counting" / "frozen-lake.jsonl").read_bytes().endswith(b"\n")
    await evaluate([Counting()], [LAKE], 20, tmp_path)
    assert len(lines(tmp_path)) == 20


def test_two_processes_do_not_write_one_record(tmp_path: Path) -> None:
    with (
        Record(tmp_path / "a.jsonl", {}),
        pytest.raises(RecordError, match="another process"),
    ):
        Record(tmp_path / "a.jsonl", {})


async def test_a_run_that_stopped_as_hopeless_uses_no_attempts_up(tmp_path: Path) -> None:
    """A server that was set up wrongly for a while (418 for every request) does not lock its episodes out."""
    for _ in range(ATTEMPTS + 1):
        with pytest.raises(EndpointError, match="episodes failed"):
            await evaluate([Counting(fails=1000, kind="bad_request")], [LAKE], 12, tmp_path, concurrency=1)
    agent = Counting()
    await evaluate([agent], [LAKE], 12, tmp_path)
    assert len(agent.begun) == 12


async def test_the_most_failures_can_be_set(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="1 of 1 episodes failed"):
        await evaluate([Counting(fails=1000)], [LAKE], 100, tmp_path, concurrency=1, max_failures=0)
    await evaluate([Counting(fails=20)], [LAKE], 20, tmp_path / "more", max_failures=20)


async def test_episodes_that_were_given_up_count_among_the_most_failures(tmp_path: Path) -> None:
    """At a fourth start nobody played them, and `--max-failures 0` passed with failures in the table."""
    for _ in range(ATTEMPTS):
        await evaluate([Counting(fails=2, kind="bad_request")], [LAKE], 20, tmp_path, concurrency=1)
    with pytest.raises(EndpointError, match="2 of 2 episodes failed, the last with 3 failures, at earlier starts"):
        await evaluate([Counting()], [LAKE], 20, tmp_path, concurrency=1, max_failures=1)
    agent = Counting()  # as told: those that failed are played again
    await evaluate([agent], [LAKE], 20, tmp_path, max_failures=1)
    assert len(agent.begun) == 2


async def test_how_fast_a_model_is_does_not_decide_which_turns_are_a_batch_where_tokens_are_limited(
    tmp_path: Path,
) -> None:
    """Who waited for room in the budget looked every 20 ms, and its turns met others than in another run."""

    model = nano()
    agent, stop = LanguageAgent("nano", model, Sampling(max_tokens=3)), min(model.stop_ids)

    async def played(pause_s: float) -> list[int]:
        batches = []

        def answer_rows(model: LocalModel, rows: list[Row], *given: Any) -> None:
            batches.append(len(rows))
            time.sleep(pause_s)
            for row in rows:
                row.tokens, row.logprobs = [stop], [0.0]

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(LocalModel, "answer_rows", answer_rows)
            await evaluate([agent], [LAKE], 6, tmp_path / str(pause_s), concurrency=4, budget=Budget(tokens=30_000))
        return batches

    assert await played(0.03) == await played(0)


async def test_what_was_asked_and_how_it_ended_is_written_down(tmp_path: Path) -> None:
    await evaluate([Counting()], [LAKE], 3, tmp_path)
    with pytest.raises(EndpointError):
        await evaluate([Counting(fails=9, fatal=True)], [LAKE], 7, tmp_path)
    await evaluate([Counting()], [LAKE], 2, tmp_path)
    run = read_run(tmp_path)
    assert run is not None
    assert run.asked == {"counting": {"frozen-lake": 7}}
    assert run.interrupted("counting") == 1


async def test_other_settings_are_refused(tmp_path: Path) -> None:
    async with FakeServer() as server:
        agent = served(server)
        await evaluate([agent], [LAKE], 1, tmp_path)
        warmer = LanguageAgent(agent.spec, agent.model, agent.sampling.model_copy(update={"temperature": 0.5}))
        with pytest.raises(RecordError, match=r"other settings: .*1\.0.* now .*0\.5"):
            await evaluate([warmer], [LAKE], 2, tmp_path)
        await agent.close()


def test_another_suite_version_is_refused(tmp_path: Path) -> None:
    for name in ("e", "f"):
        with changing_run(tmp_path) as run:
            run.prices[name] = Price(prompt=1, completion=2)
    kept = read_run(tmp_path)
    assert kept is not None
    assert set(kept.prices) == {"e", "f"}
    (tmp_path / "run.json").write_text('{"suite_version": 0, "prices": {}}')
    with pytest.raises(RecordError, match="suite version 0"), changing_run(tmp_path):
        pass


class Picky(Counting):
    def can_play(self, scenario: Scenario) -> bool:
        return scenario.id == "frozen-lake"


async def test_an_agent_plays_what_it_can(tmp_path: Path) -> None:
    agents: list[Agent] = [Picky()]
    await evaluate(agents, [LAKE, get_scenario("snake")], 2, tmp_path)
    assert not (tmp_path / "counting" / "snake.jsonl").exists()
    with pytest.raises(UsageError, match="none of snake"):
        await evaluate(agents, [get_scenario("snake")], 2, tmp_path)


def test_what_an_agent_cannot_play_is_said_below_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DQN stood in one table of two, and nothing said why not in the other."""
    monkeypatch.setattr(command, "make_agent", lambda spec, *given, **more: Picky())
    scenarios = ["frozen-lake", "snake"]
    board = eval_here(tmp_path, agents=["counting"], scenarios=scenarios, episodes=1, names=["counting=Mine"])
    assert [row.scenario for row in board.rows] == ["frozen-lake"]
    assert [note for note in board.notes if "snake" in note] == ["Mine is not in snake: it cannot play this game."]


def test_a_failure_that_ends_an_evaluation_hides_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong key of the last agent kept from view what all before it had played: no table, none in the folder."""
    monkeypatch.setattr(
        command,
        "make_agent",
        lambda spec, *given, **more: RandomAgent() if spec == "random" else Counting(spec, fails=1, fatal=True),
    )
    given: dict[str, Any] = {"scenarios": ["frozen-lake"], "episodes": 3, "out": tmp_path}
    with pytest.raises(EndpointError, match="down"):  # nothing is there to be shown
        command.run(command.Options(agents=["keyless"], **given), Console(file=io.StringIO()))
    assert not (tmp_path / "leaderboard.json").exists()
    options = command.Options(agents=["random", "keyless", "later"], **given)
    board = command.run(options, Console(file=io.StringIO()))
    assert [(row.agent, row.episodes) for row in board.rows] == [("random", 3)]
    assert board.fatal == "down"
    assert "not all was played: down" in board.notes
    assert "no episode here is of the agent 'later'" in board.notes  # it was to mean another agent
    assert json.loads((tmp_path / "leaderboard.json").read_text())["fatal"] == "down"


@pytest.mark.parametrize("failure", [ModelError("not finite"), UsageError("too many files")])
def test_a_model_that_cannot_go_on_hides_no_result(
    failure: MsgrpoError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter whose weights are not finite kept from view what the others had played."""

    class Broke(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            raise failure

    monkeypatch.setattr(
        command, "make_agent", lambda spec, *given, **more: RandomAgent() if spec == "random" else Broke(spec)
    )
    options = command.Options(agents=["random", "broke"], scenarios=["frozen-lake"], episodes=2, out=tmp_path)
    board = command.run(options, Console(file=io.StringIO()))
    assert ([row.agent for row in board.rows], board.fatal) == (["random"], str(failure))


async def test_concurrency_is_bounded_and_reached(tmp_path: Path) -> None:
    together = asyncio.Barrier(6)

    async def meet(request: Request, writer: asyncio.StreamWriter) -> None:
        await together.wait()  # passes only when six requests are open at once
        await player(request, writer)

    async with FakeServer([meet] * 6) as server:
        agent = served(server)
        await evaluate([agent], [LAKE], 24, tmp_path, concurrency=6)
        await agent.close()
    assert server.most_at_once == 6


async def test_a_server_that_often_fails_gives_the_clean_servers_result(tmp_path: Path) -> None:
    faults: list[Behaviour] = [reply(429, {}), reply(500, "x"), reset, reply(200, {"choices": None})]
    script = [faults[i // 5 % 4] if i % 5 == 0 else player for i in range(200)]  # one request in five
    for name, server in (("faulty", FakeServer(script)), ("clean", FakeServer())):
        async with server:
            agent = served(server)
            await evaluate([agent], [LAKE], 15, tmp_path / name, concurrency=5)
            await agent.close()
    faulty, clean = (
        {seeds_of(e): (e.returns, [t.answer for t in e.turns]) for e in lines(tmp_path / name, "endpoint:fake")}
        for name in ("faulty", "clean")
    )
    assert faulty == clean
    boards = [leaderboard.build(plays.load([tmp_path / name])[0]).rows[0] for name in ("faulty", "clean")]
    assert boards[0].retries > 0 == boards[1].retries
    assert boards[0].prompt_tokens == boards[1].prompt_tokens == 100 * boards[1].turns


def test_a_refused_evaluation_leaves_no_line_on_a_terminal() -> None:
    """It left "0/0 episodes" above the error; without a terminal nothing is printed either."""
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=80)
    with shown(EvalProgress(), terminal):
        pass
    assert written.getvalue().endswith("\x1b[1A\x1b[2K")  # the line is gone
    with shown(EvalProgress(planned=3), terminal):
        pass
    assert not written.getvalue().endswith("\x1b[2K")


async def test_progress_counts_and_names_what_waits(tmp_path: Path) -> None:
    seen: list[str] = []
    clock = iter(range(10_000))
    progress = EvalProgress(on_change=lambda p: seen.append(p.line()), clock=lambda: float(next(clock)))
    async with FakeServer([reply(500, {}), answer("?")]) as server:
        agent = served(server)
        await evaluate([agent], [LAKE], 3, tmp_path, progress=progress)
        await agent.close()
    assert (progress.done, progress.failed, progress.running, progress.left) == (3, 0, 0, 0)
    assert seen[-1].startswith("3/3 episodes · endpoint:fake · 0 running · 0 retrying · 0 failed · ")
    assert "tokens" in seen[-1]


def test_a_very_long_name_is_a_folder_too(tmp_path: Path) -> None:
    long, longer = f"endpoint:http://h/v1#{'m' * 300}", f"endpoint:http://h/v1#{'m' * 301}"
    assert folder_name(long) != folder_name(longer)
    (tmp_path / folder_name(longer)).mkdir()


async def test_a_million_episodes_are_drawn_when_they_are_played(tmp_path: Path) -> None:
    suites._drawn.cache_clear()  # what others have drawn
    with pytest.raises(EndpointError, match="down"):
        await evaluate([Counting(fails=1, fatal=True)], [LAKE], 10**6, tmp_path, concurrency=2)
    assert 0 < len(suites._drawn(LAKE, "test")._seeds) < 10


def test_folder_names_differ_where_specs_do() -> None:
    assert folder_name("nano") == "nano"
    assert folder_name("adapter:runs/a") != folder_name("adapter:runs_a")
    assert "/" not in folder_name("endpoint:http://h:1/v1#m")


def start(server: FakeServer, out: Path, *more: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    arguments = [f"endpoint:{server.url}#fake", "--scenario", LAKE.id, "--episodes", "2", "--out", str(out), *more]
    program = [*before, *PROGRAM, "eval", *arguments]
    return subprocess.Popen(program, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("signal_sent", "before"), [(signal.SIGINT, ()), (signal.SIGTERM, ("env", "--ignore-signal=INT"))]
)
async def test_a_signal_stops_cleanly(signal_sent: signal.Signals, before: Sequence[str], tmp_path: Path) -> None:
    """Where a shell started it in the background, SIGINT is ignored, and SIGTERM, which is passed on as SIGINT, once
    did nothing; later it was raised in whichever task ran, and left a traceback in one run of four.
    """
    async with FakeServer(then=hang) as server:
        child = start(server, tmp_path, before=before)
        while not server.requests:
            await asyncio.sleep(0.01)
        child.send_signal(signal_sent)
        _, said = await asyncio.to_thread(child.communicate, timeout=300)
    assert child.returncode == 130
    assert "start the same command again" in said
    assert "Traceback" not in said


async def test_a_wrong_key_ends_with_2(tmp_path: Path) -> None:
    async with FakeServer(then=reply(401, {"error": "wrong key"})) as server:
        child = start(server, tmp_path)
        _, said = await asyncio.to_thread(child.communicate, timeout=300)
    assert child.returncode == 2
    assert "MSGRPO_API_KEY" in said
    assert "Traceback" not in said


async def test_an_agent_that_answered_nothing_is_no_success(tmp_path: Path) -> None:
    """The other agents' rows stood there, and the exit code was 0."""
    async with FakeServer(then=reply(400, {"error": {"message": "no such template"}})) as server:
        child = start(server, tmp_path, "random", "--json")
        out, said = await asyncio.to_thread(child.communicate, timeout=300)
    board = json.loads(out)
    assert [row["agent"] for row in board["rows"]] == ["random"]
    assert [silent.split("#")[1] for silent in board["silent"]] == [f"fake in {LAKE.id}"]
    assert child.returncode == 2
    assert f"fake in {LAKE.id}; the notes say why" in " ".join(said.split())
    assert "with --retry-failed or a larger budget where the notes name it" in " ".join(said.split())
    assert "Traceback" not in said


async def test_regrets_are_judged_recorded_and_tabled(tmp_path: Path) -> None:
    """Only where asked for; the optimum's are 0, and what a later start adds is judged, too."""
    agents = [OptimalAgent(), RandomAgent()]
    await evaluate(agents, [LAKE], 4, tmp_path)
    await evaluate(agents, [LAKE], 20, tmp_path, regret=True)
    rows = {row.agent: row for row in leaderboard.build(*plays.load([tmp_path])).rows}
    assert rows["optimal"].regret_mean == 0
    assert rows["random"].regret_mean is not None
    assert rows["random"].regret_mean > 0.1
    assert 0 < rows["random"].judged < rows["random"].turns
    [record] = tmp_path.rglob("random*/*.jsonl")
    assert verify(record).misjudged == 0
    episodes = list(read_episodes(record))
    changed = next(turn for episode in episodes for turn in episode.turns if turn.regret)
    changed.regret = 0.0
    record.write_text("".join(episode.model_dump_json() + "\n" for episode in episodes))
    assert verify(record).misjudged == 1
    assert "REGRETS: those of 1 are not" in verify(record).summary


def test_moves_that_nobody_judged_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--regret` in a game without a judge, or with one that failed, left the column out without a word."""

    def fails(game: Any, player: str) -> Judgement:
        raise ZeroDivisionError

    for judge, said in ((None, "frozen-lake has no judge"), (fails, "random in frozen-lake: no move was judged")):
        monkeypatch.setitem(SCENARIOS, "frozen-lake", replace(LAKE, judge=judge))
        options = command.Options(
            agents=["random"], scenarios=["frozen-lake"], episodes=2, out=tmp_path / said[:6], regret=True
        )
        notes = command.run(options, Console(file=io.StringIO())).notes
        assert [note for note in notes if "judge" in note] == [next(note for note in notes if note.startswith(said))]


async def test_how_long_a_game_is_judged_does_not_decide_which_turns_are_a_batch(tmp_path: Path) -> None:
    """The next episode began when a thread had judged the last one, and its turns met others than in another run."""

    async def played(pause_s: float) -> list[int]:
        def judge(game: Any, player: str) -> Judgement:
            time.sleep(pause_s * (sum(map(ord, game.observe(player))) % 3))
            return Judgement(dict.fromkeys([*game.legal(player), None], 0.0))

        model = nano()
        agent = LanguageAgent("nano", model, Sampling(max_tokens=3))
        lake = replace(LAKE, judge=judge)
        with recorded_batches(model) as batches:
            await evaluate([agent], [lake], 9, tmp_path / str(pause_s), concurrency=4, regret=True)
        return batches

    assert await played(0.03) == await played(0)


class Named(RandomAgent):
    """An agent of somebody's own, which may answer with something that is no Decision, and have any settings."""

    def __init__(self, spec: str, answer: Any = None) -> None:
        self.spec, self.answer, self.given = spec, answer, dict[str, Any]()

    def settings(self) -> Any:
        return self.given

    async def act(self, view: View, *, on_text: OnText | None = None) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("specs", "asked", "said"),
    [
        (["mine", "mine"], {}, "two agents are named 'mine'"),
        (["mine"], {"split": "vall"}, "no split of evaluations is named 'vall'"),
        (["mine"], {"episodes": -1}, "episodes is -1"),
        (["mine"], {"repeats": 0}, "repeats is 0"),
        (["mine"], {"concurrency": 0}, "concurrency is 0"),
        (["mine"], {"episodes": 2.5}, "episodes is 2.5"),
        (["mine"], {"scenarios": [LAKE, LAKE]}, "two scenarios are named 'frozen-lake'"),
        (["Random "], {}, "'Random ' reads like another agent's name"),
        ([], {}, "there are 0 agents and 1 scenarios"),
        (["mine"], {"scenarios": [replace(LAKE, id="mine")]}, "the name 'mine' does not lead to this scenario"),
        (["mine"], {"repeats": 1001}, "repeats is 1001: 1000 is the most"),
        (["mine"], {"concurrency": 2 * 10**9}, "concurrency is 2000000000"),
        (["mine"], {"names": {"mine": "nano"}}, "mine cannot be called 'nano'"),
        (["mine", "other"], {"names": {"mine": "Other"}}, "mine cannot be called 'Other'"),
        (["mine"], {"scenarios": LAKE}, r"scenarios is Scenario\(.*, not a list"),
        (["mine"], {"scenarios": "frozen-lake"}, "scenarios is 'frozen-lake', not a list"),
        (["mine"], {"command": 5}, "command is 5, no str"),
        (["mine", "other"], {"names": {"mine": "a", "other": "a"}}, "two agents would have one name: a, a"),
        (["mine"], {"names": ["mine"]}, r"names is \['mine'\], no Mapping"),
        (["mine"], {"budget": 1000}, "budget is 1000, no Budget"),
        (["mine"], {"max_failures": "3"}, "max_failures is '3', no whole number"),
        (["mine"], {"split": None}, "no split of evaluations is named None"),
        (["mine"], {"names": {"mine": 5}}, "5 is no name for mine"),
        (["mine"], {"names": {"mien": "a"}}, "no agent here is 'mien'"),
    ],
)
async def test_what_makes_no_sense_is_refused_before_anything_is_written(
    tmp_path: Path, specs: list[str], asked: dict[str, Any], said: str
) -> None:
    """A misspelled split, or too many repeats, made a run.json that was called damaged; of two agents, one was called
    another process; the record of an agent without a name stood at the root of all folders."""
    arguments = {"scenarios": [LAKE], "episodes": 2, **asked}
    with pytest.raises(UsageError, match=said):
        await evaluate([Named(spec) for spec in specs], out=tmp_path / "e", **arguments)
    assert not (tmp_path / "e").exists()


async def test_a_name_is_no_other_agents_of_the_folder(tmp_path: Path) -> None:
    """`msgrpo leaderboard` then refused the whole folder."""
    await evaluate([Named("mine", Decision("left"))], [LAKE], 1, tmp_path)
    with pytest.raises(
        RecordError, match="calls the agent other 'mine', which whoever reads a table takes for another"
    ):
        await evaluate([Named("other", Decision("left"))], [LAKE], 1, tmp_path, names={"other": "mine"})
    assert len(plays.load([tmp_path])[0]) == 1


def answering(**fields: Any) -> Decision:
    return Decision(
        "left", completion=Completion(**{"text": "<action>left</action>", "finish_reason": "stop"} | fields)
    )


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (answering(latency_s=math.nan), "no record can hold: latency_s"),
        (answering(prompt_tokens=-3), "no record can hold: prompt_tokens"),
        (answering(finish_reason="eos"), "no record can hold: finish_reason"),
        (answering(text="<action>up</action>"), "mine decided for 'left', and its words say up: '<action>up"),
        (answering(text="left"), "mine decided for 'left', and its words say None: 'left'"),
        (Decision("jump" * 99), "'jump.{195} of player is no action now; legal: up, .*; decided by mine"),
    ],
)
async def test_what_an_agent_decides_is_readable_in_its_record(decision: Any, said: str, tmp_path: Path) -> None:
    """Counts and times that cannot be were written, and the record was damaged for whoever read it; words that said
    something else than the action made a record that does not replay.
    """
    with pytest.raises((UsageError, GameError), match=said):
        await evaluate([Named("mine", decision)], [LAKE], 2, tmp_path)
    assert not lines(tmp_path, "mine")


async def test_an_answer_that_no_file_can_hold_is_marked_in_the_record(tmp_path: Path) -> None:
    """Half of a surrogate pair ended the evaluation with a traceback."""
    await evaluate([Named("mine", answering(text="\ud800<action>left</action>"))], [LAKE], 1, tmp_path)
    assert lines(tmp_path, "mine")[0].turns[0].answer == "\ufffd<action>left</action>"


@pytest.mark.parametrize(
    ("decision", "action", "failure"),
    [
        (answering(), "left", None),
        (Decision(None, completion=Completion("hm", "stop")), None, ParseFailure.NO_TAG),
    ],
)
async def test_an_agent_of_ones_own_may_say_its_words(
    decision: Decision, action: str | None, failure: ParseFailure | None, tmp_path: Path
) -> None:
    """`msgrpo verify` refused every answer of an agent without a prompt template, and ⊥ without its reason."""
    await evaluate([Named("mine", decision)], [LAKE], 1, tmp_path)
    (episode,) = lines(tmp_path, "mine")
    assert {(turn.action, turn.failure) for turn in episode.turns} == {(action, failure)}
    assert verify(tmp_path / "mine" / "frozen-lake.jsonl").episodes == 1


async def test_an_agent_with_a_prompt_template_answers_in_words(tmp_path: Path) -> None:
    mine = Named("mine", Decision("left"))
    mine.given = {"template": "t"}
    with pytest.raises(UsageError, match="mine has a prompt template, and decided without prompt or words"):
        await evaluate([mine], [LAKE], 1, tmp_path)


def odd(settings: Any) -> Named:
    agent = Named("odd")
    agent.given = settings
    return agent


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("random", "'random' is the name of an agent"),
        (RandomAgent, "RandomAgent is a class"),
        (object(), "object has no spec and no settings and no act and no close"),
        (
            odd({"seen": {1, 2}}),
            r"settings of the agent odd gave \{'seen': \{1, 2\}\}.*set is not JSON",
        ),
        (odd({"seen": Path("x")}), "PosixPath is not JSON"),
        (odd({"seen": math.nan}), "not JSON compliant"),
        (odd({1: 2}), "no dict whose keys are text"),
        (odd(None), "gave None"),
        (odd({"deep": reduce(lambda inner, _: [inner], range(250), [])}), "recursion limit"),
        (Named("x\x1by"), "the spec of the agent Named is"),
        (Named(""), "the spec of the agent Named is ''"),
        (Named("x" * 5000), "the spec of the agent Named is 'xxx"),
    ],
)
async def test_an_agent_that_is_none_is_refused_before_anything_is_written(
    tmp_path: Path, agent: Any, said: str
) -> None:
    """Most of these were errors of json, pydantic or asyncio, and left records behind."""
    with pytest.raises(UsageError, match=said):
        await evaluate([agent], [LAKE], 2, tmp_path / "e")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("field", "value"), [("action", 3), ("failure", "odd"), ("prompt", "p"), ("completion", "c")]
)
def test_a_decision_holds_what_a_record_can_hold(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"the {field} of a Decision is {value!r}"):
        Decision(**{"action": None, field: value})


def test_what_a_decision_consists_of_is_text_and_no_contradiction() -> None:
    """The first was an AttributeError in the middle of an evaluation."""
    nothing: Any = None
    with pytest.raises(UsageError, match="the prefix of a Prompt is None, no str"):
        Prompt(nothing, "state")
    with pytest.raises(UsageError, match="the text of a Completion is None, no str"):
        Completion(nothing, "stop")
    with pytest.raises(UsageError, match="a Decision for 'up' has a failure, too: empty"):
        Decision("up", ParseFailure.EMPTY)


async def test_names_of_folders_and_scenarios_from_python(tmp_path: Path) -> None:
    """A folder may be a text, too; the name of a scenario is no scenario, and the error says how to get it."""
    await evaluate([RandomAgent()], {LAKE.id: LAKE}.values(), 2, str(tmp_path / "e"))  # as of SCENARIOS
    record = str(tmp_path / "e" / "random" / "frozen-lake.jsonl")
    assert len(list(read_episodes(record))) == verify(record).episodes == 2
    (series,), _ = plays.load([str(tmp_path / "e")])
    assert len(series.finished) == 2
    (same,), _ = plays.load(tmp_path / "e", agents="random", scenarios="frozen-lake")  # found nothing, silently
    assert same == series
    assert plays.load(tmp_path / "e", agents=["rando"], scenarios=["frozen-like"]) == (
        [],
        [
            "no episode here is of the agent 'rando'; did you mean random?",
            "no episode here is of the scenario 'frozen-like'; did you mean frozen-lake?",
        ],
    )
    of_another_kind: Any = LAKE
    for wrong, said in ((of_another_kind, "scenarios is"), ([of_another_kind], "one of the scenarios is")):
        with pytest.raises(UsageError, match=said):
            plays.load(tmp_path / "e", scenarios=wrong)
    given: Any = "frozen-lake"
    with pytest.raises(UsageError, match="'frozen-lake' is no scenario"):
        await evaluate([RandomAgent()], [given], 2, tmp_path / "f")


class Passing(RandomAgent):
    """An agent that passes on what another one gives: its methods are not asynchronous themselves."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def act(self, view: View, *, on_text: OnText | None = None) -> Any:
        return self.given(view)


async def test_an_agent_may_pass_on_anothers_answer_and_one_that_nobody_can_wait_for_is_refused(
    tmp_path: Path,
) -> None:
    """A wrapper was refused for want of the word `async`, though its answer could be waited for."""
    count: Any = np.int64(2)  # a count of NumPy is one too
    await evaluate([Passing(RandomAgent().act)], [LAKE], count, tmp_path / "e")
    assert len(lines(tmp_path / "e", "random")) == 2
    with pytest.raises(UsageError, match="act of the agent random is not asynchronous"):
        await evaluate([Passing(lambda view: Decision("right"))], [LAKE], 2, tmp_path / "f")


async def test_an_agent_that_gives_no_decision_is_at_fault_and_not_the_game(tmp_path: Path) -> None:
    """Its episodes were recorded as faults of the game's code."""
    with pytest.raises(UsageError, match="agent mine gave 'right'"):
        await evaluate([Named("mine", "right")], [LAKE], 2, tmp_path)
    assert not list(read_episodes(tmp_path / "mine" / "frozen-lake.jsonl"))


@pytest.mark.parametrize(("prefix", "seed"), [({}, math.inf), ({"player": 5}, 1)])
def test_a_damaged_file_of_turns_is_not_taken_up(prefix: dict[str, Any], seed: float, tmp_path: Path) -> None:
    """A seed without end was a traceback; a prompt that is no text got into the record, which then was damaged."""
    game, episode = LAKE.new(1, 2), new_episode(LAKE, {"player": RandomAgent()}, 1, 2, 3)
    turn = Turn(step=0, player="player", state=observation_of(game, "player"), action="left").model_dump(mode="json")
    rows = [{"settings": {}, "prefix": prefix}, {"seeds": [seed, 2, 3], "turns": [turn]}]
    (tmp_path / "a.turns").write_text("".join(json.dumps(row).replace("Infinity", "1e999") + "\n" for row in rows))
    Partial(tmp_path / "a.jsonl", {}, set()).take_up(EpisodeSeeds(1, 2, 3), game, episode)
    assert (episode.prefix, episode.turns) == ({}, [])
