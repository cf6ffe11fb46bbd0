"""Environments of OpenEnv servers as games: a server of a script that behaves, and one that misbehaves in many ways.

The same against real servers of the `openenv` package runs in an environment of its own (`make test-openenv`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msgrpo.contract import examine
from msgrpo.episode import play_episode
from msgrpo.errors import GameFaultError, RecordError, UsageError
from msgrpo.evals.run import evaluate
from msgrpo.evals.verify import first_difference
from msgrpo.game import AnyText, Outcome, Remote, Scenario
from msgrpo.games import get_scenario, openenv_wire, outside, recorded_scenario
from msgrpo.games.openenv_game import Form, address_of, form_of, names_of, openenv_scenario
from msgrpo.references import RandomAgent
from msgrpo.train.config import make_config
from tests.openenv_fake import ACTIONS, FAULTS, SCHEMA, FakeEnv

PLAYER = {"player": RandomAgent()}


@pytest.fixture
def fake() -> Iterator[FakeEnv]:
    with FakeEnv() as server:
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers late, as on a busy machine, is none that does wrong."""
    monkeypatch.setattr(openenv_wire, "ANSWER_S", 60.0)
    monkeypatch.setattr(openenv_wire, "PATIENCE_S", 60.0)


async def played(scenario: Scenario, seed: int = 0) -> Any:
    return await play_episode(scenario, PLAYER, start_seed=seed, chance_seed=0, sampling_seed=seed)


async def test_a_game_is_played_as_the_server_says(fake: FakeEnv) -> None:
    scenario = openenv_scenario(f"{fake.url}?steps=9&level=2")
    assert scenario.actions == tuple(ACTIONS)
    assert scenario.remote == Remote(sessions=16, repeats=True, copies=False)
    assert scenario.rules.startswith("Count �[31mup.\nThere are at most 9 steps.")
    episode = await played(scenario, 5)
    assert episode.outcome is Outcome.TERMINATED
    assert [turn.state.split("\n")[1] for turn in episode.turns] == [f"number 5, step {i}" for i in range(3)]
    assert episode.returns == {"player": sum(turn.action == "up" for turn in episode.turns)}
    resets = [asked["data"] for asked in fake.asked if asked["type"] == "reset"]
    assert resets[-1] == {"seed": 5, "level": 2}


async def test_no_legal_action_uses_up_a_step_and_asks_nobody(fake: FakeEnv) -> None:
    game = openenv_scenario(f"{fake.url}?steps=2").new(0, 0)
    asked = len(fake.asked)
    assert game.step({"player": None}) == {"player": 0.0}
    assert game.outcome is Outcome.PLAYING
    game.step({"player": None})
    assert game.outcome is Outcome.TRUNCATED
    assert len(fake.asked) == asked


@pytest.mark.parametrize("wrong", FAULTS)
async def test_a_server_that_does_wrong_costs_the_episode_and_nothing_else(
    wrong: str, fake: FakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = openenv_scenario(fake.url)
    fake.wrong = wrong
    with monkeypatch.context() as hasty:
        if wrong == "hangs":
            hasty.setattr(openenv_wire, "ANSWER_S", 0.3)
        episode = await played(scenario)
    assert episode.error == "game_fault"
    assert episode.error_message.startswith(f"the game openenv:{fake.url}: ")
    assert episode.error_message.isprintable()
    fake.wrong = None
    assert (await played(scenario)).error is None


async def test_a_server_that_is_gone_costs_the_episodes_that_it_would_have_played() -> None:
    with FakeEnv() as server:
        scenario = openenv_scenario(server.url)
        game = scenario.new(0, 0)
    with pytest.raises(GameFaultError, match=r"is gone|ended the game's connection"):
        game.step({"player": "up"})
    episode = await played(scenario)
    assert episode.error == "game_fault"
    assert "opens no game" in episode.error_message


async def test_a_full_server_is_waited_for_and_then_costs_the_episode(
    fake: FakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = openenv_scenario(fake.url)
    monkeypatch.setattr(openenv_wire, "PATIENCE_S", 0.3)
    fake.wrong = "full"
    began = time.monotonic()
    episode = await play_episode(scenario, PLAYER, start_seed=0, chance_seed=0, sampling_seed=0)
    assert "CAPACITY_REACHED" in episode.error_message
    assert time.monotonic() - began >= 0.3


async def test_a_server_of_one_session_plays_one_game_after_the_other() -> None:
    with FakeEnv(most=1) as server:
        scenario = openenv_scenario(server.url)
        assert scenario.remote is not None
        assert scenario.remote.sessions == 1
        episodes = await asyncio.gather(*(played(scenario, seed) for seed in range(6)))
        assert [episode.error for episode in episodes] == [None] * 6
        assert server.at_once == 1


async def test_games_are_played_side_by_side_up_to_the_number_that_was_asked_for(fake: FakeEnv) -> None:
    scenario = openenv_scenario(f"{fake.url}?sessions=3")
    fake.at_once = 0
    await asyncio.gather(*(played(scenario, seed) for seed in range(8)))
    assert 1 < fake.at_once <= 3


async def test_a_game_that_is_given_up_frees_its_session(fake: FakeEnv) -> None:
    scenario = openenv_scenario(fake.url)
    for _ in range(5):
        scenario.new(0, 0)
    deadline = time.monotonic() + 60
    while fake.playing and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert fake.playing == 0


async def test_a_server_that_does_not_repeat_is_not_evaluated(tmp_path: Path) -> None:
    with FakeEnv(seeded=False) as server:
        scenario = openenv_scenario(server.url)
        with pytest.raises(UsageError, match="gave another game when it was asked for the same seed again"):
            await evaluate([RandomAgent()], [scenario], 2, tmp_path / "eval")
        assert (await played(scenario)).error is None


async def test_what_the_protocol_cannot_do_is_refused_before_anything_is_played(fake: FakeEnv) -> None:
    name = f"openenv:{fake.url}"
    scenario = get_scenario(name)
    with pytest.raises(GameFaultError, match="cannot be copied"):
        scenario.new(0, 0).copy()
    assert {breach.rule for breach in examine(scenario, plays=1).breaches} == {"copies"}
    episode = await played(scenario)
    with pytest.raises(RecordError, match="was played on a server, and cannot be simulated again"):
        first_difference(episode)
    asked = len(fake.asked)
    for choice in ("explore=branch(episodes=4)", "credit=simulated"):
        with pytest.raises(UsageError, match="copies games in mid-play"):
            make_config(settings=[choice], given={"scenario": name})
    assert len(fake.asked) == asked


def test_a_record_that_names_a_server_asks_nobody(fake: FakeEnv) -> None:
    with pytest.raises(UsageError, match="not loaded because a record says so"):
        recorded_scenario(f"openenv:{fake.url}")
    assert not fake.headers
    assert outside.runs_code(f"openenv:{fake.url}")


async def test_a_key_goes_to_its_own_host_only(fake: FakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    host = fake.url.removeprefix("http://")
    monkeypatch.setenv("MSGRPO_API_KEY", "of-a-model")
    monkeypatch.setenv("MSGRPO_ENV_KEYS", f"other.example:8000=theirs {host}=secret")
    with FakeEnv() as other:
        scenario = openenv_scenario(fake.url)
        assert {seen.get("Authorization") for seen in fake.headers} == {"Bearer secret"}
        fake.wrong, fake.elsewhere = "redirect", other.url
        assert "redirects to another address" in (await played(scenario)).error_message
        assert not other.headers
        openenv_scenario(other.url)
        assert {seen.get("Authorization") for seen in other.headers} == {None}
    monkeypatch.setenv("MSGRPO_ENV_KEYS", "secret")
    with pytest.raises(UsageError, match="a key without the host") as refused:
        openenv_scenario(fake.url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ("host:8000", "no address"),
        ("ftp://host", "no address"),
        ("http://", "no address"),
        ("http://[::1", "no address"),
        ("http://h:8000/\x1b[2J", "no address"),
        ("http://user:password@h:8000", "a user or a password"),
        ("http://h:8000?steps=0", "steps=0 is no number from 1 to"),
        ("http://h:8000?sessions=x", "sessions=x is no number"),
        ("http://127.0.0.1:1", "does not answer /schema"),
    ],
)
def test_an_address_that_is_none_is_one_message(rest: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        openenv_scenario(rest)


def test_what_is_no_openenv_server_is_one_message(fake: FakeEnv) -> None:
    with pytest.raises(UsageError, match="an observation has no field 'rows'"):
        openenv_scenario(f"{fake.url}?text=rows")
    fake.schema = SCHEMA | {"action": {"properties": {"way": {"enum": ["up"]}}}}
    with pytest.raises(UsageError, match="one action, 'up'"):
        openenv_scenario(fake.url)
    fake.wrong = "no schema"
    with pytest.raises(UsageError, match="answers what is no JSON"):
        openenv_scenario(fake.url)


def test_an_address_holds_what_a_reset_is_told() -> None:
    address = address_of("https://h/base/?text=board&steps=7&index=3&scenario=snake&flag=true")
    assert (address.url, address.text, address.steps) == ("https://h/base", "board", 7)
    assert address.reset == {"index": 3, "scenario": "snake", "flag": True}


@pytest.mark.parametrize(
    ("fields", "required", "form"),
    [
        ({"way": {"enum": ["a", "b"]}}, ["way"], ("way", "string", ("a", "b"))),
        ({"n": {"type": "integer", "minimum": 1, "maximum": 3}}, ["n"], ("n", "integer", ("1", "2", "3"))),
        ({"n": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2}}, [], ("n", "integer", ("0", "1"))),
        ({"n": {"type": "integer"}}, ["n"], ("n", "integer", ())),
        ({"go": {"type": "boolean"}}, ["go"], ("go", "boolean", ("true", "false"))),
        ({"say": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, [], ("say", "string", ())),
        ({"action": {"type": "string"}, "why": {"type": "string"}}, [], ("action", "string", ())),
        ({"a": {"type": "string"}, "b": {"type": "integer"}}, ["a", "b"], (None, "object", ())),
        ({"a": {"type": "array"}}, ["a"], (None, "object", ())),
        ({"way": {"enum": ["a", "<b>"]}}, ["way"], ("way", "string", ())),
        ({"way": {"$ref": "#/$defs/way"}}, ["way"], (None, "object", ())),
        # what no schema says, and no server's mistake may end in a traceback:
        ({"n": {"type": "integer", "maximum": 1, "exclusiveMaximum": None}}, [], ("n", "integer", ("0", "1"))),
        ({"n": {"type": "integer", "exclusiveMaximum": "9"}}, [], ("n", "integer", ())),
        ({"way": {"enum": ["a", "b"]}}, ["way", ["way"], {}], ("way", "string", ("a", "b"))),
    ],
)
def test_a_schema_says_how_an_action_is_written(
    fields: dict[str, Any], required: list[Any], form: tuple[Any, ...]
) -> None:
    loops = {"$defs": {"way": {"$ref": "#/$defs/way"}}}
    seen = form_of({"properties": {"metadata": {}} | fields, "required": required} | loops)
    assert (seen.field, seen.kind, seen.listed) == form


def test_a_text_becomes_what_the_schema_wants_or_nothing() -> None:
    assert Form("n", "integer").message("3") == {"n": 3}
    assert Form("n", "integer").message("true") is None
    assert Form("n", "integer").message("x") is None
    assert Form("go", "boolean").message("True") == {"go": True}
    assert Form("say", "string").message("3") == {"say": "3"}
    assert Form(None).message('{"a": 1}') == {"a": 1}
    assert Form(None).message("[1]") is None
    assert Form(None).message("[" * 100_000) is None
    assert names_of([1, 2]) == ("1", "2")
    assert names_of(["a", "a"]) is None


async def test_own_words_and_a_schema_in_the_rules_where_nothing_is_listed(fake: FakeEnv) -> None:
    fields = {"x": {"type": "integer"}, "y": {"type": "integer", "description": "row \x1b[1m"}}
    fake.schema = SCHEMA | {"action": {"properties": fields, "required": ["x", "y"]}}
    scenario = openenv_scenario(fake.url)
    assert isinstance(scenario.actions, AnyText)
    assert 'An action is a JSON object; the fields of an action: {"x": {"type": "integer"}' in scenario.rules
    assert "\x1b" not in scenario.rules
    game = scenario.new(0, 0)
    game.step({"player": '{"x": 1, "y": 2}'})
    assert fake.asked[-1] == {"type": "step", "data": {"x": 1, "y": 2}}
    game.step({"player": "to the left"})
    assert "none that the rules describe" in game.observe("player")


def test_legal_actions_of_an_observation_are_those_of_the_state(
    fake: FakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    legal: list[Any] = [3, 5]
    plain = FakeEnv.__dict__["_play"]

    async def play(self: FakeEnv, socket: Any) -> None:
        send = socket.send_json

        async def with_legal(answer: dict[str, Any]) -> None:
            if answer["type"] == "observation":
                answer["data"]["observation"]["legal_actions"] = legal
            await send(answer)

        socket.send_json = with_legal
        await plain(self, socket)

    monkeypatch.setattr(FakeEnv, "_play", play)
    fake.schema = SCHEMA | {"action": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}}
    game = openenv_scenario(fake.url).new(0, 0)
    assert (game.actions, game.legal("player")) == ((), ("3", "5"))
    game.step({"player": "5"})
    assert fake.asked[-1]["data"] == {"n": 5}
    legal[:] = ["<script>"]
    with pytest.raises(GameFaultError, match="legal_actions that are none"):
        game.step({"player": "3"})
