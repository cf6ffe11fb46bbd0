"""The arrows of the architecture, read from the source; and what loads when the light packages are imported."""

import ast
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from msgrpo_agent.errors import MissingExtraError, MsgrpoError
from msgrpo_agent.extras import needs

ROOT = Path(__file__).parents[1]
OURS = {"msgrpo_agent", "train", "serve", "evals", "tui"}
ALLOWED = {
    "msgrpo_agent": {"msgrpo_agent"},
    "train": {"train", "msgrpo_agent", "evals", "serve"},
    "serve": {"serve", "msgrpo_agent"},
    "evals": {"evals", "msgrpo_agent"},
    "tui": {"tui", "msgrpo_agent", "evals"},
}


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names & OURS


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_they_may(package: str) -> None:
    for file in (ROOT / package).rglob("*.py"):
        if file != ROOT / "msgrpo_agent" / "cli.py":
            assert imported(file) <= ALLOWED[package], file


def test_light_packages_load_no_heavy_library() -> None:
    program = (
        "import sys, msgrpo_agent, msgrpo_agent.cli, msgrpo_agent.specs, msgrpo_agent.rollout\n"
        "import evals, evals.stats, tui, serve\n"
        "print(*{'torch', 'transformers', 'peft', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_the_tree_in_the_readme_names_every_module_and_nothing_else() -> None:
    """The README's tree is the manual: every file of the five packages, and every folder inside them."""
    readme = (ROOT / "README.md").read_text()
    tree = readme.split("## The tree is the manual")[1].split("```")[1]
    packages = re.split(r"^(?=\w+/)", tree, flags=re.MULTILINE)
    for package in OURS:
        (block,) = [part for part in packages if part.startswith(f"{package}/")]
        named = set(re.findall(r"[\w]+\.py\b|(?<=\s)[\w]+/(?=\s)", block.partition("\n")[2]))
        files = {file.name for file in (ROOT / package).glob("*.py")} - {"__init__.py"}
        folders = {f"{file.parent.name}/" for file in (ROOT / package).glob("*/*.py")}
        assert named == files | folders | ({"nano/"} if package == "msgrpo_agent" else set()), package


def test_a_users_train_py_hides_nothing(tmp_path: Path) -> None:
    """`python -m` puts the current folder in front of the path; the command keeps it off."""
    (tmp_path / "train.py").write_text("raise SystemExit('the user file was run')\n")
    (tmp_path / "evals.py").write_text("import torch_that_is_not_there\n")
    command = [sys.executable, "-m", "msgrpo_agent.cli", "games"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "frozen-lake" in done.stdout) == (0, True), done.stderr


def test_a_package_that_is_hidden_is_named_with_what_hides_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('the user file was run')\n")
    program = "from msgrpo_agent.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "games"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert str(tmp_path / "train.py") in done.stderr
    assert "Traceback" not in done.stderr


def test_only_a_missing_package_is_called_missing() -> None:
    with pytest.raises(MissingExtraError, match="needs packages"), needs("msgrpo train", "train"):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    with pytest.raises(ModuleNotFoundError, match="collect"), needs("msgrpo train", "train"):
        raise ModuleNotFoundError("No module named 'train.collect'", name="train.collect")
    with pytest.raises(MsgrpoError, match="huggingface_hub") as caught, needs("msgrpo train", "train"):
        raise ModuleNotFoundError("No module named 'huggingface_hub'", name="huggingface_hub")
    assert not isinstance(caught.value, MissingExtraError)
    with pytest.raises(MsgrpoError, match="libcudart") as caught, needs("msgrpo train", "train"):
        raise ImportError("libcudart.so.12: cannot open shared object file")
    assert not isinstance(caught.value, MissingExtraError)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checking count, too: two files that need each other's names are one subject or three."""
    files = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for p in OURS for f in (ROOT / p).rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        if file.name == "__init__.py":
            continue
        wanted = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[name] = {other for other in wanted if other in files and other != name}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_files_are_written_in_one_move() -> None:
    """Whoever writes a file over another does it through `msgrpo_agent/files.py`, or in a folder that is moved."""
    moved = {"train/dqn.py", "train/checkpoint.py", "evals/huggingface.py", "tui/launch.py"}
    for file in (f for package in OURS for f in (ROOT / package).rglob("*.py")):
        calls = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call)
        }
        if file.relative_to(ROOT).as_posix() not in moved | {"msgrpo_agent/files.py"}:
            assert not calls & {"write_text", "write_bytes", "save_file"}, file


def test_every_benchmark_can_be_started() -> None:
    """A benchmark that nobody runs for a while must not be broken by a name that moved."""
    pytest.importorskip("torch")
    names = sorted(file.stem for file in (ROOT / "benchmarks").glob("*.py"))
    program = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
