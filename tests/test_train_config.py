"""TrainConfig: presets, files, settings, and refusals that name the nearest right key."""

import fcntl
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msgrpo import cli, output
from msgrpo.errors import UsageError
from msgrpo.games import SCENARIOS
from msgrpo.models.paths import shipped_adapters
from msgrpo.run_log import CONFIG, alone
from msgrpo.train import beside
from msgrpo.train.backends import BACKENDS, ROLLOUTS
from msgrpo.train.command import planned
from msgrpo.train.config import (
    MANY,
    NUMBERED,
    EvaluationSettings,
    MicroBatching,
    TrainConfig,
    make_config,
)
from msgrpo.train.options import Given
from msgrpo.train.presets import CHOSEN, PRESETS
from msgrpo.train.rivals import RIVALS
from msgrpo.train.run_folder import check_folder
from msgrpo.train.settings import settings_of
from tests.command_line import run

ADAPTERS = shipped_adapters()


def started(
    command: list[str], setting: str, before: str, tmp_path: Path
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A command in a Python of its own, which says at its end what it has loaded; and the folder that it names. Its
    study has one arm with one setting.
    """
    study, out = tmp_path / "study.toml", tmp_path / "out"
    study.write_text(f'question = "?"\nscenario = "frozen-lake"\nseeds = 1\n[arms.a]\n{setting}\n')
    arguments = ["msgrpo", *(part.format(study=study, out=out) for part in command)]
    program = (
        f"import sys; {before}; sys.argv = {arguments}\n"
        "from msgrpo import cli\n"
        "try: cli.main()\n"
        "finally: print('loaded', *{'torch', 'transformers', 'peft'} & set(sys.modules))"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False), out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train", "--set", "stepz=3"], "no setting is named 'stepz'"),
        (["train", "--config", "{study}"], "is not JSON"),
        (["teach", "frozen-lak", "--out", "{out}"], "frozen-lake"),
        (["lab", "{study}"], "stepz"),
        (["export", "{out}", "--to", "merged", "--out", "{out}"], "is no complete adapter"),
        (["export", "{out}", "--to", "gguf", "--out", "{out}", "--dtype", "q9"], "'q9' is no way to write"),
    ],
)
def test_what_a_person_mistyped_is_told_before_torch_is_loaded(command: list[str], said: str, tmp_path: Path) -> None:
    """It took seconds, nearly all of them the import of torch."""
    done, out = started(command, "stepz = 3", "pass", tmp_path)
    assert (done.returncode, done.stdout) == (2, "loaded\n")
    assert said in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["lab", "{study}", "--out", "{out}"], "msgrpo lab"),
        (["train", "--backend", "tinker", "--base", "org/model", "--dry-run"], "msgrpo train --dry-run"),
    ],
)
def test_a_command_that_needs_torch_says_so_where_it_is_not_installed(
    command: list[str], named: str, tmp_path: Path
) -> None:
    """Since the settings were checked before torch is loaded, its want was a traceback."""
    done, out = started(command, "steps = 3", "sys.modules['torch'] = None", tmp_path)
    assert done.returncode == 2
    assert f"{named} needs packages that are not installed" in " ".join(done.stderr.split())
    assert not out.exists()


def test_later_ones_win(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"seed": 1, "group_size": 30, "select": "aaw(keep=3)"}))
    config = make_config(
        "nano", file=file, settings=["minibatches=4", "select=all"], given={"seed": 9, "steps": None}
    )
    assert (config.seed, config.group_size, config.minibatches, str(config.select)) == (9, 30, 4, "all")


def test_what_a_file_says_in_parentheses_stays_where_a_setting_says_less(tmp_path: Path) -> None:
    """--set evaluation=50 took the file's film and its every along, in silence."""
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"evaluation": "200(every=3, film=0)", "micro_batch": 4096, "select": "aaw(keep=3)"}))
    settings = ["evaluation=50", "micro_batch=8192(checkpointing=true)", "micro_batch=2048", "select=uniform"]
    config = make_config(file=file, settings=settings)
    assert str(config.evaluation) == "50(every=3, film=0, film_share=0.018)"
    assert str(config.micro_batch) == "2048(checkpointing=true)"
    assert str(config.select) == "uniform(keep=3)"


def test_every_setting_is_listed_with_its_choices_and_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = run("train", "snake", "--settings", "--json", "--set", "steps=7").stdout
    settings = {setting["name"]: setting for setting in json.loads(listed)}
    assert list(settings) == list(TrainConfig.model_fields)
    assert settings["steps"]["value"] == "7"
    assert settings["select"]["value"] == "aaw(keep=12)"  # the preset's for Snake
    assert all(setting["about"] for setting in settings.values())
    for kind, names in {**RIVALS, "rollouts": ROLLOUTS, "backend": BACKENDS}.items():
        assert [option["name"] for option in settings[kind]["options"]] == list(names)
        assert all(option["about"] for option in settings[kind]["options"])
        assert all(part["about"] for option in settings[kind]["options"] for part in option["takes"])
    (branch,) = [option for option in settings["explore"]["options"] if option["name"] == "branch"]
    assert [(part["name"], part["default"]) for part in branch["takes"]] == [("episodes", None), ("gamma", "1.0")]
    monkeypatch.setattr(output.out, "_width", 200)
    shown = run("train", "--settings").stdout
    assert "to-go(scale=group, words=1.0, gamma=1.0)" in shown
    assert "200(every=15, film=3, film_share=0.018)" in shown
    # all losses take β; the bound `high` is of the ratio, but icepop's of an importance weight
    assert len(re.findall(r"^ +kl +β, penalty on the divergence", shown, re.MULTILINE)) == 1
    assert re.search(r"^ +high \(icepop\) +the largest one *$", shown, re.MULTILINE)


PLAYED: list[list[str]] = [  # what computes and what plays
    [],
    ["rollouts=hf(ahead=1)"],
    ["rollouts=vllm(servers=2, max_model_len=99, ahead=2)", "trainers=2-4", "shard=true"],
    ["rollouts=servers(at=http://a:1 http://b:2, adapters=runs/my versions)", "dtype=bfloat16"],
    ["backend=tinker(prefill=1, sample=2, train=3, max_cost=5)", "base=org/model"],
]
CHOSEN_HERE = [  # and what is learned
    "explore=refill",
    "micro_batch=9(checkpointing=true)",
    "gate=widest",
    "teacher=optimal(divergence=reverse-kl, whole=true)",
    'chat={"enable_thinking": false, "tools": ["a, b", null]}',
    "prompt=none",
]


@pytest.mark.parametrize("scenario", [*SCENARIOS, "snake@0.7,frozen-lake@0.3"])
@pytest.mark.parametrize("chosen", [*PLAYED, CHOSEN_HERE], ids=str)
def test_what_is_listed_is_written_as_a_setting_is_given(scenario: str, chosen: list[str]) -> None:
    """Each alone beside what was given, and all of them alone; nothing was listed as –, and `none` refused."""
    if "gate=widest" in chosen and "," in scenario:
        chosen = [one for one in chosen if one != "gate=widest"]  # it compares the returns of one game
    whole = make_config(settings=chosen, given={"scenario": scenario})
    listed = [f"{setting.name}={setting.value}" for setting in settings_of(whole)]
    assert make_config(settings=listed) == whole
    for setting in listed:
        assert make_config(settings=[f"scenario={scenario}", *chosen, setting]) == whole


def test_a_prompt_from_a_file_is_listed_as_it_can_be_given(tmp_path: Path) -> None:
    """Its name alone was listed, which no command takes."""
    file = tmp_path / "mine.toml"
    file.write_text('system = "You play."\nhistory = 2')
    whole = make_config(settings=[f"prompt={file}"])
    (listed,) = (setting.value for setting in settings_of(whole) if setting.name == "prompt")
    file.unlink()
    assert make_config(settings=[f"prompt={listed}"]) == whole


NAMED = {  # for what has no value of its own
    "episodes": "4", "target": "0.1", "of": "adapter:runs/x", "at": "http://a:1", "adapters": "runs/versions",
}  # fmt: skip


def test_a_choice_with_all_that_it_takes_is_given_as_it_is_listed() -> None:
    """max_model_len=none was refused, and so were the prices of a service."""
    nothing_given = 0
    for setting in settings_of(make_config()):
        for option in setting.options:
            beside = ["base=org/model"] if option.name == "tinker" else []
            listed = re.sub(r"(\w+)=…", lambda part: f"{part[1]}={NAMED[part[1]]}", option.written)
            given = make_config(settings=[*beside, f"{setting.name}={listed}"])
            shorter = re.sub(r"(, )?\w+=none", "", listed).replace("()", "").replace("(, ", "(")
            less = make_config(settings=[*beside, f"{setting.name}={shorter}"])
            assert (given.rollout_settings, given.service) == (less.rollout_settings, less.service)
            nothing_given += listed != shorter
    assert nothing_given == 2


def test_a_choice_keeps_what_the_preset_has_and_it_takes_too() -> None:
    """select=uniform on Snake kept 8 of 12 episodes, not the preset's 12: two things changed at once, in silence."""
    snake = {"scenario": "snake"}
    changed = make_config(settings=["select=uniform", "loss=clip(over=turn)"], given=snake)
    assert str(changed.select) == "uniform(keep=12)"
    assert (changed.loss.kl, changed.loss.over) == (0.05, "turn")
    assert str(make_config(settings=["select=uniform(keep=3)"], given=snake).select) == "uniform(keep=3)"
    assert str(make_config(settings=["select=all"], given=snake).select) == "all"
    assert make_config("small-gpu", settings=["explore=none"]).explore is None  # the preset's, taken away
    held = make_config(settings=["loss=clip(kl=0.4)"], given=snake)
    assert make_config(settings=["loss=clip"], held=held).loss.kl == 0.4  # by the same command with --resume, too


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"credit": {"gamma": 0.5}}, "give it as text"),
        ({"select": 3}, "give it as text"),
        ({"scenario": "snake@0,frozen-lake"}, "above 0"),
        ({"scenario": "snake@0,frozen-lake@0"}, "above 0"),
        ({"rollouts": "vllm(gpu_share=2)"}, "rollouts=vllm"),
        ({"rollouts": "vllm(gpu=2)"}, "it takes ahead, gpu_share, max_model_len, servers, tensor_parallel"),
        ({"rollouts": "servers(at=http://a:1,http://b:1, adapters=x)"}, "no value holds a comma"),
        ({"rollouts": "http://a:1"}, "servers(at=http://host:port, adapters=DIR)"),
        ({"backend": "tinker(cost=2)"}, "it takes prefill, sample, train, max_cost"),
        ({"backend": "local(cost=2)"}, "it takes nothing"),
        ({"backend": "there"}, "'there' is not local, or tinker"),
    ],
)
def test_what_is_no_choice_is_one_sentence(settings: dict[str, object], reason: str) -> None:
    """A dict in --config ended in a TypeError, and shares of 0 were taken for equal ones."""
    with pytest.raises(UsageError, match=re.escape(reason)):
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
    assert (paper.base, paper.groups, paper.group_size, str(paper.select), paper.steps) == (
        "Qwen/Qwen2.5-3B-Instruct", 1, 100, "aaw(keep=25)", 700,
    )  # fmt: skip
    assert paper.evaluation == EvaluationSettings(starts=50, every=50)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_set_what_they_name(preset: str) -> None:
    config = make_config(preset, given={"scenario": "frozen-lake~noise"}).model_dump()
    for name, value in PRESETS[preset].items():
        assert config[name] == TrainConfig.model_validate({"group_size": 100, name: value}).model_dump()[name]


def test_a_run_has_few_settings() -> None:
    """Thirty at most. What one choice takes is in its parentheses."""
    assert len(TrainConfig.model_fields) <= 30


EVALUATIONS = st.builds(
    EvaluationSettings,
    starts=st.integers(1, MANY),
    every=st.integers(1),
    film=st.integers(0, 20),
    film_share=st.floats(0, 1),
)
MICRO_BATCHES = st.builds(MicroBatching, tokens=st.integers(1), checkpointing=st.booleans())
SPACE = st.sampled_from(["", " ", "  "])


@given(st.data(), EVALUATIONS | MICRO_BATCHES)
def test_a_number_with_more_in_parentheses_is_read_as_it_is_written(data: st.DataObject, wanted: Any) -> None:
    """In any order, with any spaces, and what has its default may be left out."""
    (_, first), *others = wanted
    kept = [
        (key, value) for key, value in others if value != type(wanted)().model_dump()[key] or data.draw(st.booleans())
    ]
    space = data.draw(SPACE)
    parts = f",{space}".join(f"{key}{space}={space}{value}" for key, value in data.draw(st.permutations(kept)))
    text = f"{space}{first}{space}({parts})" if parts or data.draw(st.booleans()) else f"{first}"
    setting = {kind: name for name, kind in NUMBERED.items()}[type(wanted)]
    config = make_config(settings=[f"{setting}={text}"])
    assert getattr(config, setting) == wanted
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config


def test_the_defaults_are_those_that_the_parentheses_leave_out() -> None:
    assert TrainConfig().evaluation == EvaluationSettings() == EvaluationSettings.read(str(EvaluationSettings()))
    assert TrainConfig().micro_batch == MicroBatching() == MicroBatching.read(str(MicroBatching()))
    assert str(EvaluationSettings()) == "200(every=15, film=3, film_share=0.018)"
    assert make_config(given={"evaluation": 100, "micro_batch": 64}).evaluation == EvaluationSettings(starts=100)


WRITTEN = {"evaluation": "200(every=15, film=3, film_share=0.018)", "micro_batch": "16384(checkpointing=false)"}
WRONG: list[tuple[str, Any]] = [
    *(("evaluation", value) for value in (
        0, -1, MANY + 1, "0", "2.5", "1e3", "many", "", "(every=5)", "200(", "200)", "200(every)", "200 every=5",
        "200(every=0)", "200(every=5, every=6)", "200(every=often)", "200(film=21)", "200(film=-1)", "200(film=1.5)",
        "200(film_share=1.01)", "200(film_share=-0.1)", "200(film_share=nan)", "200(film_share=inf)", "200(evry=5)",
        "200(starts=5)", "200(share=1)", "200(every=5)(film=3)", "every=5", True, 2.5, None, [200], {"starts": 200},
    )),
    *(("micro_batch", value) for value in (
        0, "-5", "big", "2048(checkpointing=maybe)", "2048(checkpointing)", "2048(tokens=5)", "2048(film=0)", False,
    )),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "value"), WRONG)
@pytest.mark.parametrize("scenario", ["frozen-lake", "snake"])  # of which one has an evaluation of its own
def test_a_wrong_number_is_one_sentence(setting: str, value: Any, scenario: str) -> None:
    """It names the setting, the value as it was given, and how it is written."""
    with pytest.raises(UsageError) as caught:
        make_config(given={"scenario": scenario}, settings=[f"{setting}={value}"])
    said = str(caught.value)
    assert said.startswith(f"{setting}: ")
    assert said.count("it is written") == 1
    assert WRITTEN[setting] in said
    assert f"(seen: {str(value)!r})" in said
    assert "\n" not in said


@pytest.mark.parametrize(("setting", "value"), [pair for pair in WRONG if not isinstance(pair[1], str)])
def test_a_wrong_number_in_a_file_is_one_sentence(setting: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({setting: value}))
    with pytest.raises(UsageError) as caught:
        make_config(file=file)
    assert re.match(rf"{setting}: .*it is written {re.escape(WRITTEN[setting])} \(seen: ", str(caught.value))


@given(number=st.integers() | st.floats() | st.text(max_size=20), inside=st.text(max_size=30), whole=st.booleans())
@pytest.mark.parametrize("setting", NUMBERED)
def test_no_text_of_a_number_ends_in_a_traceback(setting: str, number: Any, inside: str, whole: bool) -> None:
    text, said = f"{number}{f'({inside})' if whole else ''}".strip(), ""
    try:
        config = make_config("small", settings=[f"{setting}={text}"])
    except UsageError as error:
        said = str(error)
    if said:
        assert said.startswith(f"{setting}: ")
        assert WRITTEN[setting] in said
    else:
        assert int(str(getattr(config, setting)).partition("(")[0]) == int(text.partition("(")[0]) >= 1


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("evaluation=200(evry=5)", "it does not take evry"),
        ("evaluation=200(film=21)", "film: Input should be less than or equal to 20, not '21'"),
        ("evaluation=0", "starts: Input should be greater than or equal to 1, not '0'"),
        ("evaluation=200(starts=5)", "starts is the number in front of the parentheses"),
        ("evaluation=200(every=5, every=6)", "is not one key=value"),
        ("evaluation=none", "evaluation: it is played before and after every training, with the fewest as 1("),
        ("micro_batch=2048(checkpointing=maybe)", "checkpointing: Input should be a valid boolean"),
        ("eval_every=5", "no setting is named 'eval_every'"),
        ("micro_batch_tokens=5", "did you mean micro_batch or"),
        ("film=0", "it stands in the parentheses of evaluation: 'evaluation=…(film=…)'"),
        ("ahead=1", "it stands in the parentheses of rollouts"),
        ("max_cost=20", "it stands in the parentheses of backend"),
        ("engine=tinker", "it is called backend"),
        ("preset=paper", "it is an option: --preset nano or small or small-gpu or paper"),
        ("lr=1e-4", "it is called learning_rate"),
        ("beta=0.1", "parentheses of a choice: 'loss=clip(kl=…)'"),
        ("keep=4", "'select=aaw(keep=…)' (also select=uniform(keep=…), select=spread(keep=…))"),
        ("gamma=0.5", "'credit=to-go(gamma=…)'"),
        ("group_size=4", "group_size (G), 4: take 'select=aaw(keep=1)', or select=all"),
    ],
)
def test_the_command_ends_with_what_is_wrong(
    setting: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["msgrpo", "train", "snake", "--set", setting, "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_a_number_keeps_what_the_preset_has_in_parentheses() -> None:
    """As before, when they were settings of their own: more validation starts on Snake come as often as its 100."""
    assert make_config(given={"scenario": "snake", "evaluation": 50}).evaluation == EvaluationSettings(
        starts=50, every=10
    )
    changed = make_config("small", settings=["evaluation=60(film=0)"])
    assert changed.evaluation == EvaluationSettings(starts=60, every=10, film=0)
    assert changed.micro_batch == MicroBatching(tokens=2048)
    assert make_config("small", settings=["evaluation=60(every=3)"]).evaluation.every == 3
    assert make_config("paper", settings=["micro_batch=512"]).micro_batch.checkpointing
    assert not make_config("paper", settings=["micro_batch=512(checkpointing=false)"]).micro_batch.checkpointing


@pytest.mark.parametrize("said", ["evaluation=50", "select=uniform", "evaluation=50(film=0)", "micro_batch=512"])
def test_the_same_command_with_resume_means_the_same(said: str) -> None:
    """What it took over from the preset it takes over from the run that goes on."""
    held = make_config(given={"scenario": "snake"}, settings=[said])
    assert make_config(given={"scenario": "snake"}, settings=[said], held=held) == held


def test_on_resume_the_film_may_be_named_alone() -> None:
    held = make_config(given={"scenario": "snake"})
    changed = make_config(settings=["evaluation=100(film=0)"], held=held).evaluation
    assert changed == EvaluationSettings(starts=100, every=10, film=0)


@pytest.mark.parametrize("said", ["gate=widest", "explore=skip", "credit=to-go"])
def test_a_choice_that_the_run_that_goes_on_has_not_is_no_traceback(said: str) -> None:
    held = make_config(settings=["credit=mine.py:worth"])
    assert said in str(make_config("nano", settings=[said], held=held).model_dump()).replace("': '", "=")


@pytest.mark.parametrize(
    ("now", "differs"),
    [
        ({"evaluation": "200(every=15)"}, ""),
        ({"evaluation": "200(film=0)"}, ""),
        ({"evaluation": "200(film_share=1)", "micro_batch": " 16384(checkpointing=no)"}, ""),
        (
            {"evaluation": "200(every=5)"},
            "every=15, film=3, film_share=0.018)' there, '200(every=5, film=3, film_share=0.018)' asked",
        ),
        (
            {"evaluation": "100(film=0)"},
            "every=15, film=3, film_share=0.018)' there, '100(every=15, film=0, film_share=0.018)' asked",
        ),
        (
            {"micro_batch": "16384(checkpointing=yes)"},
            "micro_batch '16384(checkpointing=false)' there, '16384(checkpointing=true)' asked",
        ),
    ],
)
def test_on_resume_the_film_may_change_and_nothing_else(now: dict[str, str], differs: str, tmp_path: Path) -> None:
    """Without a film no byte of an adapter differs; a text that says the same is the same."""
    (tmp_path / CONFIG).write_text(TrainConfig().model_dump_json())
    if not differs:
        check_folder(tmp_path, TrainConfig.model_validate(now), resume=True)
        return
    with pytest.raises(UsageError) as caught:
        check_folder(tmp_path, TrainConfig.model_validate(now), resume=True)
    assert f"{differs}\n" in str(caught.value)


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
        (["objectives=fixed(brevity=-1e39)"], "brevity: a number of up to 1e+12, not '-1e39'"),
        (["loss=clip(kl=1e30)"], "kl: a number of up to 1e+12, not '1e30'"),
        (["temperature=1e-300"], "greater than or equal to 0.01"),
        (["lora_rank=1000000"], "1000000"),
        (["seed=99999999999999999999999"], "seed"),
    ],
)
def test_wrong_settings_are_refused_with_the_value(settings: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_config(settings=settings)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "mends"),
    [
        (["loss=gspo", "teacher=optimal"], ["loss=clip", "teacher=none"]),
        (["loss=turn", "credit=to-go(words=0.5)"], ["loss=clip", "credit=to-go(words=1)"]),
        (["scenario=frozen-lake,snake", "gate=widest"], ["gate=none"]),
        (["scenario=frozen-lake,snake", "credit=critic"], ["credit=episode"]),
        (["scenario=frozen-lake,snake", "credit=to-go(scale=update)"], ["credit=to-go(scale=group)"]),
        (["shard=true"], ["rollouts=vllm"]),
        (["shard=true", "rollouts=vllm", "teacher=model(of=nano)"], ["teacher=none"]),
        (["shard=true", "rollouts=vllm", "credit=critic"], ["credit=episode"]),
        (["backend=tinker", "loss=clip(kl=0)", "teacher=optimal"], ["teacher=none"]),
        (["backend=tinker", "loss=clip(kl=0)", "credit=critic"], ["credit=episode"]),
        (["opponent=random"], ["opponent=none"]),
        (["explore=refill", "rollouts=hf(ahead=1)"], ["explore=none", "rollouts=hf(ahead=0)"]),
        (["explore=branch(episodes=2)", 'prompt={"history": 2}'], ["explore=none"]),
        (["explore=branch(episodes=2)", "teacher=optimal"], ["explore=none", "teacher=none"]),
    ],
)
def test_what_does_not_go_together_is_told_with_the_settings_that_mend_it(
    settings: list[str], mends: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        make_config(settings=settings)
    for mend in mends:
        assert (mend.partition("(")[2].rstrip(")") if "ahead" in mend else mend) in refused.value.message
        make_config(settings=[*settings, mend])


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


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("loss=mine.py:my_loss", "only credit, select, gate take a function of yours; loss takes clip, gspo"),
        ("teacher=mine.py", "only credit, select, gate take a function of yours; teacher takes optimal"),
        ("credit=mine.py", "is named file.py:function"),
        ("credit=mine.py:my_credit(gamma=2)", "takes no settings"),
        ("gate=my_module:my_gate(drop=2)", "takes no settings"),
        ("credit=to-go gamma=0.5", "'to-go gamma=0.5' is not name or name(key=value, …)"),
    ],
)
def test_a_function_that_a_setting_cannot_take_is_told_which_can(setting: str, said: str) -> None:
    """It was told that it is not name or name(key=value, …), which no reader of the page on rivals understands."""
    with pytest.raises(UsageError) as refused:
        make_config("nano", settings=[setting])
    assert said in str(refused.value)


def test_a_run_that_did_not_begin_keeps_no_later_one_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its server had said lay in runs/snake, and the next run went to runs/snake-2: docs name the first."""
    monkeypatch.chdir(tmp_path)
    folder, asked = Path("runs/snake"), Given(scenario="snake")
    folder.mkdir(parents=True)
    (folder / "vllm.log").write_text("out of memory")
    with alone(folder):
        assert planned(asked).folder == Path("runs/snake-2")  # somebody begins there now
    assert planned(asked).folder == folder
    (folder / CONFIG).write_text("{}")
    assert planned(asked).folder == Path("runs/snake-2")


def test_a_second_watch_in_a_folder_leaves_the_firsts_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that were started within seconds the second emptied the first's log, and its app showed the first."""
    monkeypatch.setattr(beside, "PROGRAM", (sys.executable, "-c", ""))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True, write=len))
    log = tmp_path / beside.LOG
    log.write_text("it loads")
    with log.open() as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=r"another train --watch .* begins there"):
            beside.train_and_watch([], tmp_path)
    assert log.read_text() == "it loads"
    assert beside.train_and_watch([], tmp_path) == 0
    assert log.read_text() == ""


def test_a_watched_training_may_print_what_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a game's own library does: at the end its last lines were a traceback."""
    monkeypatch.setattr(beside, "PROGRAM", (sys.executable, "-c", "import os; os.write(1, b'caf\\xe9\\n')"))
    shown: list[str] = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True, write=shown.append))
    assert beside.train_and_watch([], tmp_path) == 0
    assert shown == ["caf\N{REPLACEMENT CHARACTER}\n"]


def test_settings_of_another_type_are_named(tmp_path: Path) -> None:
    """Each was an error of Python about a line of ours."""
    with pytest.raises(UsageError, match=r"preset is {'steps': 3}, no str\n.*given="):
        make_config({"steps": 3})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="given is 'steps=3', no Mapping"):
        make_config(given="steps=3")  # type: ignore[arg-type]
    (tmp_path / "settings.json").write_text('{"steps": 3}')
    assert make_config(file=str(tmp_path / "settings.json")).steps == 3


def test_a_watch_that_goes_on_in_a_folder_where_a_run_trains_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a training without --watch it showed that one in the app, and its own end only behind it."""
    monkeypatch.setattr(beside, "PROGRAM", (sys.executable, "-c", ""))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True, write=len))
    (tmp_path / beside.LOG).write_text("as it was")
    with alone(tmp_path), pytest.raises(UsageError, match="another process trains in"):
        beside.train_and_watch([], tmp_path)
    assert (tmp_path / beside.LOG).read_text() == "as it was"
