"""The documents: links lead somewhere, pages keep their length, figures are those of the result files."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msgrpo.episode import observation_of
from msgrpo.errors import MsgrpoError
from msgrpo.games import get_scenario
from msgrpo.prompt import make_template

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
INDEX = ROOT / "docs" / "results" / "README.md"
STUDIES = sorted(page for page in INDEX.parent.glob("*.md") if page != INDEX)
MEASURED = [*STUDIES, ROOT / "docs" / "real-models.md"]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])
TRAINING = ROOT / "docs" / "training.md"
INTERVAL = re.compile(r"\[([+-]?\d+\.\d+),\s+([+-]?\d+\.\d+)\]")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return set(plain)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_first_minute_and_what_is_installed_can_be_typed_as_written() -> None:
    """There is no release: what names one in an index does not install. And a reader who stops early has played."""
    first = (ROOT / "README.md").read_text().partition("## ")[0]
    assert re.findall(r"^    (.*?)(?:  +#.*)?$", first, flags=re.MULTILINE) == [
        "python3 -m venv .venv && . .venv/bin/activate",
        "pip install -e .",
        "msgrpo play",
    ]
    for page in PAGES:
        assert "pip install 'msgrpo" not in page.read_text(), page


def test_pages_keep_their_length() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    for page in [INDEX, *STUDIES]:
        assert len(page.read_text().splitlines()) <= 120, page


def intervals(value: Any) -> Iterator[tuple[float, float]]:
    """Every pair in a result file that may be an interval: a list of two numbers, or `x_low` beside `x_high`."""
    if isinstance(value, dict):
        for name, low in value.items():
            high = value.get(f"{name.removesuffix('low')}high") if name.endswith("low") else None
            if isinstance(low, float | int) and isinstance(high, float | int):
                yield low, high
            yield from intervals(low)
    elif isinstance(value, list):
        if len(value) == 2 and all(isinstance(number, float | int) for number in value):
            yield value[0], value[1]
        for part in value:
            yield from intervals(part)


def results_named_on(page: Path) -> Iterator[Any]:
    text = page.read_text()
    for name in set(re.findall(r"[\w.*-]+\.jsonl?\b", text)):
        for file in RESULTS.glob(name):
            lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
            yield from map(json.loads, lines)


@pytest.mark.parametrize("page", MEASURED, ids=name_of)
def test_every_interval_of_a_study_stands_in_its_result_files(page: Path) -> None:
    """Rounded as on the page; a difference may be given the other way round."""
    known_numbers = {pair for result in results_named_on(page) for pair in intervals(result)}
    for low_text, high_text in INTERVAL.findall(page.read_text()):
        low, high, unit = float(low_text), float(high_text), 0.51 * 10.0 ** -len(low_text.partition(".")[2])
        assert any(
            (abs(a - low) < unit and abs(b - high) < unit) or (abs(a + high) < unit and abs(b + low) < unit)
            for a, b in known_numbers
        ), f"{page.name}: [{low_text}, {high_text}] is in none of the result files that the page names"


@pytest.mark.parametrize("page", [ROOT / "README.md", INDEX], ids=name_of)
def test_the_overviews_show_the_figures_of_the_studies(page: Path) -> None:
    of_studies = [pair for study in MEASURED for pair in INTERVAL.findall(study.read_text())]
    unsigned = {(low.lstrip("+"), high.lstrip("+")) for low, high in of_studies}
    shown = {(low.lstrip("+"), high.lstrip("+")) for low, high in INTERVAL.findall(page.read_text())}
    assert shown
    assert shown <= unsigned


def test_result_files_that_a_study_names_exist() -> None:
    for page in STUDIES:
        for name in re.findall(r"`(?:benchmarks/results/)?([\w-]+\.(?:metrics\.)?jsonl?)`", page.read_text()):
            assert (RESULTS / name).is_file(), f"{page.name} names {name}"


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    exec(program, {})
    before, after = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert before < after


def test_the_agent_of_the_page_on_evaluation_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "evaluation.md").read_text(), flags=re.DOTALL)
    exec(program, {})
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[-2:])
    assert rows.keys() == {"down", "random"}
    assert rows["down"].startswith("0.0 0.0 ")


def test_the_page_on_training_shows_the_real_prompt() -> None:
    scenario = get_scenario("frozen-lake")
    game = scenario.new(next(iter(scenario.starts("train"))), 0)
    prompt = make_template("brief").render(scenario, observation_of(game, game.players[0]), [])
    shown = re.findall(r"^```text\n(.*?)\n```", TRAINING.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert shown == [prompt.prefix + prompt.state]


def test_the_page_on_training_names_every_metric_and_no_other() -> None:
    pytest.importorskip("torch")
    from msgrpo.train.update import SUMS

    of_an_update = {f"update/{name}" for name in (*SUMS, "grad_norm")} - {"update/mismatch"}
    kinds = "rollout|update|engine|teacher|time|cost"
    written = {
        name
        for file in (ROOT / "train").rglob("*.py")
        for name in re.findall(rf'"((?:{kinds})/\w+)"', file.read_text())
    }
    assert set(re.findall(rf"`((?:{kinds})/\w+)`", TRAINING.read_text())) == written | of_an_update


def test_the_page_on_training_shows_the_presets() -> None:
    from msgrpo.train.config import TrainConfig
    from msgrpo.train.presets import PRESETS

    rows = re.findall(
        r"^\| `([\w-]+)` \|.*\| (\d+) × (\d+) \| (\d+) \| ([\d.e-]+) \|$", TRAINING.read_text(), re.MULTILINE
    )
    assert {name for name, *_ in rows} == PRESETS.keys()
    for name, *shown in rows:
        of_preset = TrainConfig(**PRESETS[name])
        expected = (of_preset.groups, of_preset.group_size, of_preset.steps, of_preset.learning_rate)
        assert tuple(map(float, shown)) == expected, name


def code(page: Path) -> str:
    """What stands in a page's code blocks: fenced ones, and lines that are indented by four."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return "\n".join([*fenced, *re.findall(r"^    (.*)$", page.read_text(), flags=re.MULTILINE)])


def commands() -> Iterator[tuple[str, str]]:
    """Every command line of ours in the documents, with its page: continued lines joined, comments left out."""
    for page in PAGES:
        for line in re.sub(r"\\\n\s*", " ", code(page)).splitlines():
            ours = re.search(r"^(?:\w+=\S+ |make demo && \.venv/bin/)*(msgrpo .*)", line)
            if ours:
                yield name_of(page), re.split(r"\s#|&&|\s>|&$|;", ours[1])[0].strip()


def test_every_command_in_the_documents_has_these_options() -> None:
    import typer.main

    from msgrpo.cli import make_app

    root = typer.main.get_command(make_app())
    for page, line in commands():
        words = [word for word in re.split(r"\s+", line) if word][1:]
        command: Any = root
        while words and hasattr(command, "commands"):
            while words and words[0].startswith("--"):  # options of the group itself, with their values
                words = words[2:]
            if not words:
                break
            assert words[0] in command.commands, f"{page}: {line}"
            command, words = command.commands[words[0]], words[1:]
        known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        ours = words[: words.index("--")] if "--" in words else words
        unknown = {word.partition("=")[0] for word in ours if word.startswith("--")} - known - {"--help"}
        assert not unknown, f"{page}: {line}: {unknown}"


def scripts() -> Iterator[tuple[str, Path, list[str]]]:
    """Every run of a script of ours in the documents: the page, the script, the options after it."""
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", code(page)) + "\n" + "\n".join(re.findall(r"`([^`]+)`", page.read_text()))
        for name, rest in re.findall(r"python[\d.]* (?:-m [\w.]+ [^\n]*?)?(benchmarks/\S+\.py)([^\n]*)", text):
            yield name_of(page), ROOT / name, re.findall(r"(?<=\s)--[a-z][\w-]*", rest.partition("#")[0])


def test_every_script_in_the_documents_has_these_options() -> None:
    checked = 0
    for page, script, options in scripts():
        assert script.is_file(), f"{page}: {script}"
        source = script.read_text()
        for option in options:  # as argparse names it, as the parameter of a typer function, or asked of `machine.py`
            parameter = re.escape(option.removeprefix("--").replace("-", "_"))
            assert f'"{option}"' in source or re.search(rf"\b{parameter}(: |=True)", source), (
                f"{page}: {script.name} {option}"
            )
            checked += 1
    assert checked > 40


def test_every_benchmark_and_every_result_is_named_where_somebody_reads_it() -> None:
    """A script that no page, package file, test or other script names measures for nobody; so does a result file."""
    programs = [file for file in (ROOT / "benchmarks").rglob("*.py") if not file.name.startswith("test_")]
    packages = [ROOT / name for name in ("msgrpo_agent", "train", "serve", "evals", "tui", "tests")]
    pages = "\n".join(page.read_text() for page in PAGES)
    read = pages + "".join(file.read_text() for folder in packages for file in folder.rglob("*.py"))
    for program in programs:
        others = "".join(file.read_text() for file in programs if file != program)
        named = program.name in read + others or f"from {program.stem} import" in others
        assert named, f"{program.name} is named nowhere"
    used = "".join(file.read_text() for file in programs)
    patterns = [name.replace("*", r"[\w.-]*") for name in re.findall(r"[\w.-]+\*[\w.-]*\.jsonl?\b", pages)]
    for file in RESULTS.iterdir():
        named = file.name in read or f'"{file.name.partition(".")[0]}"' in used
        assert named or any(re.fullmatch(one, file.name) for one in patterns), f"{file.name} is named nowhere"


def test_every_setting_in_the_documents_is_one() -> None:
    from msgrpo.train.config import make_config

    checked = 0
    for page, line in commands():
        words = shlex.split(line)
        if words[:2] != ["msgrpo", "train"] or any(word.startswith("$") for word in words):
            continue
        settings = [word for option, word in pairwise(words) if option == "--set" and not word.startswith("prompt=")]
        settings += [f"rollouts={word}" for option, word in pairwise(words) if option == "--rollouts"]
        try:
            make_config(settings=settings)
        except MsgrpoError as error:
            raise AssertionError(f"{page}: {line}") from error
        checked += len(settings)
    assert checked > 20


def test_every_setting_in_the_examples_for_clusters_is_one() -> None:
    from msgrpo.train.config import make_config

    for file in sorted((ROOT / "examples" / "cluster").iterdir()):
        settings = re.findall(r"--set (\S+=\S+)", file.read_text())
        settings += [f"rollouts={what}" for _, what in re.findall(r"--rollouts (['\"])(.*?)\1", file.read_text())]
        assert len(settings) > 1, file
        make_config(settings=settings)


def test_the_credit_of_a_file_in_the_method_is_one_number_a_turn(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (program,) = re.findall(
        r"```python\n(# my_file.py.*?)```", (ROOT / "docs" / "algorithm.md").read_text(), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(program, names)
    group = SimpleNamespace(advantages_G=torch.tensor([1.0, -1.0]), turns=[[0, 0, 0], [0]])
    assert names["my_credit"](group) == [[1.0, 1.0, 0.0], [0.0]]


def test_the_study_in_the_method_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from msgrpo.train.lab import Study

    page = (ROOT / "docs" / "algorithm.md").read_text()
    (program,) = re.findall(r"```python\n(# my_file.py.*?)```", page, re.DOTALL)
    (tmp_path / "my_file.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    study = Study.model_validate(tomllib.loads(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0]))
    assert study.arms["mine"] == {"credit": "my_file.py:my_credit"}
