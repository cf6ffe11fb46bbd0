"""A few hundred steps: the mechanics of training, resuming and playing."""

from __future__ import annotations

import base64
import errno
import itertools
import json
import pickle
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msgrpo.agent import Agent
from msgrpo.episode import play_episode
from msgrpo.errors import ModelError, RunError, UsageError
from msgrpo.evals.run import evaluate
from msgrpo.games import get_scenario
from msgrpo.gym_env import ScenarioEnv
from msgrpo.models import dqn as agents
from msgrpo.models.dqn import DQNAgent, read_card
from msgrpo.references import RandomAgent
from msgrpo.specs import make_agent
from msgrpo.train import dqn
from msgrpo.train.dqn import CHECKPOINTS, Tuning, newest_checkpoint, train, tuning_for
from tests import command_line

LAKE = get_scenario("frozen-lake")
TINY = Tuning(steps=240, environments=2, buffer=500, batch=16, learning_starts=40, target_update=50, hidden=(16, 16))


def quiet(line: str) -> None:
    """Say nothing."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("dqn")
    train("frozen-lake", out, tuning=TINY, every=100, say=quiet)
    return out


async def test_the_trained_folder_is_an_agent(run: Path) -> None:
    agent = make_agent(f"dqn:{run}")
    first, second = [
        await play_episode(LAKE, {"player": agent}, start_seed=7, chance_seed=1, sampling_seed=s) for s in (1, 2)
    ]
    assert first.turns == second.turns  # greedy: its own dice do not matter
    assert first.settings["player"]["trained_on"] == "frozen-lake"
    await agent.close()


def test_the_card_says_what_it_was_trained_on(run: Path) -> None:
    card = read_card(run)
    assert (card["scenario"], card["steps"], card["seed"]) == ("frozen-lake", 240, 0)
    assert card["tuning"]["hidden"] == [16, 16]
    assert list((run / "tensorboard").rglob("events.*"))
    assert newest_checkpoint(run) == run / CHECKPOINTS / "240"
    assert len(list((run / CHECKPOINTS).iterdir())) == 1


def test_it_plays_boards_with_the_same_planes_only(run: Path) -> None:
    agent = DQNAgent("dqn", run)
    playable = ("frozen-lake", "frozen-lake-slippery", "frozen-lake-8x8", "snake", "snake-duel")
    assert [s for s in playable if agent.can_play(get_scenario(s))] == ["frozen-lake", "frozen-lake-slippery"]


async def test_another_board_is_refused(run: Path) -> None:
    agent = DQNAgent("dqn", run)
    with pytest.raises(UsageError, match="trained on frozen-lake"):
        await play_episode(get_scenario("snake"), {"snake1": agent}, start_seed=0, chance_seed=0, sampling_seed=0)


async def test_it_takes_part_in_an_evaluation(run: Path, tmp_path: Path) -> None:
    await evaluate([DQNAgent("dqn:x", run)], [LAKE, get_scenario("snake")], 3, tmp_path)
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1


def test_a_run_that_goes_on_meets_other_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[list[int]] = []
    reset = ScenarioEnv.reset

    def noting(self: ScenarioEnv, **given: Any) -> Any:
        observation, info = reset(self, **given)
        met[-1].append(info["start_seed"])
        return observation, info

    monkeypatch.setattr(ScenarioEnv, "reset", noting)
    for steps in (60, 120):
        met.append([])
        train("frozen-lake", tmp_path, steps=steps, tuning=TINY, say=quiet)
    assert met[0][:4] != met[1][:4]


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    said: list[str] = []
    train("frozen-lake", tmp_path, steps=120, tuning=TINY, say=quiet)
    before = counters(tmp_path)
    train("frozen-lake", tmp_path, steps=240, tuning=TINY, say=said.append)
    after = counters(tmp_path)
    assert (before["steps"], after["steps"]) == (120, 240)
    assert after["updates"] > before["updates"] > 0
    assert after["taken"] > before["taken"] > 0  # the replay buffer went on, too
    assert said[-1].startswith("240 of 240 steps")
    train("frozen-lake", tmp_path, steps=240, tuning=TINY, say=said.append)
    assert "already" in said[-1]


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    """The checkpoints of a run of `msgrpo train` were removed."""
    kept = tmp_path / CHECKPOINTS / "step-000001" / "state.pt"
    kept.parent.mkdir(parents=True)
    for file in (kept, tmp_path / "config.json"):
        file.write_text("{}")
    with pytest.raises(UsageError, match="is not empty and holds no run of train-dqn"):
        train("frozen-lake", tmp_path, tuning=TINY, say=quiet)
    assert kept.is_file()
    assert not (tmp_path / "model.zip").exists()


def test_a_run_that_began_before_the_lock_was_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder was looked at before it was locked, and not again: an agent was put beside the other run's files."""

    @contextmanager
    def alone(out: Path) -> Iterator[None]:
        (out / "config.json").write_text("{}")  # by `msgrpo train`, which has ended meanwhile
        yield

    monkeypatch.setattr(dqn, "alone", alone)
    with pytest.raises(UsageError, match="is not empty and holds no run of train-dqn"):
        train("frozen-lake", tmp_path, tuning=TINY, say=quiet)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def counters(run: Path) -> dict[str, int]:
    newest = newest_checkpoint(run)
    assert newest is not None
    taken, _, steps, updates, _ = map(int, np.load(newest / "replay.npz")["counters"])
    return {"taken": taken, "steps": steps, "updates": updates}


def test_a_zip_is_read_without_unpickling(run: Path, tmp_path: Path) -> None:
    """Neither an agent's zip nor a checkpoint may hold code: whoever sends a DQN sends tensors."""
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    out = tmp_path / "run"
    shutil.copytree(run, out)
    newest = newest_checkpoint(out)
    assert newest is not None
    for folder in (out, newest):
        with zipfile.ZipFile(folder / "model.zip") as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        data = json.loads(parts["data"])
        data["policy_class"] = {":type:": "x", ":serialized:": base64.b64encode(pickle.dumps(Evil())).decode()}
        with zipfile.ZipFile(folder / "model.zip", "w") as archive:
            for name, held in (parts | {"data": json.dumps(data).encode()}).items():
                archive.writestr(name, held)
    DQNAgent("d", out)
    train("frozen-lake", out, tuning=TINY, steps=300, say=quiet)
    assert not marker.exists()


def test_an_interruption_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("frozen-lake", tmp_path, tuning=TINY, every=60, say=interrupt)
    assert newest_checkpoint(tmp_path) == tmp_path / CHECKPOINTS / "60"
    (tmp_path / CHECKPOINTS / ".80.part").mkdir()  # a checkpoint that was being written when the power failed
    train("frozen-lake", tmp_path, tuning=TINY, say=quiet)
    assert read_card(tmp_path)["steps"] == 240


def test_another_runs_folder_is_refused(run: Path) -> None:
    with pytest.raises(RunError, match="seed was 0, now 1"):
        train("frozen-lake", run, tuning=TINY, seed=1, say=quiet)
    with pytest.raises(RunError, match="scenario was frozen-lake"):
        train("snake", run, tuning=TINY, say=quiet)


@pytest.mark.parametrize("scenario", ["frozen-lake", "snake"])
def test_the_tuning_of_a_family_makes_a_network_that_runs(scenario: str, tmp_path: Path) -> None:
    train(scenario, tmp_path, steps=16, say=quiet)
    agent = DQNAgent("d", tmp_path)
    kept = {**read_card(tmp_path)["tuning"]}
    assert kept["convolutions"] == tuning_for(get_scenario(scenario)).convolutions == (scenario == "snake")
    values = agent.network.q_net(torch.zeros(1, *agent.shape))
    assert values.shape == (1, 4)


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no trained DQN"):
        DQNAgent("d", tmp_path)
    (tmp_path / "dqn.json").write_text(json.dumps({"scenario": "snake"}))
    (tmp_path / "model.zip").write_bytes(b"no zip")
    with pytest.raises(ModelError, match="damaged"):
        DQNAgent("d", tmp_path)


def test_weights_that_are_no_weights(run: Path, tmp_path: Path) -> None:
    (tmp_path / "dqn.json").write_text((run / "dqn.json").read_text())
    (tmp_path / "model.zip").write_bytes(b"no zip")
    with pytest.raises(ModelError, match="is no DQN"):
        DQNAgent("d", tmp_path)


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError(errno.EIO, "Input/output error")])
def test_what_the_machine_refuses_of_weights_is_no_damage(
    error: Exception, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To train it again was the advice."""

    def refuse(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(agents, "_network", refuse)
    with pytest.raises(ModelError, match=r"model\.zip cannot be read") as told:
        DQNAgent("d", run)
    assert told.value.fix is None


@pytest.mark.parametrize("damage", ["model.zip", "replay.npz"])
def test_a_damaged_checkpoint_is_named(run: Path, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(run, out)
    newest = newest_checkpoint(out)
    assert newest is not None
    (newest / damage).write_bytes(b"")
    with pytest.raises(RunError, match="is damaged"):
        train("frozen-lake", out, tuning=TINY, steps=300, say=quiet)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        train("frozen-lake", tmp_path / "file", tuning=TINY, say=quiet)


def test_a_disk_that_cannot_be_read_is_no_damaged_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was advised to start again in another folder."""
    out = tmp_path / "run"
    shutil.copytree(run, out)

    def refused(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(np, "load", refused)
    with pytest.raises(RunError, match="Input/output error") as caught:
        train("frozen-lake", out, tuning=TINY, steps=300, say=quiet)
    assert caught.value.fix == "remove the cause; the same command goes on"


def test_a_run_killed_after_its_last_checkpoint_gets_its_agent(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (out / "dqn.json").unlink()
    train("frozen-lake", out, tuning=TINY, say=quiet)
    assert read_card(out)["scenario"] == "frozen-lake"


def test_several_players_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="several players"):
        train("snake-duel", tmp_path, say=quiet)


def test_a_wrong_name_is_told_before_anything_heavy_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took seconds; without the packages a person was sent to install them first."""
    monkeypatch.setitem(sys.modules, "msgrpo.train.dqn", None)
    monkeypatch.delattr("msgrpo.train.dqn")
    done = command_line.invoked("train-dqn", "frozen-lak", "--out", "d")
    assert isinstance(done.exception, UsageError)
    assert "no scenario is named 'frozen-lak'" in done.exception.message


def test_the_command(tmp_path: Path) -> None:
    command_line.run("train-dqn", "frozen-lake", "--out", str(tmp_path / "d"), "--steps", "8")
    assert DQNAgent("d", tmp_path / "d").card["steps"] == 8


@pytest.mark.slow
async def test_it_learns(tmp_path: Path) -> None:
    """Ten seconds of training solve most lakes that it never saw; random play solves next to none."""
    tuning = Tuning(
        steps=10_000, batch=128, learning_starts=500, target_update=400, buffer=20_000, learning_rate=1e-3
    )
    train("frozen-lake", tmp_path, tuning=tuning, say=quiet)

    async def successes(agent: Agent) -> int:
        episodes = [
            await play_episode(LAKE, {"player": agent}, start_seed=seed, chance_seed=0, sampling_seed=seed)
            for seed in itertools.islice(LAKE.starts("test"), 60)
        ]
        return sum(bool(episode.success) for episode in episodes)

    assert await successes(RandomAgent()) < 10
    assert await successes(DQNAgent("d", tmp_path)) >= 40
