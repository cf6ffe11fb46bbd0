"""Gates: which groups an update may see, by a rubric that is no reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from msgrpo_agent.episode import Turn
from msgrpo_agent.errors import UsageError
from msgrpo_agent.games import get_scenario
from msgrpo_agent.run_log import read_rows
from train import loop
from train.collect import Group
from train.config import make_config
from train.display import Quiet
from train.gates import EXAMPLE, accepted, gate_named, true_words
from train.msgrpo import composite_returns, group_advantages
from train.words import look

LAKE = get_scenario("frozen-lake")
TINY = ["groups=2", "group_size=4", "keep=2", "minibatches=1", "eval_episodes=4", "steps=1"]


def group(*answers: str) -> Group:
    """One turn an episode, at the start of the lake 1."""
    turns = [[Turn(step=0, player="player", state="s", answer=answer)] for answer in answers]
    returns = composite_returns([[0.0]] * len(turns), [[0.0]] * len(turns))
    return Group(LAKE.new(1, 0), turns, returns, group_advantages(returns))


def test_more_than_half_of_the_first_thoughts_must_be_true() -> None:
    true = look(LAKE.new(1, 0), "player") + "<action>up</action>"
    false = true.replace("hole", "free")
    assert false != true
    assert true_words(group(true, true, false))
    assert not true_words(group(true, false))
    assert not true_words(group("nothing said", "<action>up</action>"))
    kept = accepted([group(true), group(false)], EXAMPLE)
    assert [one.turns[0][0].answer for one in kept] == [true]
    assert len(accepted([group(true), group(false)], None)) == 2


@pytest.mark.parametrize("spec", ["nowhere:gate", "train.gates:none", "train.gates", ":", "train.gates:EXAMPLE"])
def test_a_gate_that_is_none_is_named_before_anything_is_loaded(spec: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gate"):
        gate_named(spec)
    with pytest.raises(UsageError, match="gate"):
        loop.train(make_config(settings=[f"gate={spec}", *TINY]), tmp_path / "out", report=Quiet())
    assert not (tmp_path / "out").exists()


def nothing(group: Group) -> bool:
    return False


def test_a_run_whose_gate_rejects_everything_learns_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.gates.true_words", nothing)
    gate_named.cache_clear()
    loop.train(make_config(settings=[f"gate={EXAMPLE}", *TINY]), tmp_path / "out", report=Quiet())
    gate_named.cache_clear()
    (row,) = [row for row in read_rows(tmp_path / "out") if row["kind"] == "train"]
    assert row["rollout/gated_groups"] == 1
    assert row["update/kept_turns"] == 0
