"""The command and environment that a request means, and the requests that are refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from msgrpo_agent.errors import MsgrpoError, UsageError
from msgrpo_agent.models.paths import NANO_DIR
from serve import terminal
from serve.adapters import Adapter, read_adapter
from serve.command import ENTRY, Launch, Request, build, child_environment, common_base, is_loopback
from tests.serve_fakes import write_adapter


def option(launch: Launch, name: str) -> str:
    """The value that counts: argparse takes the last."""
    last = len(launch.command) - 1 - launch.command[::-1].index(name)
    return launch.command[last + 1]


def adapter(name: str = "fl", rank: int = 8, base: str = "nano") -> Adapter:
    return Adapter(name, Path("/runs") / name, base, rank)


def test_nano_alone() -> None:
    launch = build(Request(), "cpu")
    assert launch.command[1:3] == ["-m", ENTRY]
    assert option(launch, "--model") == str(NANO_DIR)
    assert option(launch, "--host") == "127.0.0.1"
    assert option(launch, "--served-model-name") == "nano"
    assert "--enable-lora" not in launch.command
    assert "--middleware" not in launch.command
    assert launch.models == ["nano"]
    assert launch.url == "http://127.0.0.1:8000/v1"
    assert launch.environment["HF_HUB_OFFLINE"] == "1"
    assert launch.environment["VLLM_API_KEY"] == ""


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
    launch = build(Request(extra=("--hos", "0.0.0.0")), "cpu")  # argparse would take the abbreviation
    assert launch.command.index("--host") > launch.command.index("--hos")


@pytest.mark.parametrize("word", ["--host", "--host=0.0.0.0", "--api_key", "--lora-modules", "--uds", "--port=1"])
def test_options_that_msgrpo_sets_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="is set by msgrpo serve itself"):
        build(Request(extra=(word,)), "cpu")


def test_names_that_clash_are_refused() -> None:
    with pytest.raises(UsageError, match="two models would be named 'fl'"):
        build(Request(adapters=(adapter("fl"), adapter("fl"))), "cpu")
    with pytest.raises(UsageError, match="two models would be named 'nano'"):
        build(Request(adapters=(adapter("nano"),)), "cpu")
    assert build(Request(adapters=(adapter("nano"),), name="base"), "cpu").models == ["base", "nano"]
    with pytest.raises(UsageError, match="is no model name"):
        build(Request(name="a b"), "cpu")


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


def test_loopback_needs_no_key_but_keeps_a_given_one() -> None:
    assert terminal.with_key(Request(), None) == (Request(), False)
    assert terminal.with_key(Request(), "s3cret")[0].key == "s3cret"


def test_a_key_is_enforced_by_the_guard_and_is_in_no_command_line() -> None:
    launch = build(Request(key="s3cret"), "cpu")
    assert option(launch, "--middleware") == "serve.guard.Guard"
    assert launch.environment["VLLM_API_KEY"] == "s3cret"
    assert "s3cret" not in " ".join(launch.command)
    assert "s3cret" not in repr(launch.command)
    assert "s3cret" not in launch.shell()
    assert 'VLLM_API_KEY="$MSGRPO_API_KEY"' in launch.shell()


def test_runtime_loading_is_off_unless_asked_for(tmp_path: Path) -> None:
    assert build(Request(), "cpu").environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    launch = build(Request(runtime_adapters=tmp_path), "cpu")
    assert launch.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert launch.environment["MSGRPO_ADAPTER_ROOT"] == str(tmp_path)
    assert option(launch, "--middleware") == "serve.guard.Guard"
    assert "--enable-lora" in launch.command
    assert int(option(launch, "--max-loras")) > 1


def test_the_callers_environment_does_not_loosen_the_server() -> None:
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_API_KEY": "old", "HOME": "/h"}
    joined = child_environment(build(Request(), "cpu"), ours | {"PYTHONPATH": "/theirs"})
    assert joined["VLLM_SERVER_DEV_MODE"] == "0"
    assert joined["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    assert joined["VLLM_API_KEY"] == ""
    assert joined["HOME"] == "/h"
    assert joined["PYTHONPATH"].endswith(":/theirs")
    assert joined["PYTHONPATH"].split(":")[0] == str(Path(terminal.__file__).parents[1])


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
