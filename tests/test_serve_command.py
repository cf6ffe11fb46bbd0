"""The command and environment that a request means, and the requests that are refused."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from msgrpo import cli
from msgrpo.errors import ModelError, MsgrpoError, ServeError, UsageError
from msgrpo.install import install_command
from msgrpo.loopback import is_loopback
from msgrpo.models.paths import NANO_DIR
from msgrpo.output import print_table
from msgrpo.prompt import PromptTemplate, as_given, make_template
from msgrpo.serve import cli as cli_of_serve
from msgrpo.serve import preflight, terminal
from msgrpo.serve.adapters import Adapter, list_runs, read_adapter
from msgrpo.serve.vllm_command import (
    ENTRY,
    Engine,
    Launch,
    Request,
    build,
    child_environment,
    common_base,
)
from tests.serve_fakes import write_adapter

ENGINES: tuple[Engine, ...] = ("cpu", "cuda")


def option(launch: Launch, name: str) -> str:
    """The value that counts: argparse takes the last."""
    last = len(launch.command) - 1 - launch.command[::-1].index(name)
    return launch.command[last + 1]


def adapter(name: str = "fl", rank: int = 8, base: str = "nano") -> Adapter:
    return Adapter(name, Path("/runs") / name, base, rank)


def test_nano_alone() -> None:
    launch = build(Request(), "cpu")
    assert launch.command[1:4] == ["-P", "-m", ENTRY]
    assert option(launch, "--model") == str(NANO_DIR)
    assert option(launch, "--host") == "127.0.0.1"
    assert option(launch, "--served-model-name") == "nano"
    assert "--enable-lora" not in launch.command
    assert option(launch, "--middleware") == "msgrpo.serve.guard.Guard"  # without a key it checks the Host
    assert launch.models == ["nano"]
    assert launch.url == "http://127.0.0.1:8000/v1"
    assert launch.environment["HF_HUB_OFFLINE"] == "1"
    assert launch.environment["VLLM_API_KEY"] == ""


def test_on_a_cpu_the_cache_has_a_size_and_not_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself vLLM wants 92 % of it: a real base was served on no machine on which anything else ran."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    other = Request(base="HuggingFaceTB/SmolLM2-135M-Instruct")
    assert build(Request(), "cpu").environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert build(other, "cpu").environment["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert "VLLM_CPU_KVCACHE_SPACE" not in build(other, "cuda").environment
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "16")
    assert build(other, "cpu").environment["VLLM_CPU_KVCACHE_SPACE"] == "16"


def test_what_a_cpu_server_compiles_outlives_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its temporary files end with it, and torch's cache was among them."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("MSGRPO_CACHE", str(tmp_path))
    environment = build(Request(), "cpu").environment
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert environment["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] == "0"  # these lie among temporary files, always
    assert "TORCHINDUCTOR_CACHE_DIR" not in build(Request(), "cuda").environment
    (tmp_path / "file").touch()
    monkeypatch.setenv("MSGRPO_CACHE", str(tmp_path / "file" / "cache"))  # as a home that cannot be written
    assert "TORCHINDUCTOR_CACHE_DIR" not in build(Request(), "cpu").environment
    monkeypatch.setenv("MSGRPO_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")  # the child has it from its parent
    assert "TORCHINDUCTOR_CACHE_DIR" not in build(Request(), "cpu").environment


def test_adapters_are_served_under_their_names_with_room_for_all_in_one_batch() -> None:
    launch = build(Request(adapters=(adapter("fl", 8), adapter("snake", 17))), "cpu")
    start = launch.command.index("--lora-modules")
    assert [json.loads(text) for text in launch.command[start + 1 : start + 3]] == [
        {"name": "fl", "path": "/runs/fl", "base_model_name": "nano"},
        {"name": "snake", "path": "/runs/snake", "base_model_name": "nano"},
    ]
    assert option(launch, "--max-lora-rank") == "32"
    assert option(launch, "--max-loras") == "2"
    assert launch.models == ["nano", "fl", "snake"]


def test_the_cpu_build_gets_what_it_needs() -> None:
    launch = build(Request(base="Qwen/Qwen2.5-3B-Instruct"), "cpu")
    assert "--no-enable-chunked-prefill" in launch.command
    assert option(launch, "--dtype") == "float32"
    assert option(launch, "--block-size") == "32"
    assert "HF_HUB_OFFLINE" not in launch.environment


def test_the_cuda_build_keeps_its_own_defaults_but_nano_is_float32() -> None:
    launch = build(Request(base="Qwen/Qwen2.5-3B-Instruct"), "cuda")
    assert not {"--dtype", "--block-size", "--no-enable-chunked-prefill"} & set(launch.command)
    assert option(build(Request(), "cuda"), "--dtype") == "float32"


def test_sizes_and_vllms_own_options_are_passed_on_and_theirs_win() -> None:
    request = Request(
        max_model_len=512, tensor_parallel_size=2, data_parallel_size=4, extra=("--dtype", "bfloat16", "--seed=3")
    )
    launch = build(request, "cpu")
    assert option(launch, "--max-model-len") == "512"
    assert option(launch, "--tensor-parallel-size") == "2"
    assert option(launch, "--data-parallel-size") == "4"
    assert option(launch, "--dtype") == "bfloat16"
    assert "--seed=3" in launch.command


def test_what_safety_rests_on_comes_after_the_callers_options() -> None:
    launch = build(Request(extra=("--seed", "3")), "cpu")
    assert launch.command.index("--host") > launch.command.index("--seed")


def test_the_bases_own_sampling_defaults_do_not_change_what_clients_ask_for() -> None:
    for engine in ENGINES:
        assert option(build(Request(base="Qwen/Qwen2.5-3B-Instruct"), engine), "--generation-config") == "vllm"


@pytest.mark.parametrize(
    "word",
    [
        *("--host", "--host=0.0.0.0", "--api_key", "--lora-modules", "--uds", "--port=1", "--config", "--headless"),
        *("--hos", "--api-k", "--ud", "--root-pa=/a", "--lora_mod", "--c=x.yaml", "--ssl-ca-certs"),  # abbreviated
    ],
)
def test_options_that_msgrpo_sets_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="is set by msgrpo serve itself"):
        build(Request(extra=(word,)), "cpu")


def test_names_that_clash_are_refused() -> None:
    with pytest.raises(UsageError, match="two models would be named 'fl'"):
        build(Request(adapters=(adapter("fl"), adapter("fl"))), "cpu")
    with pytest.raises(UsageError, match="two models would be named 'nano'"):
        build(Request(adapters=(adapter("nano"),)), "cpu")
    assert build(Request(adapters=(adapter("nano"),), name="base"), "cpu").models == ["base", "nano"]
    for name in ("a b", "-x", "it's", ""):
        with pytest.raises(UsageError, match=r"is no model name\n.*: --adapter NAME=DIR"):
            build(Request(adapters=(adapter(name),)), "cpu")


def test_the_base_is_the_adapters_own_and_one_for_all() -> None:
    qwen = adapter("q", base="Qwen/Qwen2.5-3B-Instruct")
    assert common_base((), None) == "nano"
    assert common_base((qwen,), None) == "Qwen/Qwen2.5-3B-Instruct"
    assert common_base((adapter(),), str(NANO_DIR)) == str(NANO_DIR)
    with pytest.raises(UsageError, match=r"trained on Qwen/Qwen2.5-3B-Instruct, not on nano"):
        common_base((adapter(), qwen), None)
    with pytest.raises(UsageError, match="trained on nano, not on Qwen"):
        common_base((adapter(),), "Qwen/Qwen2.5-3B-Instruct")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_hosts_that_only_this_machine_reaches(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_hosts_that_others_reach(host: str) -> None:
    assert not is_loopback(host)


def test_an_open_host_has_a_key_always() -> None:
    with pytest.raises(UsageError, match="it needs a key"):
        build(Request(host="0.0.0.0"), "cpu")
    open_host = Request(host="0.0.0.0")
    generated, made = terminal.with_key(open_host, None)
    again, _ = terminal.with_key(open_host, "")
    assert made
    assert generated.key is not None
    assert len(generated.key) >= 32
    assert again.key != generated.key
    given, made = terminal.with_key(open_host, "s3cret")
    assert (given.key, made) == ("s3cret", False)
    with pytest.raises(UsageError, match="characters"):
        terminal.with_key(open_host, "two words")
    for key in ("a\n", "ключ"):
        with pytest.raises(UsageError, match="characters"):
            terminal.status("127.0.0.1", 9, key)


def test_loopback_needs_no_key_but_keeps_a_given_one() -> None:
    assert terminal.with_key(Request(), None) == (Request(), False)
    assert terminal.with_key(Request(), "s3cret")[0].key == "s3cret"


def test_a_key_is_enforced_by_the_guard_and_is_in_no_command_line() -> None:
    launch = build(Request(key="s3cret"), "cpu")
    assert option(launch, "--middleware") == "msgrpo.serve.guard.Guard"
    assert launch.environment["VLLM_API_KEY"] == "s3cret"
    assert "s3cret" not in " ".join(launch.command)
    assert "s3cret" not in repr(launch.command)
    assert "s3cret" not in launch.shell()
    assert 'VLLM_API_KEY="${MSGRPO_API_KEY:?}"' in launch.shell()  # a shell without the key does not start it


def test_runtime_loading_is_off_unless_asked_for(tmp_path: Path) -> None:
    assert build(Request(), "cpu").environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    launch = build(Request(runtime_adapters=tmp_path), "cpu")
    assert launch.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert launch.environment["MSGRPO_ADAPTER_ROOT"] == str(tmp_path)
    assert option(launch, "--middleware") == "msgrpo.serve.guard.Guard"
    assert "--enable-lora" in launch.command
    assert int(option(launch, "--max-loras")) > 1


def test_the_callers_environment_does_not_loosen_the_server() -> None:
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_API_KEY": "old", "HOME": "/h"}
    joined = child_environment(build(Request(), "cpu"), ours | {"PYTHONPATH": "/theirs"})
    assert joined["VLLM_SERVER_DEV_MODE"] == "0"
    assert joined["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    assert joined["VLLM_API_KEY"] == ""
    assert joined["HOME"] == "/h"
    assert joined["PYTHONPATH"] == "/theirs"


def test_the_dry_run_prints_a_line_that_a_shell_takes_and_starts_nothing(tmp_path: Path) -> None:
    found = read_adapter(write_adapter(tmp_path / "my run"), "fl")
    words = shlex.split(terminal.dry_run(Request(adapters=(found,)), None))
    assert words[0] == "env"
    assert ENTRY in words
    assert json.loads(words[words.index("--lora-modules") + 1])["path"] == str(tmp_path / "my run")


def test_an_adapter_may_be_named_on_the_command_line(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a=b")
    assert terminal.parse_adapter(str(folder)).name == "a=b"
    assert terminal.parse_adapter(f"fl={folder}").name == "fl"
    with pytest.raises(MsgrpoError, match="there is no adapter folder"):
        terminal.parse_adapter(f"fl={tmp_path / 'nothing'}")


def test_serving_imports_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, msgrpo.serve.terminal, msgrpo.serve.guard, msgrpo.serve.supervisor, msgrpo.cli;"
        "print([name for name in ('torch', 'transformers', 'peft', 'vllm') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("without_vllm")
def test_without_vllm_the_message_has_the_commands_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_GPU_DEVICES", (tmp_path / "none",))
    with pytest.raises(ServeError, match="vLLM is not installed") as caught:
        terminal.prepare(Request(), Console())
    assert caught.value.fix is not None
    steps = [line.split("#")[0].strip() for line in caught.value.fix.splitlines()[1:]]
    assert steps == [
        "install torch 2.13.0 as a CPU build (https://pytorch.org/get-started/locally/ has the command)",
        install_command("serve-cpu"),
        "pip uninstall -y torchvision torchaudio torchcodec",
    ]
    monkeypatch.setattr(preflight, "_GPU_DEVICES", (tmp_path,))  # it exists: a GPU
    with pytest.raises(ServeError) as caught:
        preflight.installed_engine()
    assert caught.value.fix == install_command("serve")
    monkeypatch.setattr(preflight.sys, "platform", "darwin")
    with pytest.raises(ServeError, match="vLLM needs Linux"):
        preflight.installed_engine()


@pytest.mark.usefixtures("without_vllm")
def test_a_dry_run_needs_no_vllm() -> None:
    assert ENTRY in terminal.dry_run(Request(), None)


def fake_package(folder: Path, name: str, version: str, init: str = "") -> None:
    (folder / name.partition("-")[0]).mkdir()
    (folder / name.partition("-")[0] / "__init__.py").write_text(init)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_vllm_of_another_time_or_another_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.sys, "path", [str(tmp_path)])
    monkeypatch.setattr(preflight, "_GPU_DEVICES", (tmp_path / "none",))
    fake_package(tmp_path, "vllm", "0.9.0")
    with pytest.raises(ServeError, match=r"vLLM 0\.9\.0 has no .*needs 0\.32"):
        preflight.installed_engine()
    entry = tmp_path.joinpath(*ENTRY.split(".")).with_suffix(".py")
    entry.parent.mkdir(parents=True)
    entry.touch()
    with pytest.raises(ServeError, match="is the build for GPUs, and this machine has none"):
        preflight.installed_engine()


def test_a_torchvision_that_breaks_the_import_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    fake_package(tmp_path, "torchvision", "0.28.0", broken)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ServeError, match="torchvision::nms does not exist") as caught:
        preflight.check_torchvision()
    assert caught.value.fix == "pip uninstall -y torchvision torchaudio torchcodec"
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    preflight.check_torchvision()


def test_a_base_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    for base in ("./nothing", "nothing", "a/b/c"):
        with pytest.raises(ModelError, match="is no folder and no hub name"):
            preflight.local_weights(base, download=True)
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        preflight.local_weights(str(tmp_path), download=True)
    assert preflight.local_weights("nano", download=True) == NANO_DIR


def msgrpo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[object, str, str]:
    """(exit code, output, errors) of the command line."""
    monkeypatch.setattr(sys, "argv", ["msgrpo", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/fl"], "--adapter runs/fl"),
        (["my runs/fl"], "--adapter 'my runs/fl'"),
        (["--adapter", "nowhere"], "there is no adapter folder nowhere"),
        (["--allow-runtime-adapters", "nowhere"], "there is no folder nowhere"),
        (["--dry-run", "--", "--api-key", "x"], "--api-key is set by msgrpo serve itself"),
        (["--base", "nowhere", "--dry-run"], "is no folder and no hub name"),
        (["--adapter", "x" * 5000], "there is no adapter folder"),
        (["--base", "x" * 5000, "--dry-run"], "is no folder and no hub name"),
        (["--adapter", "~nobody-of-this-name/x"], "nobody has this home"),  # ~runs/x for ~/runs/x
        (["--base", "~nobody-of-this-name/x.gguf", "--dry-run"], "nobody has this home"),
        (["--status", "--port", "9"], "nothing answers at 127.0.0.1:9"),
    ],
)
def test_each_refusal_is_one_message_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    code, _, errors = msgrpo(monkeypatch, capsys, "serve", *words)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


def test_the_command_line_passes_everything_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_adapter(tmp_path / "fl")
    monkeypatch.setenv("MSGRPO_API_KEY", "s3cret")
    words = [
        "--adapter",
        str(folder),
        "--host",
        "0.0.0.0",
        "--port",
        "8123",
        "--max-model-len",
        "512",
        "--name",
        "base",
    ]
    code, output, _ = msgrpo(monkeypatch, capsys, "serve", *words, "--dry-run", "--", "--seed", "3")
    assert code == 0
    asked = shlex.split(output)
    for pair in (("--host", "0.0.0.0"), ("--port", "8123"), ("--max-model-len", "512"), ("--seed", "3")):
        assert asked[asked.index(pair[0]) + 1] == pair[1]
    assert "s3cret" not in output


def announced(request: Request) -> list[list[str]]:
    """The commands to try, as a shell takes them."""
    screen = io.StringIO()
    launch, asked = build(request, "cpu"), terminal.learned_as(request)
    terminal._announce(launch, asked, Path("log"), Console(file=screen, width=40), show_key=False)
    return [shlex.split(line) for line in screen.getvalue().splitlines() if line.startswith("  msgrpo")]


def test_the_commands_to_try_ask_the_model_as_it_was_trained(tmp_path: Path) -> None:
    """Who copied them saw a score near nothing where the adapter or the base had learned with another prompt."""
    url = "http://127.0.0.1:8000/v1"
    usual = [
        ["msgrpo", "eval", "--endpoint", url, "--model", "nano"],
        ["msgrpo", "play", "frozen-lake", "--agent", f"endpoint:{url}#nano"],
    ]
    assert announced(Request()) == usual
    template, chat = PromptTemplate(name="mine", system="It's a game.\nWin.", history=2), {"enable_thinking": False}
    run, elsewhere = write_adapter(tmp_path / "fl"), write_adapter(tmp_path / "elsewhere")
    (run / "config.json").write_text(json.dumps({"prompt": template.model_dump(), "chat": chat, "steps": 3}))
    taught = tmp_path / "taught"
    taught.mkdir()
    (taught / "taught.json").write_text(json.dumps({"prompt": make_template("none").model_dump(), "steps": 2}))
    adapters = (read_adapter(elsewhere), read_adapter(run))
    for *_, prompt_option, prompt, chat_option, arguments in announced(Request(adapters=adapters)):
        assert (prompt_option, chat_option) == ("--prompt", "--chat")
        assert as_given(prompt, arguments) == {"template": template, "chat": chat}
    for command in announced(Request(base=str(taught))):
        assert command[-2:] == ["--prompt", "none"]
    assert not any("--prompt" in command for command in announced(Request(adapters=adapters[:1])))


def test_the_commands_to_try_allow_answers_as_long_as_in_training(tmp_path: Path) -> None:
    """What eval and play allow by themselves cut them off."""
    run = write_adapter(tmp_path / "fl")
    for most, option in ((1000, ["--max-tokens", "1000"]), (48, [])):
        held = {"prompt": PromptTemplate().model_dump(), "max_tokens": most}
        (run / "config.json").write_text(json.dumps(held))
        for command in announced(Request(adapters=(read_adapter(run),))):
            assert [word for word in command if "max-tokens" in word or word == str(most)] == option


def test_an_adapter_of_which_nobody_knows_how_to_ask_it_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_adapter(tmp_path / "fl")
    (folder / "config.json").write_text("{")
    code, _, errors = msgrpo(monkeypatch, capsys, "serve", "--adapter", str(folder))
    assert code == 2
    assert "nobody knows how the adapter was asked in training" in errors
    assert "remove the file to have the model asked as usual" in errors


def test_adapters_are_listed_for_people_and_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(tmp_path / "fl")
    code, output, _ = msgrpo(monkeypatch, capsys, "adapters", str(tmp_path), "--json")
    assert code == 0
    assert [run["name"] for run in json.loads(output)] == ["fl"]
    assert "nano" in msgrpo(monkeypatch, capsys, "adapters", str(tmp_path))[1]
    assert "no adapters in" in msgrpo(monkeypatch, capsys, "adapters", str(tmp_path / "none"))[1]


@pytest.mark.parametrize("base", ["{there}/base.gguf", "{there}/base", "./base", "taught"])
def test_an_adapter_whose_base_has_moved_is_named_with_it(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shared adapter names its base's folder without the path, `taught`: that was said of a base "taught" alone."""
    gone = base.format(there=tmp_path)
    folder = write_adapter(tmp_path / "fl", base_model_name_or_path=gone)
    said = f"the adapter {folder} was trained on {gone}, which is not there"
    code, _, errors = msgrpo(monkeypatch, capsys, "serve", "--adapter", str(folder), "--dry-run")
    assert (code, errors.splitlines()[0]) == (2, f"error: {said}")
    assert [run.problem for run in list_runs(tmp_path)] == [said]


def test_a_gguf_file_is_served_under_its_own_name_and_not_its_path() -> None:
    """The path was the model's name: clients read it, and one with a blank could not be served."""
    request = Request(base="/my models/smol.gguf", adapters=(adapter(base="/my models/smol.gguf"),))
    assert build(request, "cpu", "/cache/smol").models == ["smol.gguf", "fl"]


def test_a_listed_adapter_breaks_after_its_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Qwen2.5-3B-Instruct` went on in mid-word, at 60 columns."""
    write_adapter(tmp_path / "fl", base_model_name_or_path="Qwen/Qwen2.5-3B-Instruct-of-a-long-name")
    monkeypatch.chdir(tmp_path)
    written = io.StringIO()
    narrow = Console(file=written, width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(cli_of_serve, "print_table", partial(print_table, console=narrow))
    cli_of_serve.adapters(Path())
    shown = written.getvalue()
    assert [piece for piece in ("Qwen/", "Qwen2.5-", "Instruct-", "of-a-") if piece not in shown] == []
