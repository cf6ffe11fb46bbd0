"""Adapters on disk: what can be served, what is refused and why, and the list of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msgrpo.errors import LONGEST_REASON, ModelError
from msgrpo.models.headers import tensor_shapes
from msgrpo.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from msgrpo.models.paths import NANO_DIR
from msgrpo.serve import cli
from msgrpo.serve.adapters import Adapter, check_fits, list_runs, read_adapter, same_base, served_rank
from tests.serve_fakes import nano_lora_shapes, write_adapter, write_safetensors


def test_a_plain_lora_on_nano_is_served(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "fl", rank=8))
    assert adapter == Adapter("fl", tmp_path / "fl", "nano", 8)
    check_fits(adapter, NANO_DIR)


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (8, 8), (9, 16), (16, 16), (129, 256), (512, 512)])
def test_ranks_are_rounded_up_to_what_vllm_takes(rank: int, served: int) -> None:
    assert served_rank(rank) == served


def test_a_rank_beyond_the_largest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="up to rank 512, this one has 513"):
        read_adapter(write_adapter(tmp_path / "fl", rank=513))


def test_the_rank_is_the_largest_of_the_rank_pattern(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "fl", rank=8, rank_pattern={"q_proj": 20}))
    assert adapter.rank == 20


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"peft_type": "IA3"}, "its type is IA3"),
        ({"layer_replication": [[0, 2]]}, "layer replication"),
        ({"r": 0}, "no rank"),
        ({"lora_alpha": float("nan")}, "no rank"),
        ({"lora_alpha": "8"}, "no rank"),
    ],
)
def test_what_vllm_does_not_support_is_refused(tmp_path: Path, config: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_adapter(write_adapter(tmp_path / "fl", **config))


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_head_and_embedding_targets_are_refused(tmp_path: Path, module: str) -> None:
    name = f"base_model.model.{module}"
    shapes = {f"{name}.lora_A.weight": (8, 128), f"{name}.lora_B.weight": (768, 8)}
    with pytest.raises(ModelError, match=f"it changes {module}"):
        read_adapter(write_adapter(tmp_path / "fl", shapes=shapes))


def test_another_models_shape_is_refused(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = nano_lora_shapes() | {f"{name}.lora_A.weight": (8, 64), f"{name}.lora_B.weight": (64, 8)}
    adapter = read_adapter(write_adapter(tmp_path / "fl", shapes=shapes))
    with pytest.raises(ModelError, match=r"self_attn.q_proj is 128x128 there, the adapter's is 64x64"):
        check_fits(adapter, NANO_DIR)


def test_a_layer_that_the_base_lacks_is_refused(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.9.self_attn.q_proj"
    shapes = nano_lora_shapes() | {f"{name}.lora_A.weight": (8, 128), f"{name}.lora_B.weight": (128, 8)}
    adapter = read_adapter(write_adapter(tmp_path / "fl", shapes=shapes))
    with pytest.raises(ModelError, match=r"it has no layer model.layers.9.self_attn.q_proj"):
        check_fits(adapter, NANO_DIR)


def test_a_quantised_layer_of_the_base_is_not_compared(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{name}.lora_A.weight": (8, 128), f"{name}.lora_B.weight": (128, 8)}
    adapter = read_adapter(write_adapter(tmp_path / "fl", shapes=shapes))
    write_safetensors(tmp_path / "model.safetensors", {"model.layers.0.self_attn.q_proj.qweight": (16, 128)})
    check_fits(adapter, tmp_path)


@pytest.mark.parametrize("missing", [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
def test_an_incomplete_folder_is_refused(tmp_path: Path, missing: str) -> None:
    folder = write_adapter(tmp_path / "fl")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=f"{missing} is missing"):
        read_adapter(folder)


def test_no_folder_and_no_base_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no adapter folder"):
        read_adapter(tmp_path / "nothing")
    with pytest.raises(ModelError, match="does not name its base"):
        read_adapter(write_adapter(tmp_path / "fl", base_model_name_or_path=None))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "fl")
    (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match="another format than safetensors"):
        read_adapter(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_torn_weights_are_refused(tmp_path: Path, keep: int) -> None:
    folder = write_adapter(tmp_path / "fl")
    file = folder / ADAPTER_WEIGHTS
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match="no complete safetensors"):
        read_adapter(folder)


def test_a_header_that_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(ModelError, match="no complete safetensors"):
        tensor_shapes(file)


def test_half_a_pair_and_an_empty_adapter_are_refused(tmp_path: Path) -> None:
    shapes = nano_lora_shapes()
    half = dict(list(shapes.items())[:-1])
    with pytest.raises(ModelError, match="lacks a half"):
        read_adapter(write_adapter(tmp_path / "half", shapes=half))
    with pytest.raises(ModelError, match="it is empty"):
        read_adapter(write_adapter(tmp_path / "empty", shapes={}))


def test_a_rank_other_than_the_configs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has rank 16, the config 8"):
        read_adapter(write_adapter(tmp_path / "fl", rank=8, shapes=nano_lora_shapes(16)))


def test_bases_are_the_same_folder_or_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(NANO_DIR)
    assert same_base("nano", str(NANO_DIR))
    assert same_base("nano", str(tmp_path / "link"))
    assert same_base("Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-3B")
    assert not same_base("Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B")
    assert not same_base("nano", "Qwen/Qwen2.5-7B")


@pytest.mark.parametrize("text", ["[1]", "null", '"x"', "\xff", '{"base_model_name_or_path": 5}', "[" * 100_000])
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_adapter(tmp_path / "fl")
    (folder / ADAPTER_CONFIG).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError):
        read_adapter(folder)


@pytest.mark.parametrize(
    "line", ["[1]", "3", '{"kind": "eval"}', '{"kind": "eval", "score": "success", "success": "x"}']
)
def test_one_odd_run_does_not_hide_the_others(tmp_path: Path, line: str) -> None:
    write_adapter(tmp_path / "a", rank_pattern=[1])
    odd = write_adapter(tmp_path / "b")
    (odd / "metrics.jsonl").write_bytes(b"\xff\n" + line.encode() + b"\n")
    write_adapter(tmp_path / ".a.0a1b2c3d.part")  # an export that goes on, or was killed
    a, b = list_runs(tmp_path)
    assert a.problem is not None
    assert "rank_pattern" in a.problem
    assert (b.problem, b.result) == (None, None)


def test_damaged_runs_do_not_hide_the_others(tmp_path: Path) -> None:
    one_dimension = {"base_model.model.model.norm.lora_A.weight": (8, 128)}
    one_dimension |= {"base_model.model.model.norm.lora_B.weight": (128, 8)}
    write_adapter(tmp_path / "norm", shapes=one_dimension)
    deep = b"[" * 100_000
    (write_adapter(tmp_path / "deep") / ADAPTER_WEIGHTS).write_bytes(len(deep).to_bytes(8, "little") + deep)
    write_adapter(tmp_path / "long", base_model_name_or_path="x" * 1000)
    odd = write_adapter(tmp_path / "odd")
    for name in ("config.json", "metrics.jsonl"):
        (odd / name).write_bytes(deep)
    found = {run.name: run.problem for run in list_runs(tmp_path)}
    assert set(found) == {"norm", "deep", "long", "odd"}
    assert "is 128 there" in (found["norm"] or "")
    assert "no complete safetensors" in (found["deep"] or "")
    assert "was trained on xxx" in (found["long"] or "")  # the rest is cut off
    assert found["odd"] is None


def test_a_line_of_the_list_is_short_whatever_a_runs_files_say(tmp_path: Path) -> None:
    """A file's own words filled the terminal: a megabyte in the place of a scenario, a score, a pattern of ranks."""
    wordy, word = write_adapter(tmp_path / "wordy", rank_pattern=["x" * 10**6], peft_type="y" * 10**6), "z" * 10**6
    (wordy / "config.json").write_text(json.dumps({"scenario": word}))
    (wordy / "metrics.jsonl").write_text(json.dumps({"kind": "eval", "step": 1, "score": word, word: 0.5}) + "\n")
    (run,) = list_runs(tmp_path)
    assert (run.scenario or "").startswith("zzz")
    assert (run.result or "").startswith("zzz")
    assert "rank_pattern" in (run.problem or "")
    assert all(len(text or "") <= LONGEST_REASON for text in (run.scenario, run.result, run.problem))


def test_runs_are_found_at_any_depth(tmp_path: Path) -> None:
    write_adapter(tmp_path / "seeds" / "seed-0")
    assert [run.folder for run in list_runs(tmp_path)] == [str(tmp_path / "seeds" / "seed-0")]


def test_runs_are_listed_with_scenario_result_and_problem(tmp_path: Path) -> None:
    good, bad = write_adapter(tmp_path / "fl"), write_adapter(tmp_path / "snake", use_dora=True)
    (good / "config.json").write_text(json.dumps({"scenario": "frozen-lake"}))
    rows = [{"kind": "eval", "step": s, "score": "success", "success": v} for s, v in ((0, 0.2), (60, 0.8125))]
    (good / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "ev')
    (tmp_path / "no-adapter").mkdir()
    fl, snake = list_runs(tmp_path)
    assert (fl.name, fl.base, fl.scenario, fl.problem) == ("fl", "nano", "frozen-lake", None)
    assert fl.result == "success 0.2 → 0.812 after update 60"
    assert (snake.name, snake.scenario, snake.result) == ("snake", None, None)
    assert snake.problem is not None
    assert "DoRA" in snake.problem
    assert [run.folder for run in list_runs(bad)] == [str(bad)]


def test_the_list_in_a_pipe_breaks_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`msgrpo adapters | grep NAME` found nothing: the list had 80 columns there, other tables had more."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    run = Path("runs/snake-with-credit-to-go-of-gamma-0.9-seed-7")
    run.parent.mkdir()
    write_adapter(run)
    cli.adapters(Path("runs"))
    assert str(run) in capsys.readouterr().out
