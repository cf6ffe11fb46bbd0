"""Games from outside are learnt: teaching nano their form, opponents in the other seats, and advice where nothing can
be learnt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from msgrpo.agent import Completion, LanguageAgent, Sampling, parse_action
from msgrpo.episode import Turn, play_episode
from msgrpo.errors import UsageError
from msgrpo.game import Game, Scenario, stream
from msgrpo.games import get_scenario
from msgrpo.games.template import write
from msgrpo.models.loading import nano
from msgrpo.models.local import LocalModel
from msgrpo.references import RandomAgent
from msgrpo.run_log import read_rows
from msgrpo.specs import make_agent
from msgrpo.train import loop
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.display import Quiet
from msgrpo.train.groups import Group, beginning
from msgrpo.train.nano.teach import rows_of, teach
from msgrpo.train.ranks import ALONE
from msgrpo.train.rollouts import Play, Players, Playing, own_turns
from tests.train_helpers import Told, in_any_order, recorded_batches

NIM = f"{Path(__file__).resolve().parents[1] / 'examples' / 'nim.py'}:scenario"
TINY = ["groups=2", "group_size=4", "select=aaw(keep=2)", "minibatches=1", "evaluation=4(film=0)", "steps=1"]


def config(*settings: str, **given: Any) -> TrainConfig:
    return make_config(settings=[*TINY, *settings], given=given)


def test_rows_are_legal_and_say_what_the_game_describes() -> None:
    scenario = get_scenario(NIM)
    rows = rows_of(scenario, 0)
    best = 0
    for _ in range(200):
        (row,) = next(rows)
        legal = row.prompt.state.rpartition("Legal now: ")[2].rstrip(".").split(", ")
        found = parse_action(row.answer, scenario.actions).action
        assert found in (legal if "Legal now" in row.prompt.state else scenario.actions)
        stones = int(row.prompt.state.split("Stones: ")[1].split(".")[0])
        assert row.answer.startswith(f"{stones}: one leaves {stones - 1}")
        best += bool(stones % 4) and found == scenario.actions[stones % 4 - 1]
    assert 60 < best < 140  # it plays badly on purpose


def test_a_taught_nano_answers_in_the_games_form(tmp_path: Path) -> None:
    """Untaught it never names an action of the game; a few steps later it does, and it is a base like any other."""
    name = write(tmp_path / "cards.py")
    scenario, out = get_scenario(name), tmp_path / "taught"
    facts = teach(scenario, out, steps=80)
    assert facts == json.loads((out / "taught.json").read_text())
    with pytest.raises(UsageError, match="is not empty") as done:
        teach(scenario, out, steps=1)
    assert done.value.fix == f"choose another --out, with --base {out} to teach its model further"
    invalid = {}
    for base in ("nano", str(out)):
        folder = tmp_path / f"run-{Path(base).name}"
        loop.train(config("format_penalty=0.1", scenario=name, base=base), folder, report=Quiet())
        (row,) = [row for row in read_rows(folder) if row["kind"] == "train"]
        invalid[base] = row["rollout/invalid"]
    assert invalid["nano"] > 0.9
    assert invalid[str(out)] < 0.5
    agent = make_agent(f"base:{out}")
    assert agent.settings()["weights"]


def test_a_run_that_cannot_learn_says_why_after_its_first_update(tmp_path: Path) -> None:
    told = Told()
    name = write(tmp_path / "cards.py")
    loop.train(config(scenario=name), tmp_path / "run", report=told)
    (hint,) = [note for note in told.said if "no legal action" in note]
    assert f"msgrpo teach {name}" in hint


def test_against_an_opponent_the_policy_learns_from_its_own_seat(tmp_path: Path) -> None:
    """Seats alternate from start to start; the opponent's turns are no data, and the returns are the policy's."""
    chosen = config("groups=2", "opponent=random", scenario="snake-duel")
    duel = get_scenario("snake-duel")
    players = Players.of(chosen, ALONE)
    assert [players.seats(duel, g) for g in range(3)] == [("snake1",), ("snake2",), ("snake1",)]
    assert Players(config(scenario="snake-duel")).seats(duel, 0) == duel.players
    one = Players.of(config("groups=1", "opponent=random", scenario="snake-duel"), ALONE)
    turns = [Playing(one, step, None, chosen.sampling, [(duel, 0)]).seats for step in range(3)]  # type: ignore[arg-type]
    assert turns == [[("snake1",)], [("snake2",)], [("snake1",)]]  # from update to update, too
    kept: list[Any] = []
    real = loop.Trainer.learn

    def spied(trainer: loop.Trainer, rollouts: Any, step: int) -> Any:
        kept.append(rollouts)
        return real(trainer, rollouts, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "learn", spied)
        loop.train(chosen, tmp_path / "run", report=Quiet())
    (rollouts,) = kept
    assert len(rollouts.groups) == 2
    for group, seat in zip(rollouts.groups, duel.players, strict=True):
        assert {turn.player for one in group.turns for turn in one} == {seat}
        assert all(turn.completion is not None for one in group.turns for turn in one)
    assert all(turn.answer is not None for turn in own_turns(rollouts.episodes))
    (row,) = [row for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    returns = [float(value) for group in rollouts.groups for value in group.returns_G]
    shaped = sum(turn.shaping for turn in own_turns(rollouts.episodes)) / len(returns)
    assert row["rollout/return"] == pytest.approx(sum(returns) / len(returns) - shaped)


def test_the_base_as_an_opponent_is_asked_as_the_policy_is() -> None:
    opponent = Players.of(config("opponent=base", "prompt=none", scenario="snake-duel"), ALONE).opponent
    assert isinstance(opponent, LanguageAgent)
    assert opponent.template.name == "none"


def test_who_is_faster_does_not_decide_which_turns_are_a_batch() -> None:
    """Policy and opponent answered at the same time, each what waited by then: two runs of one seed differed."""
    sampling, scenario = Sampling(max_tokens=3), in_any_order()
    opponent = LanguageAgent("opponent", (other := nano()), sampling)

    def played(slow: LocalModel) -> list[int]:
        plays = [Play(scenario, start, start, start, (scenario.players[start % 2],)) for start in range(24)]
        with recorded_batches(slow) as batches:
            asyncio.run(Players(config(), ALONE, opponent).play(policy, sampling, plays, 0.0))
        return batches

    policy = nano()
    assert played(policy) == played(other) == played(policy)


def test_turns_with_another_history_are_in_another_state() -> None:
    """The board alone would say that they are one moment."""
    origin = get_scenario("frozen-lake").new(0, 0)

    def turn(*prompt: int, reward: float) -> Turn:
        completion = Completion("", "stop", prompt_ids=prompt, token_ids=(1,), logprobs=(0.0,))
        return Turn(step=0, player="player", state="s", action="up", reward=reward).model_copy(
            update={"completion": completion}
        )

    group = Group(lambda j: origin, [[turn(1, 2, reward=1)], [turn(1, 3, reward=0)]], torch.zeros(2), torch.zeros(2))
    (one,), (other,) = group.trajectories()
    assert one.state != other.state


def test_an_opponent_needs_a_game_of_two() -> None:
    with pytest.raises(UsageError, match="has one player"):
        config("opponent=random", scenario="snake")


def test_where_luck_lies_in_the_start_each_trajectory_has_a_start_of_its_own() -> None:
    """The group's one state was made with a luck that nobody had: gates and words judged answers against it."""
    cards = dealt()
    assert cards.luck_in_start
    episodes = [
        asyncio.run(
            play_episode(
                cards, dict.fromkeys(cards.players, RandomAgent()), start_seed=1, chance_seed=luck, sampling_seed=luck
            )
        )
        for luck in range(6)
    ]
    group = Group.of(beginning(cards), episodes, cards.players[0], 0)
    assert group is not None
    assert [group.origin(j).observe(cards.players[0]) for j in range(6)] == [one.turns[0].state for one in episodes]
    assert len({one.turns[0].state for one in episodes}) > 1


class Dealt(Game):
    actions = ("on", "off")

    def __init__(self, start_seed: int, chance_seed: int) -> None:
        super().__init__(2)
        self.card = int(stream(chance_seed, "deal").integers(52))

    def observe(self, player: str) -> str:
        return f"you hold {self.card}, step {self.steps}"

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        return {"player": float(self.card)}


def dealt() -> Scenario:
    return Scenario("dealt", "dealt", "Hold.", 2, "[test]", Dealt, actions=Dealt.actions, luck_in_start=True)
