"""The arrows of the architecture, read from the source; and what loads when the light packages are imported."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import typer

from msgrpo.errors import MissingExtraError, MsgrpoError
from msgrpo.extras import needs

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "msgrpo_agent": "msgrpo",
    "train": "msgrpo.train",
    "serve": "msgrpo.serve",
    "evals": "msgrpo.evals",
    "tui": "msgrpo.tui",
}
ALLOWED = {
    "msgrpo_agent": set(),
    "train": {"evals", "serve"},
    "serve": set(),
    "evals": set(),
    "tui": {"evals"},
}


def module_of(file: Path) -> str:
    """The import name of a file of ours."""
    folder, *rest = file.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *rest])


def imported(file: Path) -> set[str]:
    """The packages besides the library that a file imports from."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {part for name in names for part in ALLOWED if f"{name}.".startswith(f"msgrpo.{part}.")}


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_they_may(package: str) -> None:
    for file in (ROOT / package).rglob("*.py"):
        if file not in (ROOT / "msgrpo_agent" / "cli.py", ROOT / "msgrpo_agent" / "__init__.py"):
            assert imported(file) <= ALLOWED[package] | {package}, file


def test_light_packages_load_no_heavy_library() -> None:
    program = (
        "import sys, msgrpo, msgrpo.cli, msgrpo.specs, msgrpo.episode\n"
        "import msgrpo.evals.stats, msgrpo.tui, msgrpo.serve\n"
        "msgrpo.get_scenario('snake'), msgrpo.Game, msgrpo.verify\n"
        "print(*{'torch', 'transformers', 'peft', 'vllm', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_librarys_names_are_there_and_no_others() -> None:
    import msgrpo

    assert all(getattr(msgrpo, name) is not None for name in msgrpo.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        msgrpo.nothing  # noqa: B018


def test_the_readme_names_every_folder() -> None:
    """The README's map goes down to folders; the files of a folder say themselves what they are."""
    readme = (ROOT / "README.md").read_text()
    for package in FOLDERS:
        assert f"{package}/" in readme, package


@pytest.mark.slow
def test_the_wheel_owns_one_name_and_lives_beside_others(tmp_path: Path) -> None:
    """Another package owns `evals` and `train` (OpenAI's does), and a user has a train.py: nothing is mixed."""
    source = tmp_path / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "results", "tests")
    )
    wheels, venv = tmp_path / "wheels", tmp_path / "venv"
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source))
    (ours,) = wheels.glob("msgrpo-*.whl")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(ours).namelist()}
    assert tops == {"msgrpo", f"msgrpo-{msgrpo_version()}.dist-info"}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    site = next((venv / "lib").glob("python*/site-packages"))
    (site / "zz_libraries.pth").write_text("".join(f"{path}\n" for path in libraries()))
    for name in ("evals", "train"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("OWNER = 'somebody else'\n")
    pip(sys.executable, "--python", python, "install", "--no-deps", str(ours))
    (tmp_path / "train.py").write_text("raise SystemExit('the user file was run')\n")

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "frozen-lake" in run(str(venv / "bin" / "msgrpo"), "games")
    assert run(python, "-c", "import evals; print(evals.OWNER)").strip() == "somebody else"
    settings = ("groups=1", "group_size=2", "select=aaw(keep=1)", "minibatches=1", "evaluation=1(film=0)")
    tiny = [part for setting in settings for part in ("--set", setting)]
    run(python, "-m", "msgrpo.cli", "train", "--steps", "1", "--out", "run", *tiny)
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    run(python, "-m", "msgrpo.cli", "eval", "adapter:run", "random", "--episodes", "1", "--out", "tables")
    assert (tmp_path / "tables" / "leaderboard.html").is_file()  # whose style and script come with the package


def pip(python: str, *arguments: str) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def libraries() -> list[str]:
    """Where the libraries lie that this environment has; an editable install of ours is not found that way."""
    return [str(Path(typer.__file__).parents[1])]


def msgrpo_version() -> str:
    import msgrpo

    return msgrpo.__version__


def test_only_a_missing_package_is_called_missing() -> None:
    with pytest.raises(MissingExtraError, match="needs packages"), needs("msgrpo train", "train"):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    with pytest.raises(ModuleNotFoundError, match="collect"), needs("msgrpo train", "train"):
        raise ModuleNotFoundError("No module named 'msgrpo.train.collect'", name="msgrpo.train.collect")
    with pytest.raises(MsgrpoError, match="huggingface_hub") as caught, needs("msgrpo train", "train"):
        raise ModuleNotFoundError("No module named 'huggingface_hub'", name="huggingface_hub")
    assert not isinstance(caught.value, MissingExtraError)
    with pytest.raises(MsgrpoError, match="libcudart") as caught, needs("msgrpo train", "train"):
        raise ImportError("libcudart.so.12: cannot open shared object file")
    assert not isinstance(caught.value, MissingExtraError)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checking count, too: two files that need each other's names are one subject or three."""
    files = {module_of(f): f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")}
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
    moved = {"msgrpo_agent/files.py", "evals/huggingface.py", "tui/browser.py"}
    for file in (f for package in FOLDERS for f in (ROOT / package).rglob("*.py")):
        calls = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call)
        }
        if file.relative_to(ROOT).as_posix() not in moved and "replacing_folder" not in calls:
            assert not calls & {"write_text", "write_bytes", "save_file"}, file


def test_every_benchmark_can_be_started() -> None:
    """A benchmark or notebook that nobody runs for a while must not be broken by a name that moved."""
    pytest.importorskip("torch")
    folders = [ROOT / "benchmarks", ROOT / "benchmarks" / "studies"]
    names = sorted(file.stem for folder in folders for file in folder.glob("*.py"))
    program = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_that_wait_leave_their_core_to_others(given: str | None) -> None:
    """They spun, and an update took minutes beside another busy program. What a person has set stays.

    It is said before torch is loaded, which reads it once: in Python, and in a process that others start.
    """
    program = (
        "import os, sys\n"
        "class Torch:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'torch':\n"
        "            sys.exit(os.environ.get('OMP_WAIT_POLICY', 'nothing'))\n"
        "sys.meta_path.insert(0, Torch)\n"
        "import "
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    for module in ("msgrpo.train.loop", "msgrpo.train.mini", "msgrpo.train.cluster", "msgrpo.models.local"):
        done = subprocess.run(
            [sys.executable, "-c", program + module], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr.split()) == (1, [given or "PASSIVE"]), module
