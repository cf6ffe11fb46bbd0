"""`msgrpo nano build`: the embedded model, trained from scratch on text that this file generates.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from msgrpo.errors import UsageError
from msgrpo.evals.suites import SUITE_VERSION
from msgrpo.files import replace_json
from msgrpo.game import Game, Outcome, Scenario, stream
from msgrpo.games import SCENARIOS
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.games.snake import DELTA, Snake, ahead
from msgrpo.models.headers import save_base
from msgrpo.models.shared_prefix import answer_logprobs, common_prefix_length, share_prefixes, trunk_and_head
from msgrpo.prompt import ChatFormat, Prompt, PromptTemplate
from msgrpo.references import best_actions
from msgrpo.train.nano import begun
from msgrpo.train.nano.words import Sight, look

# Probabilities of the reference player's move and of the habit; the rest is random.
PLAY = {"frozen-lake": (0.35, 0.5), "snake": (0.5, 0.3)}
TOUR = (0.5, 0.2)  # the same, of the play that decides which positions it answers in
FURTHER = 0.2  # of its thoughts look ahead
STEPS, QUICK = 6000, 3000  # of the shipped model, and of one that is ready in half the time
BLOCK = 300  # steps
BEGUN = "build.pt"
PEAK = 3e-3  # learning rate
EQUAL = 0.1  # standard deviation of the projections that begin as detectors of equal tokens
BESIDE = 0.7  # of the cells of a lesson lie beside something
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


Progress = Callable[[int, int, float], None]  # step, steps, loss
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One training example: the prompt of a turn, the bad player's answer, and whether its action is a best one."""

    prompt: Prompt
    answer: str
    best: bool | None = None  # None where nobody has looked


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


def pick(
    scenario: Scenario, game: Game, player: str, generator: np.random.Generator, skill: float, bad: float
) -> str:
    """The reference player's move with probability `skill`, the habit's with `bad`, else any."""
    drawn = generator.random()
    choices = list(game.actions)
    if drawn < skill:
        choices = list(best_actions(scenario, game, player))
    elif drawn < skill + bad:
        choices = habit(game, player)
    return str(generator.choice(choices))


def rows_of(scenario: Scenario, seed: int, *, further: float, cells: int = 0) -> Iterator[Row]:
    """Turns on training starts, without end: the bad player's answers in the positions that `TOUR` comes through.

    It must know positions that its own habits would never reach, or no better player could grow out of it.
    A thought looks ahead with probability `further`. With `cells` the answer is a lesson: before its own thought the
    same is said of that many other cells, so that one reading of the board teaches several times.
    """
    template = PromptTemplate()
    generator = stream(seed, f"nano-{scenario.id}")
    for start in scenario.starts("train", first_seed=seed * 10_007):
        game = scenario.new(start, int(generator.integers(2**31)))
        while game.outcome is Outcome.PLAYING:
            for player in game.players:
                thoughts = [look(game, player, further=bool(generator.random() < further))]
                thoughts += lessons(game, player, generator, cells, further)
                action = pick(scenario, game, player, generator, *PLAY[scenario.family])
                prompt = template.render(scenario, game.observe(player))
                yield Row(prompt, f"{' '.join(reversed(thoughts))}<action>{action}</action>")
            game.step({player: pick(scenario, game, player, generator, *TOUR) for player in game.players})


def lessons(game: Game, player: str, generator: np.random.Generator, cells: int, further: float) -> Iterator[str]:
    """What would be said from `cells` other cells of the board where one can stand, most of them beside something."""
    sight = Sight(game, player)
    width = range(sight.width)
    free = [(x, y) for x in width for y in width if sight.seen((x, y)) == "free"]
    beside = [cell for cell in free if any(ahead(cell, action) in sight.things for action in DELTA)] or free
    for _ in range(cells):
        cells_here = beside if generator.random() < BESIDE else free
        cell = cells_here[int(generator.integers(len(cells_here)))]
        yield look(game, player, further=bool(generator.random() < further), at=cell)


def lists_only(rows: Iterator[Row]) -> Iterator[Row]:
    """The same rows without the rules and without the drawn board: what is left are the lists of positions."""
    for row in rows:
        yield Row(Prompt("", re.split(r"\n\d [^\n]* ", row.prompt.state)[0]), row.answer)


def shuffled(rows: Iterator[T], generator: np.random.Generator) -> Iterator[T]:
    """The same rows in another order, so that a batch is not a few episodes; 64 of them wait at a time."""
    waiting = list(itertools.islice(rows, 64))
    for row in rows:
        i = int(generator.integers(64))
        yield waiting[i]
        waiting[i] = row


@dataclass(frozen=True)
class Stage:
    """A part of the training: until `until` of all steps, `batch` rows a step. `cells`: lessons; `lists`: no
    board.
    """

    until: float
    batch: int
    further: float
    cells: int = 0
    lists: bool = False


# Finding a position in a list is learned slowly and early, so it is learned on short texts in many small steps.
STAGES = (
    Stage(until=0.45, batch=6, further=0.0, cells=8, lists=True),
    Stage(until=0.85, batch=8, further=0.5, cells=8),
    Stage(until=1.0, batch=32, further=FURTHER),
)


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
    for layer in model.model.layers:
        attention = layer.self_attn
        with torch.no_grad():  # one head of each layer begins by looking for tokens that are equal
            attention.q_proj.weight[:32] = attention.k_proj.weight[:32] = EQUAL * torch.randn(32, config.hidden_size)
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


class Source:
    """Batches of one scenario as token ids: the shared prefix, and what follows it in each row."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, rows: Iterator[Row], chat: Mapping[str, Any] | None = None
    ) -> None:
        self._chat, self._end, self._rows = ChatFormat(tokenizer, chat), tokenizer.eos_token, rows

    def batch(self, size: int) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
        """The prefix, and (the rest of the prompt, the answer with its end token) for each row."""
        rows = list(itertools.islice(self._rows, size))
        prompts = self._chat.ids([row.prompt for row in rows])
        answers = self._chat.tokenizer([row.answer + self._end for row in rows], add_special_tokens=False)[
            "input_ids"
        ]
        shared = common_prefix_length(prompts)
        return prompts[0][:shared], [
            (prompt[shared:], answer) for prompt, answer in zip(prompts, answers, strict=True)
        ]


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
    """Warm-up over 50 steps, constant for six tenths of all, then linear to 2 % of the peak."""
    return peak * min(1.0, (step + 1) / 50) * min(1.0, max(0.02, 2.5 * (1 - step / steps)))


class Build:
    """nano in the making, in blocks of at most `BLOCK` steps; each block has rows of its own, and no row is seen
    twice.

    First it learns to find positions in lists, then to read whole prompts, both by lessons that speak of several
    cells and look ahead often; at last to answer as it shall: from its own cell, with a look ahead in `FURTHER` of
    the thoughts.
    """

    def __init__(self, seed: int, steps: int, scenarios: Sequence[str] = ()) -> None:
        torch.manual_seed(seed)
        self.seed, self.steps = seed, steps
        self.mix = {name: share for name, share in MIX.items() if name in scenarios or not scenarios}
        self.step, self.rows, self.seconds = 0, 0, 0.0
        self.recent: list[float] = []  # losses
        samples = [itertools.islice(rows_of(SCENARIOS[name], seed, further=0.5), 1000) for name in self.mix]
        self.tokenizer = build_tokenizer(list(itertools.chain.from_iterable(samples)))
        self.model = new_model(self.tokenizer)
        share_prefixes(self.model)
        self.optimizers = _optimizers(self.model, PEAK)

    def block(self, progress: Progress) -> None:
        """Train until the next block begins, or the next stage, or the end."""
        began, first = time.perf_counter(), self.step
        stage = next(stage for stage in STAGES if first < stage.until * self.steps)
        generator = stream(self.seed, f"nano-block-{first}")
        sources = {name: self._source(name, stage, generator) for name in self.mix}
        names, shares = list(self.mix), np.array(list(self.mix.values())) / sum(self.mix.values())
        while self.step < min(first + BLOCK, stage.until * self.steps):
            prefix, batch = sources[str(generator.choice(names, p=shares))].batch(stage.batch)
            self.recent = [*self.recent[-49:], self._learn(prefix, batch)]
            self.step, self.rows = self.step + 1, self.rows + len(batch)
            progress(self.step, self.steps, sum(self.recent) / len(self.recent))
        self.seconds += time.perf_counter() - began

    def _source(self, name: str, stage: Stage, generator: np.random.Generator) -> Source:
        rows = rows_of(SCENARIOS[name], self.seed * 100_000 + self.step, further=stage.further, cells=stage.cells)
        return Source(self.tokenizer, shuffled(lists_only(rows) if stage.lists else rows, generator))

    def _learn(self, prefix: list[int], batch: list[tuple[list[int], list[int]]]) -> float:
        for group in itertools.chain.from_iterable(o.param_groups for o in self.optimizers):
            group["lr"] = _rate(self.step, self.steps, PEAK)
        loss = answer_loss(self.model, prefix, batch)
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        begun.check_finite(self.step, float(loss.detach()), float(norm))
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.detach())

    @property
    def planned(self) -> str:
        """What must be the same for a build to go on, as options of the command."""
        chosen = self.mix if list(self.mix) != list(MIX) else ()
        return " ".join((f"--seed {self.seed} --steps {self.steps}", *(f"--scenario {name}" for name in chosen)))

    def facts(self) -> dict[str, Any]:
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "vocabulary": len(self.tokenizer),
            "scenarios": list(self.mix),
            "seed": self.seed,
            "steps": self.steps,
            "rows": self.rows,
            "loss": round(sum(self.recent) / len(self.recent), 4),
            "minutes": round(self.seconds / 60, 1),
            "suite_version": SUITE_VERSION,  # whose training starts its text is made of
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }

    def save(self, file: Path) -> None:
        """All that the next block needs, whole or not at all."""
        saved = {"planned": self.planned, "step": self.step, "rows": self.rows, "recent": self.recent}
        saved |= {"seconds": self.seconds, "model": self.model.state_dict()}
        begun.save(file, saved | {"optimizers": [o.state_dict() for o in self.optimizers]})

    def restore(self, file: Path) -> None:
        """Raises UsageError if another build was begun there."""
        with begun.taking_over(file, self.planned) as saved:
            self.step, self.rows, self.recent, self.seconds = (
                saved[k] for k in ("step", "rows", "recent", "seconds")
            )
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)


def build(
    out: Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    scenarios: Sequence[str] = (),
    progress: Progress = lambda step, steps, loss: None,
) -> dict[str, Any]:
    """Generate the text, train tokenizer and model, write both to `out`; return what was done.

    It reads of `scenarios` alone, or of all in `MIX`. A build that was cut off goes on with its last finished block.
    Reproducible for a given seed, torch version and number of threads. Raises UsageError if `out` holds something
    else, and for a scenario that has no rows here.
    """
    if unknown := sorted(set(scenarios) - set(MIX)):
        raise UsageError(f"nano has no text about {', '.join(unknown)}", fix=f"choose among {', '.join(MIX)}")
    begun.check_steps(steps)
    with begun.alone_in(out, BEGUN):
        made = Build(seed, steps, scenarios)
        if (out / BEGUN).exists():
            made.restore(out / BEGUN)
        while made.step < steps:
            made.block(progress)
            made.save(out / BEGUN)
        save_base(made.model, made.tokenizer, out)
        facts = made.facts()
        replace_json(out / "build.json", facts)
    return facts
