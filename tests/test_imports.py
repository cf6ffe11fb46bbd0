"""The arrows of the architecture, read from the source; and what loads when the light packages are imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"msgrpo_agent", "train", "serve", "evals", "tui"}
ALLOWED = {
    "msgrpo_agent": {"msgrpo_agent"},
    "train": {"train", "msgrpo_agent", "evals", "serve"},
    "serve": {"serve", "msgrpo_agent"},
    "evals": {"evals", "msgrpo_agent"},
    "tui": {"tui", "msgrpo_agent"},
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


def test_the_tree_in_the_readme_names_every_module_that_is_there() -> None:
    """The README's tree is the manual: what it names exists."""
    readme = (ROOT / "README.md").read_text()
    tree = readme.split("## The tree is the manual")[1].split("```")[1]
    named = [word for word in tree.split() if word.endswith(".py") and "<" not in word]
    present = {file.name for package in OURS for file in (ROOT / package).rglob("*.py")}
    assert named
    assert set(named) <= present
