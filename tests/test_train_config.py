"""TrainConfig: presets, files, settings, and refusals that name the nearest right key."""

import json
from pathlib import Path

import pytest

from msgrpo.errors import UsageError
from msgrpo.games import SCENARIOS
from msgrpo.models.paths import shipped_adapters
from msgrpo.run_log import CONFIG
from msgrpo.train.config import CHOSEN, PRESETS, TrainConfig, make_config

ADAPTERS = shipped_adapters()


def test_later_ones_win(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"seed": 1, "group_size": 30, "select": "aaw(keep=3)"}))
    config = make_config(
        "nano", file=file, settings=["minibatches=4", "select=all"], given={"seed": 9, "steps": None}
    )
    assert (config.seed, config.group_size, config.minibatches, str(config.select)) == (9, 30, 4, "all")


def test_a_choice_keeps_what_the_preset_has_and_it_takes_too() -> None:
    """select=uniform on Snake kept 8 of 12 episodes, not the preset's 12: two things changed at once, in silence."""
    snake = {"scenario": "snake"}
    changed = make_config(settings=["select=uniform", "loss=clip(over=turn)"], given=snake)
    assert str(changed.select) == "uniform(keep=12)"
    assert (changed.loss.kl, changed.loss.over) == (0.05, "turn")
    assert str(make_config(settings=["select=uniform(keep=3)"], given=snake).select) == "uniform(keep=3)"
    assert str(make_config(settings=["select=all"], given=snake).select) == "all"
    held = make_config(settings=["loss=clip(kl=0.4)"], given=snake)
    assert make_config(settings=["loss=clip"], held=held).loss.kl == 0.1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"credit": {"gamma": 0.5}}, "give it as text"),
        ({"select": 3}, "give it as text"),
        ({"scenario": "snake@0,frozen-lake"}, "above 0"),
        ({"scenario": "snake@0,frozen-lake@0"}, "above 0"),
        ({"rollouts": "vllm(gpu_share=2)"}, "rollouts=vllm"),
        ({"rollouts": "vllm(gpu=2)"}, "rollouts=vllm"),
    ],
)
def test_what_is_no_choice_is_one_sentence(settings: dict[str, object], reason: str) -> None:
    """A dict in --config ended in a TypeError, and shares of 0 were taken for equal ones."""
    with pytest.raises(UsageError, match=reason):
        make_config(given=settings)


@pytest.mark.parametrize(
    "wrong", ["select=unifrm", "select=aaw(keep=x)", "loss=clip(kl", "loss=clip(bad=1)", "credit="]
)
def test_a_wrong_choice_is_one_sentence_where_the_preset_has_one_too(wrong: str) -> None:
    """The fault: on Snake, and with every preset but nano's, it ended in a traceback."""
    said = []
    for scenario in ("frozen-lake", "snake"):
        with pytest.raises(UsageError) as caught:
            make_config(settings=[wrong], given={"scenario": scenario})
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert said[0].startswith(wrong.partition("=")[0])


def test_the_paper_preset_is_the_papers() -> None:
    paper = make_config("paper")
    assert (paper.base, paper.groups, paper.group_size, str(paper.select), paper.steps, paper.eval_episodes) == (
        "Qwen/Qwen2.5-3B-Instruct", 1, 100, "aaw(keep=25)", 700, 50,
    )  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_set_what_they_name(preset: str) -> None:
    config = make_config(preset, given={"scenario": "frozen-lake~noise"}).model_dump()
    for name, value in PRESETS[preset].items():
        assert config[name] == TrainConfig.model_validate({"group_size": 100, name: value}).model_dump()[name]


def test_a_run_has_few_settings() -> None:
    """Thirty, and nine for films, clusters, teachers and services. What one choice takes is in its parentheses."""
    assert len(TrainConfig.model_fields) <= 33


def test_settings_are_chosen_for_scenarios_that_are_there() -> None:
    """A misspelt name would never be looked up; and each must fit with the rest of the preset."""
    assert set(CHOSEN) <= set(SCENARIOS)
    for scenario in SCENARIOS:
        config = make_config(given={"scenario": scenario})
        named = make_config(given={"scenario": scenario, **CHOSEN.get(scenario, {})})
        assert named == config
        assert "steps" not in CHOSEN.get(scenario, {}) or config.steps == CHOSEN[scenario]["steps"]


@pytest.mark.parametrize("scenario", ADAPTERS)
def test_the_adapters_that_come_along_are_what_msgrpo_train_makes_today(scenario: str) -> None:
    """Their figures stand beside that command: who changes a preset trains them anew."""
    trained = TrainConfig.model_validate_json((ADAPTERS[scenario] / CONFIG).read_bytes())
    assert trained == make_config(given={"scenario": scenario, "seed": 0})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["groop_size=8"], "group_size"),
        (["learning_rate=fast"], "fast"),
        (["select=aaw(keep=25)"], "more than group_size"),
        (["group_size"], "key=value"),
        (["scenario=frozen-lak"], "frozen-lake"),
        (["loss=clip(low=1.5)"], "1.5"),
        (["learning_rate=inf"], "learning_rate"),
        (["lora_rank=1000000"], "1000000"),
        (["seed=99999999999999999999999"], "seed"),
    ],
)
def test_wrong_settings_are_refused_with_the_value(settings: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_config(settings=settings)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, None])
def test_wrong_files_are_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "c.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match="--config"):
        make_config(file=file)


def test_unknown_preset() -> None:
    with pytest.raises(UsageError, match="paper"):
        make_config("papr")
