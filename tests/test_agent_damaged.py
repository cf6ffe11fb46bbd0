"""What is nested too deep to be read is damaged like any other file, and ends nothing with a RecursionError."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from msgrpo.errors import MsgrpoError, UsageError
from msgrpo.models.asked import trained_as
from msgrpo.models.dqn import CARD, WEIGHTS, read_card
from msgrpo.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter_config
from msgrpo.run_log import CONFIG, METRICS, read_rows, settings
from msgrpo.train.config import make_config
from msgrpo.train.run_folder import check_folder, config_of
from msgrpo.tui.choices import remembered, trained_on

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "read",
    [
        *(settings, read_adapter_config, read_card),
        *(lambda folder: config_of(folder, {}), lambda folder: make_config(file=folder / CONFIG)),
    ],
    ids=["a run", "an adapter", "a DQN", "a run's settings", "--config"],
)
def test_a_file_that_is_needed_is_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    for name in (CONFIG, ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, WEIGHTS):
        (tmp_path / name).write_text(DEEP)
    with pytest.raises(MsgrpoError):
        read(tmp_path)


def test_a_run_that_called_its_backend_engine_goes_on(tmp_path: Path) -> None:
    """It was called damaged, and the advice was to begin another one."""
    for engine, backend in (("here", "local"), ("tinker", "tinker")):
        values = make_config(settings=["loss=clip(kl=0)"]).model_dump(mode="json", exclude={"backend"})
        (tmp_path / CONFIG).write_text(json.dumps(values | {"engine": engine}))
        held = config_of(tmp_path, {"backend": backend})
        assert held is not None
        assert held.backend == backend
    with pytest.raises(UsageError, match="names backend 'tinker'"):
        config_of(tmp_path, {})


def test_a_run_of_another_version_is_not_called_damaged(tmp_path: Path) -> None:
    """Only the first setting was named, in a library's words. And an adapter with another prompt cannot be used."""
    values = make_config().model_dump(mode="json") | {"ahead": 0, "eval_every": 15}
    (tmp_path / CONFIG).write_text(json.dumps(values))
    with pytest.raises(UsageError, match="no setting is called ahead, eval_every") as caught:
        config_of(tmp_path, {})
    assert str(caught.value.fix).endswith("the adapter that the run has can be used here")
    assert trained_as(tmp_path).prompt == make_config().prompt
    (tmp_path / CONFIG).write_text(json.dumps(values | {"prompt": values["prompt"] | {"of_tomorrow": 1}}))
    said = r"another version of msgrpo: here no setting is called prompt\.of_tomorrow, ahead, eval_every"
    with pytest.raises(UsageError, match=said) as caught:
        config_of(tmp_path, {})
    assert str(caught.value.fix) == "go on with the version that began the run, or choose another --out"


def test_a_command_that_allows_what_a_run_names_keeps_what_a_person_has_changed(tmp_path: Path) -> None:
    """Pasted, it went on by the engine that the run had, and with one trainer."""
    values = make_config().model_dump(mode="json") | {"scenario": "my_game.py:scenario"}
    (tmp_path / CONFIG).write_text(json.dumps(values))
    with pytest.raises(UsageError) as caught:
        config_of(tmp_path, {"trainers": 2, "rollouts": "vllm(servers=1)", "seed": 1})
    command = f"train --resume --out {tmp_path} --set 'rollouts=vllm(servers=1)' --set trainers=2"
    assert str(caught.value.fix).endswith(command)


def test_a_new_run_in_anothers_folder_is_not_told_to_allow_what_that_one_names(tmp_path: Path) -> None:
    """Pasted, the command went on with the other run, by the new one's number of updates."""
    values = make_config().model_dump(mode="json") | {"scenario": "my_game.py:scenario"}
    (tmp_path / CONFIG).write_text(json.dumps(values))
    with pytest.raises(UsageError, match="holds a run already"):
        check_folder(tmp_path, make_config(), resume=False)


def test_a_file_that_only_tells_more_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(DEEP + "\n")
    assert read_rows(tmp_path) == []
    assert trained_on(tmp_path / METRICS) is None
    assert remembered(tmp_path / METRICS) == {}
