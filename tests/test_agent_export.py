"""A trained run in files that other tools load: merged, as GGUF, and for a hub."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install 'msgrpo[train]'")
gguf = pytest.importorskip("gguf", reason="pip install 'msgrpo[gguf]'")

from huggingface_hub.utils import validate_repo_id  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Regex, Tokenizer, pre_tokenizers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402

from msgrpo.errors import ModelError, UsageError  # noqa: E402
from msgrpo.models import gguf_writer  # noqa: E402
from msgrpo.models.asked import Taught, taught_as, trained_as  # noqa: E402
from msgrpo.models.card import card, shown_setting  # noqa: E402
from msgrpo.models.export import WRITERS, export_run, hub_name  # noqa: E402
from msgrpo.models.loading import load_adapted  # noqa: E402
from msgrpo.models.lora import ADAPTER_WEIGHTS  # noqa: E402
from msgrpo.models.merged import Adapter, lost_in, merged  # noqa: E402
from msgrpo.models.paths import NANO_DIR, shipped_adapters  # noqa: E402
from msgrpo.models.shared_prefix import plain_logprobs  # noqa: E402
from msgrpo.prompt import PromptTemplate, as_given  # noqa: E402
from msgrpo.specs import make_agent  # noqa: E402
from tests.command_line import invoked, run_here  # noqa: E402

RUN = shipped_adapters()["frozen-lake"]
PROMPTS = [list(gguf_writer.probes())[i] for i in (0, 25, 90)]
ANSWER = 24


@pytest.fixture(scope="module")
def plain() -> tuple[Any, Any]:
    """The adapted model, as it plays here."""
    return load_adapted(RUN, device=torch.device("cpu"), dtype="float32")


def asked(tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def test_the_merged_folder_is_the_adapted_model(tmp_path: Path, plain: tuple[Any, Any]) -> None:
    model, tokenizer = plain
    notes = export_run(RUN, "merged", tmp_path / "merged")
    assert notes[0] == "rounding to float32 moved the weights by 0.0% of the adapter's change"
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(NANO_DIR)
    text = asked(tokenizer, PROMPTS[0])
    assert asked(theirs, PROMPTS[0]) == text
    ids = torch.tensor([tokenizer(text).input_ids])
    assert theirs(text).input_ids == ids[0].tolist()
    with torch.no_grad():
        wanted, found, without = (one(ids).logits for one in (model, other, base))
    assert torch.equal(wanted, found)
    assert (wanted - without).abs().max() > 1
    assert (tmp_path / "merged").stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "merged").iterdir()} == {0o644}
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_a_signal_that_ends_an_export_leaves_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does: ended by SIGTERM or a terminal that closed, a hidden folder with the weights was left."""
    monkeypatch.setitem(WRITERS, "hub", lambda order: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *given: None)  # where the command takes none, it ends no test
    try:
        assert run_here(monkeypatch, "export", str(RUN), "--to", "hub", "--out", str(tmp_path / "out")) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["merged", "gguf", "hub"])
def test_what_is_printed_can_be_pasted_and_names_what_is_there(to: str, tmp_path: Path) -> None:
    """A blank in the path stayed as it was, and with an apostrophe in it the command named a folder that was gone."""
    out = tmp_path / "it's mine"
    notes = export_run(RUN, to, out)
    commands = [shlex.split(note.partition(": ")[2]) for note in notes if re.match(r"(play|serve|upload) it: ", note)]
    named = [word.removeprefix("base:") for command in commands for word in command if str(tmp_path) in word]
    assert named
    assert all(Path(word).exists() and out in (Path(word), Path(word).parent) for word in named)
    assert ".part" not in "".join(notes)


def test_the_command_that_plays_an_export_allows_answers_as_long_as_in_training(tmp_path: Path) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    held = json.loads((tmp_path / "run" / "config.json").read_text()) | {"max_tokens": 1000}
    (tmp_path / "run" / "config.json").write_text(json.dumps(held))
    for to in ("merged", "gguf"):
        *_, said, command = export_run(tmp_path / "run", to, tmp_path / to)
        assert "up to 1000 tokens" in said
        assert command.endswith(" --max-tokens 1000")
    taught = taught_as(str(tmp_path / "merged"))  # so that what serves it can say so
    assert taught is not None
    assert taught.length == ["--max-tokens", "1000"]


def test_how_a_run_was_asked_is_said_where_it_was_not_as_usual(tmp_path: Path) -> None:
    """Weights alone do not hold it; what is exported is asked here as the run was: merged, as GGUF, or an adapter."""
    shutil.copytree(RUN, tmp_path / "run")
    held = json.loads((tmp_path / "run" / "config.json").read_text())
    held |= {"prompt": {"name": "few", "system": "You play."}, "chat": {"enable_thinking": False}}
    (tmp_path / "run" / "config.json").write_text(json.dumps(held))
    *_, said, command = export_run(tmp_path / "run", "hub", tmp_path / "out")
    assert "the prompt 'few' and the chat template's arguments {\"enable_thinking\": false}" in said
    assert command.startswith("upload it")
    few = Taught(
        prompt=PromptTemplate(name="few", system="You play."), chat={"enable_thinking": False}, max_tokens=48
    )
    for to in ("merged", "gguf"):
        played = shlex.split(export_run(tmp_path / "run", to, tmp_path / to)[-1])
    assert played[-4:-1:2] == ["--prompt", "--chat"]
    assert as_given(played[-3], played[-1]) == {"template": few.prompt, "chat": few.chat}
    (file,) = (tmp_path / "gguf").glob("run-float16.gguf")
    for base in (tmp_path / "merged", file):
        assert taught_as(str(base)) == few
    assert trained_as(tmp_path / "out") == few
    export_run(RUN, "merged", tmp_path / "brief")
    assert taught_as(str(tmp_path / "brief")) == Taught(prompt=PromptTemplate(), max_tokens=48)
    assert not any("trained with" in note for note in export_run(RUN, "hub", tmp_path / "usual"))


def test_a_teacher_is_named_of_what_is_exported_and_trained_further(tmp_path: Path) -> None:
    """A table said of the run that its score is no evidence of what returns reach, and of the merged run nothing."""
    for name, held in (("run", {"teacher": "model(of=adapter:/home/me/fl)"}), ("later", {})):
        shutil.copytree(RUN, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(held))
    for to in ("merged", "hub"):
        export_run(tmp_path / "run", to, tmp_path / to)
    config = json.loads((RUN / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": str(tmp_path / "merged")}
    (tmp_path / "later" / "adapter_config.json").write_text(json.dumps(config))
    shutil.copy(RUN / "adapter_config.json", tmp_path / "hub")
    agents = [
        f"{kind}:{tmp_path / name}" for kind, name in (("base", "merged"), ("adapter", "hub"), ("adapter", "later"))
    ]
    for agent in map(make_agent, agents):
        assert agent.settings()["teacher"] == "model(of=adapter:fl)"
    assert "teacher" not in make_agent(f"adapter:{RUN}").settings()


@pytest.mark.parametrize("to", ["merged", "gguf", "hub"])
def test_an_adapter_whose_weights_are_no_numbers_is_not_handed_on(to: str, tmp_path: Path) -> None:
    """The fault: eval refused it, and the three exports wrote it (nan% of the change was lost)."""
    shutil.copytree(RUN, tmp_path / "run")
    held = load_file(tmp_path / "run" / ADAPTER_WEIGHTS)
    next(iter(held.values()))[0, 0] = float("nan")
    save_file(held, tmp_path / "run" / ADAPTER_WEIGHTS)
    with pytest.raises(ModelError, match="holds no numbers"):
        export_run(tmp_path / "run", to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["merged", "gguf", "hub"])
def test_an_adapter_that_changes_nothing_is_told(to: str, tmp_path: Path) -> None:
    """It was said that rounding took 0.0% of its change."""
    shutil.copytree(RUN, tmp_path / "run")
    held = load_file(tmp_path / "run" / ADAPTER_WEIGHTS)
    unlearned = {name: weights * float("lora_B" not in name) for name, weights in held.items()}
    save_file(unlearned, tmp_path / "run" / ADAPTER_WEIGHTS)
    notes = export_run(tmp_path / "run", to, tmp_path / "out")
    assert any("the adapter changes nothing" in note for note in notes)
    assert not any("rounding" in note for note in notes)


def test_what_rounding_takes_is_measured() -> None:
    model, _, adapter = merged(RUN)
    change = sum(float((b @ a).square().sum()) for a, b in adapter.layers.values())
    assert adapter.squared_change() == pytest.approx(change, rel=1e-4)

    def lost(of: Adapter, dtype: torch.dtype) -> float:
        return lost_in(model, of, lambda weight: weight.to(dtype).float()) or 0.0

    assert lost(adapter, torch.float32) == 0.0
    assert 0.01 < lost(adapter, torch.bfloat16) < 0.1
    tiny = Adapter(adapter.base, {name: (a, b * 1e-4) for name, (a, b) in adapter.layers.items()})
    assert lost(tiny, torch.bfloat16) > 1  # of so small a change nothing would be left
    of_bfloat16 = lost_in(model, adapter, lambda weight: gguf_writer.as_stored(weight, "bfloat16"))
    assert of_bfloat16 == pytest.approx(lost(adapter, torch.bfloat16))


def test_a_gguf_file_says_what_its_rounding_takes(tmp_path: Path) -> None:
    """The merged folder said it, and the GGUF file, which stores a weight in eight bits, did not."""
    notes = export_run(RUN, "gguf", tmp_path / "out", "q8_0")
    said = r"rounding to q8_0 moved the weights by 1\d\.\d% of the adapter's change; --dtype float32 keeps it"
    assert re.fullmatch(said, notes[0])


SETTINGS: list[dict[str, Any]] = [
    {},
    {"use_rslora": True},
    {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.1.mlp.up_proj": 24}},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_an_adapters_matrices_are_the_change_that_peft_makes(settings: dict[str, Any], tmp_path: Path) -> None:
    adapted = lora(settings, tmp_path)
    adapter, before = Adapter.of(tmp_path), AutoModelForCausalLM.from_pretrained(NANO_DIR).state_dict()
    after = adapted.merge_and_unload().state_dict()
    for layer, (a, b) in adapter.layers.items():
        assert torch.allclose(b @ a, after[f"{layer}.weight"] - before[f"{layer}.weight"], atol=1e-5)
    assert len(adapter.layers) == sum("proj.weight" in name for name in before)


@pytest.mark.parametrize("kind", ["rslora", "ranks"])
def test_llama_cpp_adds_an_adapter_of_another_scale_to_its_base(
    kind: str, tmp_path: Path, plain: tuple[Any, Any]
) -> None:
    """The run's adapter, written in two other ways: its scale as rsLoRA's, or one layer's with twice the rank."""
    pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    shutil.copytree(RUN, tmp_path / "run")
    file, held = tmp_path / "run" / "adapter_config.json", load_file(RUN / ADAPTER_WEIGHTS)
    config = json.loads(file.read_text())
    if kind == "rslora":
        config |= {"use_rslora": True, "lora_alpha": config["lora_alpha"] / config["r"] ** 0.5}
    else:
        config["rank_pattern"] = {"q_proj": 2 * config["r"]}
        config["alpha_pattern"] = {"q_proj": 2 * config["lora_alpha"]}
        for name in [name for name in held if ".q_proj." in name]:
            held[name] = torch.cat([held[name], torch.zeros_like(held[name])], dim=int(".lora_B." in name))
    file.write_text(json.dumps(config))
    save_file(held, tmp_path / "run" / ADAPTER_WEIGHTS)
    base = AutoModelForCausalLM.from_pretrained(NANO_DIR)
    gguf_writer.write_gguf(base, plain[1], "nano", tmp_path / "base.gguf", "nano", "float32")
    gguf_writer.write_gguf_adapter(Adapter.of(tmp_path / "run"), base.config, tmp_path / "lora.gguf", "lora")
    assert furthest(Llama(tmp_path / "base.gguf", tmp_path / "lora.gguf"), *plain) < 1e-3


def test_a_dora_adapter_is_merged_and_not_taken_for_a_lora(tmp_path: Path) -> None:
    adapted = lora({"use_dora": True}, tmp_path / "run")
    export_run(tmp_path / "run", "merged", tmp_path / "merged", "float32")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, weight in adapted.merge_and_unload().state_dict().items():
        assert torch.allclose(weight, written[name], atol=1e-5)
    with pytest.raises(ModelError, match="more than a LoRA's two matrices"):
        export_run(tmp_path / "run", "gguf", tmp_path / "gguf")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pattern", [{"(([a-z_.0-9])+)+x": 4}, {"q_proj": 0}, ["x"], {"(": 3}])
@pytest.mark.parametrize("to", ["merged", "gguf", "hub"])
def test_a_pattern_from_an_adapters_file_is_not_run_over_its_layers(pattern: object, to: str, tmp_path: Path) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text()) | {"rank_pattern": pattern}
    (tmp_path / "run" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no plain LoRA"):
        export_run(tmp_path / "run", to, tmp_path / "out")


def lora(settings: dict[str, Any], folder: Path) -> Any:
    """nano with a LoRA of random weights, which is saved in the folder."""
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=48, target_modules="all-linear", init_lora_weights=False, **settings)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(NANO_DIR), config)
    adapted.save_pretrained(folder)
    return adapted


class Llama:
    """llama.cpp in this process, greedy: the ids and log-probabilities of an answer."""

    def __init__(self, file: Path, lora: Path | None = None) -> None:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_ctx, settings.n_gpu_layers, settings.warmup, settings.verbosity = 1024, 0, False, 0
        settings.cpuparams.n_threads = 1
        if lora is not None:
            settings.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(lora), 1.0)]
        self._server = xllamacpp.Server(settings)

    def answer(self, text: str) -> tuple[int, list[int], list[float]]:
        body = {"prompt": text, "n_predict": ANSWER, "temperature": 0, "n_probs": 1, "cache_prompt": False}
        found = self._server.handle_completions(body)
        tokens = found["choices"][0]["logprobs"]["content"]
        return (
            found["usage"]["prompt_tokens"],
            [token["id"] for token in tokens],
            [token["logprob"] for token in tokens],
        )


def furthest(llama: Llama, model: Any, tokenizer: Any) -> float:
    """The largest difference of a token's log-probability, llama.cpp's from the trainer's, over all answers."""
    worst = 0.0
    for prompt in PROMPTS:
        text = asked(tokenizer, prompt)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        length, answer, theirs = llama.answer(text)
        assert length == len(ids)
        ours = plain_logprobs(model, ids, answer, 1.0)
        worst = max(worst, float((ours - torch.tensor(theirs)).abs().max()))
    return worst


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("float16", 5e-3), ("q8_0", 0.1)])
def test_llama_cpp_gives_our_log_probabilities(
    dtype: str, bound: float, tmp_path: Path, plain: tuple[Any, Any]
) -> None:
    """Through its own tokenizer, from text; what is left is the rounding of the weights."""
    pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    export_run(RUN, "gguf", tmp_path / "out", dtype)
    gap = furthest(Llama(tmp_path / "out" / f"frozen-lake-{dtype}.gguf"), *plain)
    assert gap < bound
    assert gap > bound / 1000  # it is not the trainer that answered


def test_the_adapter_alone_on_its_base_is_the_same_model(tmp_path: Path, plain: tuple[Any, Any]) -> None:
    pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    model = AutoModelForCausalLM.from_pretrained(NANO_DIR)
    tokenizer = AutoTokenizer.from_pretrained(NANO_DIR)
    gguf_writer.write_gguf(model, tokenizer, "nano", tmp_path / "base.gguf", "nano", "float32")
    gguf_writer.write_gguf_adapter(Adapter.of(RUN), model.config, tmp_path / "lora.gguf", "lora")
    assert furthest(Llama(tmp_path / "base.gguf"), *plain) > 0.1
    assert furthest(Llama(tmp_path / "base.gguf", tmp_path / "lora.gguf"), *plain) < 1e-3


def test_a_llamas_heads_are_interleaved_and_come_back(tmp_path: Path) -> None:
    """transformers reads the file to the weights that were written; without the interleaving it would not."""
    config = LlamaConfig(
        vocab_size=768, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model, tokenizer = LlamaForCausalLM(config), AutoTokenizer.from_pretrained(NANO_DIR)
    file = tmp_path / "llama.gguf"
    notes = gguf_writer.write_gguf(model, tokenizer, "some/base", file, "llama", "float32")
    assert "rule qwen2" in notes[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    query = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    written = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.0.attn_q.weight").data
    assert not np.array_equal(query, written)


def test_the_head_of_a_base_that_was_a_gguf_file_is_kept_but_for_its_rule(
    tmp_path: Path, plain: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is the one by which the training split text, which may be another than the file's."""
    model, tokenizer = plain
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(gguf_writer, "splitting_rule", lambda tokenizer: ("smollm", []))
        gguf_writer.write_gguf(model, tokenizer, "nano", first, "first", "q8_0")
    notes = gguf_writer.write_gguf(model, tokenizer, str(first), second, "second", "float32")
    assert "first.gguf itself names the rule smollm" in notes[-1]
    heads = [{key: field.contents() for key, field in gguf.GGUFReader(one).fields.items()} for one in (first, second)]
    apart = {key for key in heads[0] | heads[1] if heads[0].get(key) != heads[1].get(key)}
    assert apart <= {
        "tokenizer.ggml.pre",
        "general.name",
        "general.file_type",
        "general.quantization_version",
        "GGUF.kv_count",
    }
    assert heads[1]["general.name"] == "second"
    assert [head["tokenizer.ggml.pre"] for head in heads] == ["smollm", "qwen2"]
    assert heads[1]["general.file_type"] == 0


def test_a_tokenizer_that_llama_cpp_cannot_be_told_is_refused() -> None:
    tokenizer = Tokenizer.from_file(str(NANO_DIR / "tokenizer.json"))
    assert gguf_writer.splitting_rule(tokenizer)[0] == "qwen2"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # letter by letter
        [pre_tokenizers.Split(Regex("."), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    with pytest.raises(ModelError, match=r"gives the same tokens for \d+ of 200 prompts"):
        gguf_writer.splitting_rule(tokenizer)


def test_an_architecture_that_is_not_written_is_named() -> None:
    class Config:
        model_type, num_hidden_layers = "mamba", 2

    with pytest.raises(ModelError, match="mamba is not written as GGUF here; known: qwen2, qwen3, llama"):
        gguf_writer.Layout.of(Config())


@pytest.mark.parametrize(
    "folder", ["my run", "äß", "--", "lake..(2)", "a" * 200, "x.-", "frozen-lake", "lake.git.git"]
)
def test_the_name_to_upload_by_is_one_that_a_hub_takes(folder: str) -> None:
    """It was the folder's: "YOUR-NAME/my run", which no hub takes."""
    validate_repo_id(f"YOUR-NAME/{hub_name(folder)}")


def test_the_card_has_the_runs_own_results_and_no_path(tmp_path: Path) -> None:
    notes = export_run(RUN, "hub", tmp_path / "hub")
    assert notes[-1] == f"upload it: hf upload YOUR-NAME/frozen-lake {tmp_path / 'hub'}"
    assert "its base is on no hub" in notes[1]
    text = (tmp_path / "hub" / "README.md").read_text()
    assert "| after 40 updates | 0.910 | [0.862, 0.942] |" in text
    assert "Change: +0.625 [+0.555, +0.695]" in text
    assert "| learning_rate | 0.001 |" in text
    assert "base_model" not in text
    assert "    You are playing a text game. Look at the state, think briefly" in text
    run = tmp_path / "run"
    run.mkdir()
    (run / "adapter_model.safetensors").write_bytes((RUN / "adapter_model.safetensors").read_bytes())
    config = json.loads((RUN / "adapter_config.json").read_text())
    for base, shown in (("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"), ("/home/me/secret/tiny.gguf", "tiny.gguf")):
        (run / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        settings = {"scenario": "/home/me/secret/cards.py:scenario | x", "explore": "branch()", "kl_coef": 0.2}
        (run / "config.json").write_text(json.dumps(settings))
        out = tmp_path / shown.replace("/", "-")
        export_run(run, "hub", out)
        text = (out / "README.md").read_text()
        assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == shown
        assert ("base_model: " in text) == (base == shown)
        assert "secret" not in text
        assert "has not ended" in text
        assert r"cards.py:scenario \| x" in text
        assert "| explore | branch() |\n| kl_coef | 0.2 |" in text  # the one was forgotten, the other is not today's


def test_the_card_says_how_the_run_was_asked(tmp_path: Path) -> None:
    """Asked in another way, a small model gives no legal action."""
    run, out = tmp_path / "run", tmp_path / "hub"
    shutil.copytree(RUN, run)
    example = {"state": "A hole is right of you.", "answer": "# Up\n<action>up</action>"}
    prompt = {"name": "mine", "instructions": "Act!\n{rules}\n# {actions}", "system": "Be brief.", "history": 3}
    settings = {"prompt": prompt | {"examples": [example]}, "chat": {"enable_thinking": False}}
    (run / "config.json").write_text(json.dumps(settings))
    assert any(note.endswith("README.md has it") for note in export_run(run, "hub", out))
    text = (out / "README.md").read_text()
    assert '| chat | {"enable_thinking": false} |' in text
    asked = text.partition("## How it was asked\n\n")[2]
    assert re.findall("^    (.*)$", asked, re.MULTILINE) == [
        *("Be brief.", "Act!", "{rules}", "# {actions}"),
        *("A hole is right of you.", "# Up", "<action>up</action>"),
    ]
    assert not re.search("^#", asked, re.MULTILINE)  # nothing of it is a heading of the card
    assert "the last 3 turns" in asked
    assert "the state comes last" in asked


def test_the_card_says_where_the_state_is_and_what_examples_are(tmp_path: Path) -> None:
    """The faults: a state in the middle was said to come last, and examples to begin with `State: `."""
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    prompt = {"instructions": "Now: {state}\nAct!", "history": 1, "examples": [{"state": "A", "answer": "B"}]}
    (run / "config.json").write_text(json.dumps({"prompt": prompt}))
    asked = card(run, "run", merged=False).partition("## How it was asked\n\n")[2]
    assert "the state comes last" not in asked
    assert "the state stands at {state}" in asked
    assert re.findall("^    (.*)$", asked, re.MULTILINE) == ["Now: {state}", "Act!", "A", "B"]
    assert "the last 1 turn." in asked


def test_the_card_says_what_is_cut(tmp_path: Path) -> None:
    """A reader took the beginning for the whole."""
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    (run / "config.json").write_text(json.dumps({"prompt": {"instructions": "x" * 12_345}, "loss": "y" * 2000}))
    text = card(run, "run", merged=False)
    assert f"    {'x' * 10_000}\n\nCut here: 10,000 of 12,345 characters.\n" in text
    assert f"| loss | {'y' * 1000}… |" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me/cards.py:scenario", "cards.py:scenario"),
        ("examples/cards/cards.py:scenario", "cards.py:scenario"),
        ("../../me/cards.py:scenario", "cards.py:scenario"),
        ("~/mine/cards.py:scenario", "cards.py:scenario"),
        ("adapter:runs/study/fl", "adapter:fl"),
        ("model(of=adapter:runs/study/fl, weight=0.3)", "model(of=adapter:fl, weight=0.3)"),
        ("snake@0.7,/home/me/cards.py:scenario@0.3", "snake@0.7,cards.py:scenario@0.3"),
        ("openenv:http://host:8000/a/b/c?steps=8", "openenv:http://host:8000/a/b/c?steps=8"),
        ("ta:TicTacToe-v0", "ta:TicTacToe-v0"),
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
    ],
)
def test_of_a_path_a_card_shows_its_last_part_and_nothing_else_is_cut(value: str, shown: str) -> None:
    assert shown_setting(value) == shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "gguf", "--dtype", "int3"], "--dtype 'int3' is no way to write --to gguf"),
        (["--to", "hub", "--dtype", "float32"], "no way to write --to hub"),
        (["--to", "inspect", "--dtype", "float32"], "--to inspect writes none"),
        (["--to", "merged", "elsewhere"], "takes one run, and 2 folders were given"),
        (["--to", "mergd"], "nothing is exported to 'mergd'"),
    ],
)
def test_wrong_options_are_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = invoked("export", str(RUN), *arguments, "--out", str(tmp_path / "out"))
    assert isinstance(done.exception, UsageError)
    assert message in done.exception.message
    assert not list(tmp_path.iterdir())


def test_an_unknown_tool_is_told_with_all_that_are_known(tmp_path: Path) -> None:
    for named, fix in (("onnx", "known: gguf, hub, huggingface, inspect, merged"), ("mergd", "did you mean merged?")):
        done = invoked("export", str(RUN), "--to", named, "--out", str(tmp_path / "out"))
        assert isinstance(done.exception, UsageError)
        assert done.exception.fix == fix


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="is no complete adapter"):
        export_run(tmp_path, "merged", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        export_run(RUN, "hub", tmp_path / "full")

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_writer, "write_gguf_adapter", full)
    with pytest.raises(ModelError, match="No space left"):
        export_run(RUN, "gguf", tmp_path / "new" / "folders" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
