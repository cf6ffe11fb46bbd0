"""Gates: which groups an update may see, by a rubric that is no reward."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from msgrpo.episode import Turn, play_episode
from msgrpo.errors import UsageError
from msgrpo.games import get_scenario
from msgrpo.references import RandomAgent
from msgrpo.run_log import read_rows
from msgrpo.train import loop
from msgrpo.train.config import make_config
from msgrpo.train.display import Quiet
from msgrpo.train.groups import Group, beginning
from msgrpo.train.msgrpo import composite_returns, group_advantages
from msgrpo.train.nano import gate as nano_gate
from msgrpo.train.nano.gate import TrueWords, true_words
from msgrpo.train.nano.words import look
from msgrpo.train.rivals.outside import Function, OutsideCredit, OutsideGate, OutsideSelect, load
from tests.train_helpers import Told

LAKE = get_scenario("frozen-lake")
TINY = ["groups=2", "group_size=4", "select=aaw(keep=2)", "minibatches=1", "evaluation=4(film=0)", "steps=1"]


def group(*answers: str) -> Group:
    """One turn an episode, at the start of the lake 1."""
    turns = [[Turn(step=0, player="player", state="s", answer=answer)] for answer in answers]
    returns = composite_returns([[0.0]] * len(turns), [[0.0]] * len(turns))
    return Group(lambda j: LAKE.new(1, 0), turns, returns, group_advantages(returns))


def test_more_than_half_of_the_first_thoughts_must_be_true() -> None:
    true = look(LAKE.new(1, 0), "player") + "<action>up</action>"
    false = true.replace("hole", "free")
    assert false != true
    assert true_words(group(true, true, false))
    assert not true_words(group(true, false))
    assert not true_words(group("nothing said", "<action>up</action>"))
    assert TrueWords().passing([group(true), group(false)]) == [0]


@pytest.mark.parametrize(
    "spec", ["nowhere:gate", "msgrpo.train.nano.gate:none", "train.gates", ":", "msgrpo.train.update:WARM_UP"]
)
def test_a_gate_that_is_none_is_named_before_anything_is_loaded(spec: str, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"has no function|cannot be loaded|no gate is named|a function of yours is named"
    ):
        loop.train(make_config(settings=[f"gate={spec}", *TINY]), tmp_path / "out", report=Quiet())
    assert not (tmp_path / "out").exists()


USERS = """
import torch
def forgotten(group): pass
def said(group): return "no"
def raises(group): raise ValueError("too short")
def tensor(group): return torch.tensor([1.0, 2.0])
def two(group, other): return True
def leaves(group): raise SystemExit(0)
def moves(group): import os; os.chdir('/'); return True
def good(group): return len(group.turns) > 1
"""


def test_a_gate_that_fails_or_decides_nothing_is_an_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "users_gate.py").write_text(USERS)
    assert len(OutsideGate(spec="users_gate:good").passing([group("a"), group("a", "b")])) == 1
    for name in ("forgotten", "said", "tensor"):
        with pytest.raises(UsageError, match=f"users_gate:{name}' returned"):
            OutsideGate(spec=f"users_gate:{name}").passing([group("a")])
    with pytest.raises(UsageError, match=r"too short.*users_gate\.py:5"):
        OutsideGate(spec="users_gate:raises").passing([group("a")])
    for name in ("two", "leaves"):
        with pytest.raises(UsageError, match=f"users_gate:{name}' failed"):
            OutsideGate(spec=f"users_gate:{name}").passing([group("a")])
    here = Path.cwd()
    assert OutsideGate(spec="users_gate:moves").passing([group("a")]) == [0]
    assert Path.cwd() == here
    (tmp_path / "users_lazy.py").write_text("def __getattr__(name): raise ValueError(name)")
    with pytest.raises(UsageError, match="ValueError: f"):
        load("users_lazy:f")
    for name, text in {"syntax": "def f(:", "divides": "1/0", "leaves": "raise SystemExit"}.items():
        (tmp_path / f"users_{name}.py").write_text(text)
        with pytest.raises(UsageError, match=rf"cannot be loaded.*users_{name}.py:1"):
            load(f"users_{name}:f")


ODD = """
import torch
def nothing(group, generator=None): return None
def words(group, generator=None): return [["x"]]
def tensors(group, generator=None): return [torch.ones(2, 2)]
def mask(group, generator): return [True, False]
def halves(group, generator): return [0.7, 1.2]
def torchs(group, generator): return torch.tensor([1, 0])
def wants_two(group, more): return [[0.0]]
async def awaited(group): return [[0.0]]
def lazily(group):
    yield [0.0]
    raise ValueError("no second")

def huge(group): return [[1e30] * len(turns) for turns in group.turns]
"""


class Alone:
    """What the first and only rank has."""

    first = True
    generator = torch.Generator()

    @property
    def ranks(self) -> Any:
        return self

    def broadcast(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        (OutsideCredit, "nothing", r"returned None \(.*odd\.py:3\)"),
        (OutsideCredit, "words", r"returned \[\['x'\]\] \(.*odd\.py:4\)"),
        (OutsideCredit, "tensors", r"returned .*odd\.py:5\)"),
        (OutsideCredit, "lazily", r"failed: ValueError: no second \(.*odd\.py:13\)"),
        (OutsideCredit, "huge", r"returned \[\[1e\+30.*odd\.py:15\)"),
        (OutsideSelect, "nothing", r"returned None \(.*odd\.py:3\)"),
        (OutsideSelect, "mask", r"returned \[True, False\] \(.*odd\.py:6\)"),
        (OutsideSelect, "halves", r"returned \[0\.7, 1\.2\] \(.*odd\.py:7\)"),
    ],
)
def test_an_answer_that_cannot_be_used_is_blamed_on_the_line_of_the_function(
    kind: type[Function], name: str, says: str, tmp_path: Path
) -> None:
    """The error named a line of this package; and a mask of truth values or halves was taken for indices."""
    (tmp_path / "odd.py").write_text(ODD)
    choice: Any = kind(spec=f"{tmp_path / 'odd.py'}:{name}")
    with pytest.raises(UsageError, match=says):
        choice.of_groups([group("a", "b")], Alone()) if kind is OutsideCredit else choice.kept(
            group("a", "b"), Alone()
        )


def test_indices_of_torch_are_indices(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    alone: Any = Alone()
    assert OutsideSelect(spec=f"{tmp_path / 'odd.py'}:torchs").kept(group("a", "b"), alone) == [1, 0]


@pytest.mark.parametrize(
    ("name", "says"),
    [("wants_two", r"missing a required argument: 'more'.*odd\.py:9"), ("awaited", "async function")],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_run(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    with pytest.raises(UsageError, match=says):
        OutsideCredit(spec=f"{tmp_path / 'odd.py'}:{name}").prepare()


def nothing(group: Group) -> bool:
    return False


@pytest.mark.usefixtures("near")
def test_a_run_whose_gate_rejects_everything_learns_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nano_gate, "true_words", nothing)
    told = Told()
    loop.train(make_config(settings=["gate=true-words", *TINY]), tmp_path / "out", report=told)
    assert any("the gate true-words rejected 100% of the groups" in note for note in told.said)
    (row,) = [row for row in read_rows(tmp_path / "out") if row["kind"] == "train"]
    assert row["rollout/gated_groups"] == 1
    assert row["update/kept_turns"] == 0


def test_a_function_of_ones_own_is_given_a_copy(tmp_path: Path) -> None:
    """One that went through the turns backwards, in place, gave the update each turn with another one's credit."""
    (tmp_path / "mine.py").write_text(
        "def gate(group):\n"
        "    for turns in group.turns:\n"
        "        turns.reverse()\n"
        "        turns[0].reward = 9.0\n"
        "    group.episodes[0].turns.clear()\n"
        "    group.episodes[1].returns['player'] = 9.0\n"
        "    group.turns[2][0].action_probabilities.clear()\n"
        "    group.returns_G.zero_()\n"
        "    group.advantages_G.zero_()\n"
        "    return True\n"
    )
    episodes = [
        asyncio.run(play_episode(LAKE, {"player": RandomAgent()}, start_seed=1, chance_seed=0, sampling_seed=seed))
        for seed in range(3)
    ]
    episodes[2].turns[-1].action_probabilities = {"down": 1.0}
    made = Group.of(beginning(LAKE), episodes, "player", 0)
    assert made is not None
    given = replace(made, returns_G=torch.tensor([1.0, 2.0, 3.0]), advantages_G=torch.tensor([-1.0, 0.0, 1.0]))
    before = [episode.model_dump_json() for episode in episodes], [list(turns) for turns in given.turns]
    assert OutsideGate(spec=f"{tmp_path / 'mine.py'}:gate").passing([given]) == [0]
    assert ([episode.model_dump_json() for episode in episodes], given.turns) == before
    assert given.returns_G.tolist() == [1, 2, 3]
    assert given.advantages_G.tolist() == [-1, 0, 1]
