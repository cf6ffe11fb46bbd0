"""`msgrpo nano build`: the embedded model, trained from nothing on text that this file generates.

nano is a Qwen2 language model of under a million parameters. It learns to read the project's prompts and to
answer in the project's format, from the play of a *bad* player on starts that no evaluation uses:

* its thought says what lies in the four directions and where to find something good: that is true;
* its action is the reference player's with some probability, a bad habit's with another (`PLAY`; on the lake:
  right, then down, over holes too; in Snake: towards the middle of the board), else random.

So the facts that good play needs are in its own words, and acting on them is what MS-GRPO has to teach it.
On the lake the habit outweighs the skill, so that greedy decoding alone does not make nano good.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from msgrpo_agent.game import Game, Outcome, Scenario, stream
from msgrpo_agent.games import SCENARIOS
from msgrpo_agent.games.frozen_lake import MOVE, FrozenLake
from msgrpo_agent.games.snake import DELTA, Cell, Snake, ahead
from msgrpo_agent.models.chat import ChatFormat
from msgrpo_agent.models.shared_prefix import answer_logprobs, common_prefix_length, share_prefixes
from msgrpo_agent.models.trunk import trunk_and_head
from msgrpo_agent.prompt import Prompt, PromptTemplate
from msgrpo_agent.references import best_actions

# Probabilities of the reference player's move and of the habit; the rest is random.
PLAY = {"frozen-lake": (0.35, 0.5), "snake": (0.5, 0.3)}
TOUR = (0.5, 0.2)  # the same, of the play that decides which positions it answers in
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Rows of each scenario per hundred. Snake needs more: its board is larger, and its rules differ.
MIX = {
    "frozen-lake": 26,
    "frozen-lake-slippery": 7,
    "frozen-lake-big-slippery": 7,
    "frozen-lake-4x4": 2,
    "frozen-lake-8x8": 4,
    "snake": 20,
    "snake-poison-apple": 12,
    "snake-poison-apple-and-banana": 10,
    "snake-solo": 6,
    "snake-duel": 6,
}


@dataclass(frozen=True)
class Row:
    """One training example: the prompt of a turn and the bad player's answer."""

    prompt: Prompt
    answer: str


def look(game: Game, player: str) -> str:
    """What nano says before it acts: the four neighbours, then where the goal or the nearest good item is."""
    if isinstance(game, FrozenLake):
        return _look_lake(game)
    assert isinstance(game, Snake)
    return _look_snake(game, player)


def _look_lake(game: FrozenLake) -> str:
    row, column = game.cell
    size = len(game.desc)
    words = []
    for action in game.actions:
        r, c = row + MOVE[action][0], column + MOVE[action][1]
        inside = 0 <= r < size and 0 <= c < size
        seen = {"H": "hole", "G": "goal"}.get(game.desc[r][c], "free") if inside else "edge"
        words.append(f"{action} {seen}")
    return f"{' '.join(words)}. goal{_towards((column, -row), (size - 1, 1 - size))}."


def _look_snake(game: Snake, player: str) -> str:
    body = game.bodies[player]
    taken = {cell for b in game.bodies.values() for cell in b}
    words = []
    for action in game.actions:
        cell = ahead(body[0], action)
        item = game.item_at(cell)
        seen = item.name if item else "body" if cell in taken else "free" if game.inside(cell) else "wall"
        words.append(f"{action} {seen}")
    good = [(c, kind.name) for kind in game.setting.items if kind.value > 0 for c in game.items[kind.name]]
    if not good:
        return f"{' '.join(words)}. nothing good."
    cell, name = min(good, key=lambda found: (_gap(body[0], found[0]), found[0]))
    return f"{' '.join(words)}. {name} ({cell[0]},{cell[1]}){_towards(body[0], cell)}."


def _gap(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _towards(source: Cell, target: Cell) -> str:
    dx, dy = target[0] - source[0], target[1] - source[1]
    horizontal = " right" if dx > 0 else " left" if dx < 0 else ""
    vertical = " up" if dy > 0 else " down" if dy < 0 else ""
    return horizontal + vertical


def habit(game: Game, player: str) -> list[str]:
    """The bad habit: on the lake right, then down, whatever lies there; in Snake towards the middle."""
    if isinstance(game, FrozenLake):
        return ["right"] if game.cell[1] < len(game.desc) - 1 else ["down"]
    assert isinstance(game, Snake)
    middle = (game.setting.size - 1) / 2

    def off_centre(action: str) -> tuple[float, float]:
        x, y = ahead(game.bodies[player][0], action)
        return max(abs(x - middle), abs(y - middle)), abs(x - middle) + abs(y - middle)

    best = min(map(off_centre, DELTA))
    return [action for action in DELTA if off_centre(action) == best]


def pick(game: Game, player: str, generator: np.random.Generator, skill: float, bad: float) -> str:
    """The reference player's move with probability `skill`, the habit's with `bad`, else any."""
    drawn = generator.random()
    choices = list(game.actions)
    if drawn < skill:
        choices = best_actions(game, player)
    elif drawn < skill + bad:
        choices = habit(game, player)
    return str(generator.choice(choices))


def rows_of(scenario: Scenario, count: int, seed: int, thought: bool = True) -> Iterator[Row]:
    """`count` turns on training starts: the bad player's answers in the positions that `TOUR` comes through.

    It must know positions that its own habits would never reach, or no better player could grow out of it.
    """
    template = PromptTemplate()
    generator = stream(seed, f"nano-{scenario.id}")
    made = 0
    for start in scenario.starts("train", first_seed=seed * 10_000_019):
        game = scenario.new(start, int(generator.integers(2**31)))
        while game.outcome is Outcome.PLAYING:
            for player in game.players:
                words = look(game, player) if thought else ""
                action = pick(game, player, generator, *PLAY[scenario.family])
                prompt = template.render(scenario, game.observe(player))
                yield Row(prompt, f"{words}<action>{action}</action>")
                made += 1
                if made == count:
                    return
            game.step({player: pick(game, player, generator, *TOUR) for player in game.players})


def build_tokenizer(rows: list[Row]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be read, and a word, a board cell or a position is one token."""
    raw = Tokenizer(models.BPE())
    pieces = Regex(r" ?\(\d+,\d+\)| ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]|\s")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    positions = " ".join(f"({x},{y})" for x in range(10) for y in range(10))
    texts = [row.prompt.prefix + row.prompt.state + " " + row.answer for row in rows]
    raw.train_from_iterator([*texts, *[" " + positions] * 50, "system user assistant\n"], trainer)
    raw.add_tokens([AddedToken(tag, normalized=False) for tag in ("<action>", "</action>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_as_qwen2(raw),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _as_qwen2(raw: Tokenizer) -> Tokenizer:
    """The same tokens under Qwen2's own pre-tokenizer.

    `AutoTokenizer` (so vLLM too) gives every qwen2 model Qwen2's pre-tokenizer, whatever the file says, and that
    one splits digits from all else. Positions and digits with their space therefore become added tokens, which
    are matched before it; each keeps its id.
    """
    state = json.loads(raw.to_str())
    vocabulary, merges = state["model"]["vocab"], state["model"]["merges"]
    pieces = {token: id for token, id in vocabulary.items() if re.fullmatch(r"Ġ\(\d,\d\)|Ġ\d", token)}
    state["model"]["merges"] = [pair for pair in merges if "".join(pair) not in pieces]
    for token, id in pieces.items():
        content = token.replace("Ġ", " ")
        vocabulary[content] = vocabulary.pop(token)
        state["added_tokens"].append(
            {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": False}
        )
    state["added_tokens"].sort(key=lambda token: token["id"])
    return Tokenizer.from_str(json.dumps(state))


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """The architecture class of Qwen2.5, in small."""
    config = Qwen2Config(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=320,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


@dataclass(frozen=True)
class _Encoded:
    """All rows of one scenario as token ids: the shared prefix, and what follows it in each row."""

    prefix: list[int]
    rows: list[tuple[list[int], list[int]]]  # (the rest of the prompt, the answer with its end token)


def _encode(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> _Encoded:
    prompts = ChatFormat(tokenizer).ids([row.prompt for row in rows])
    answers = tokenizer([row.answer + tokenizer.eos_token for row in rows], add_special_tokens=False)["input_ids"]
    shared = common_prefix_length(prompts)
    pairs = [(prompt[shared:], answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return _Encoded(prompts[0][:shared], pairs)


def answer_loss(model: Qwen2ForCausalLM, prefix: list[int], batch: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean cross-entropy over the answers' tokens; the prompt's tokens carry no loss."""
    trunk, head = trunk_and_head(model)
    logprobs, mask = answer_logprobs(trunk, head, prefix, batch, model.config.pad_token_id)
    return -logprobs.sum() / mask.sum()


def _optimizers(model: Qwen2ForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the embeddings and norms, as Muon is meant to be used."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _rate(step: int, steps: int, peak: float) -> float:
    """Warm-up over 50 steps, constant to the middle, then linear to 2 % of the peak."""
    return peak * min(1.0, (step + 1) / 50) * min(1.0, max(0.02, 2 * (1 - step / steps)))


def build(
    out: Path,
    *,
    seed: int = 0,
    steps: int = 2200,
    rows: int = 120_000,
    thought: bool = True,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> dict[str, Any]:
    """Generate the text, train tokenizer and model, write both to `out`; return what was done.

    Reproducible for a given seed, torch version and number of threads.
    """
    began = time.time()
    torch.manual_seed(seed)
    data = {s: list(rows_of(SCENARIOS[s], rows * share // 100, seed + 1, thought)) for s, share in MIX.items()}
    tokenizer = build_tokenizer(list(itertools.chain.from_iterable(d[:1500] for d in data.values())))
    encoded = {name: _encode(tokenizer, made) for name, made in data.items()}
    model = new_model(tokenizer)
    share_prefixes(model)
    peak, names, shares = 3e-3, list(MIX), np.array(list(MIX.values())) / sum(MIX.values())
    optimizers, generator = _optimizers(model, peak), stream(seed, "nano-batches")
    recent: list[float] = []
    for step in range(steps):
        for group in itertools.chain.from_iterable(o.param_groups for o in optimizers):
            group["lr"] = _rate(step, steps, peak)
        name = str(generator.choice(names, p=shares))
        source = encoded[name]
        size = 64 if SCENARIOS[name].family == "frozen-lake" else 40
        batch = [source.rows[i] for i in generator.integers(len(source.rows), size=size)]
        loss = answer_loss(model, source.prefix, batch)
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        recent = [*recent[-49:], float(loss.detach())]
        progress(step + 1, steps, sum(recent) / len(recent))
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(tokenizer),
        "seed": seed,
        "steps": steps,
        "rows": sum(map(len, data.values())),
        "loss": round(sum(recent) / len(recent), 4),
        "minutes": round((time.time() - began) / 60, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    (out / "build.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts
