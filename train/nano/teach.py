"""`msgrpo teach SCENARIO --base B`: supervised fine-tuning of any base on play of that game, before MS-GRPO.

A base whose answers are nearly all invalid has groups whose returns are all equal, and learns nothing. Here it reads
the game's prompts and learns the form of an answer: words that are true, where there are some for the game (its own
`describe`, or nano's), and the action of a player who plays badly on purpose: to play well is what MS-GRPO is for.
How many of the actions are the best ones stands in `taught.json`. With `--from own` the answers are the base's own
(`sampled.py`).

Of a small model all weights are trained; of any other a LoRA, which is merged at the end. Either way the result is a
base like any other. What has been learned is written down every half minute: the same command goes on.
"""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from msgrpo.episode import observation_of, outcome_of
from msgrpo.errors import GameFaultError, UsageError
from msgrpo.files import replace_json
from msgrpo.game import Game, Outcome, Scenario, check_kind, stream
from msgrpo.limits import games_code
from msgrpo.models.asked import TAUGHT, taught_as
from msgrpo.models.headers import save_base
from msgrpo.models.loading import load_base, weights_of
from msgrpo.models.local import LocalModel, pad_id
from msgrpo.models.shared_prefix import answer_logprobs, longest_sharing, trunk_and_head
from msgrpo.prompt import USUAL, Asked, Past, PromptTemplate
from msgrpo.references import description_of, known_best
from msgrpo.text import counted
from msgrpo.train.nano import begun
from msgrpo.train.nano.build import PLAY, TOUR, Row, Source, pick, shuffled
from msgrpo.train.nano.sampled import own_rows
from msgrpo.train.nano.words import has_words, look
from msgrpo.train.policy import Pairs

SKILL = 0.4  # of the actions in a game that nano has no words for are the reference player's
STEPS = 250
LOST = 20  # games in a row that their own faults end, before it is given up
ANSWERS = 4  # to one prompt, where an answer is nothing but an action
Answers = Literal["words", "actions", "own"]
ANSWERED: dict[Answers, str] = {"words": "", "actions": " --no-words", "own": " --from own"}  # on the command line
BLOCK = 25  # steps whose rows are one stretch of play
SMALL = 20_000_000  # parameters up to which all weights are trained
RANK = 32
SAVE_S = 30.0  # between two times that what was learned is written down
BEGUN = "teach.pt"


@dataclass(frozen=True)
class Pace:
    """How far the teaching is."""

    step: int
    steps: int
    loss: float
    rows_per_s: float
    left_s: float


Progress = Callable[[Pace], None]


def rows_of(
    scenario: Scenario, seed: int, template: PromptTemplate = USUAL.prompt, *, words: bool = True
) -> Iterator[list[Row]]:
    """Turns on training starts, without end, as somebody would play who knows the rules and seldom what is best.

    Each turn is a list of answers to one prompt: with words one, without `ANSWERS` of them, since a model reads a
    prompt once for all its answers and an action alone is short. A game's own fault ends that game and no more;
    raises GameFaultError where `LOST` in a row are.
    """
    generator = stream(seed, f"teach-{scenario.id}")
    known = has_words(scenario) and scenario.family in PLAY

    def chosen(game: Game, player: str, skill: float, bad: float) -> str:
        if known:
            return pick(scenario, game, player, generator, skill, bad)
        wanted = scenario.reference is not None and generator.random() < skill
        best = known_best(scenario, game, player) if wanted else None
        with games_code(scenario.id):
            return str(generator.choice(list(game.legal(player) if best is None else best)))

    answering = PLAY[scenario.family] if known else (SKILL, 0.0)
    walking = TOUR if known else (SKILL, 0.0)

    def played(start: int) -> Iterator[list[Row]]:
        game = scenario.new(start, int(generator.integers(2**31)))
        past = defaultdict[str, list[Past]](list)
        while True:
            with games_code(scenario.id):
                if outcome_of(game) is not Outcome.PLAYING:
                    return
                seen = {player: observation_of(game, player) for player in game.to_move}
            for player, state in seen.items():
                prompt = template.render(scenario, state, past[player])
                thought = _words(scenario, game, player) if words else ""
                best = known_best(scenario, game, player)
                actions = [chosen(game, player, *answering) for _ in range(1 if thought else ANSWERS)]
                yield [
                    Row(prompt, f"{thought}<action>{action}</action>", None if best is None else action in best)
                    for action in actions
                ]
            moves = {player: chosen(game, player, *walking) for player in seen}
            for player, move in moves.items():
                past[player].append(Past(seen[player], move))
            with games_code(scenario.id):
                game.step(moves)

    lost = 0
    for start in scenario.starts("train", first_seed=seed * 10_007):
        try:
            yield from played(start)
            lost = 0
        except GameFaultError as fault:
            lost += 1
            if fault.fatal or lost == LOST:
                raise


def _words(scenario: Scenario, game: Game, player: str) -> str:
    """Something true about the state: the game's own words, or nano's; nothing where there are none."""
    if scenario.describe is not None:
        return description_of(scenario, game, player)
    return look(game, player) if has_words(scenario) else ""


def in_parts(pairs: Pairs, tokens: int, prefix: int) -> Iterator[Pairs]:
    """A batch in parts of at most so many tokens, filled up to the longest row; each row has `prefix` more."""
    first, longest = 0, 0
    for at, (rest, answer) in enumerate(pairs):
        own = prefix + len(rest) + len(answer)
        longest = max(longest, own)
        if at > first and (at - first + 1) * longest > tokens:
            yield pairs[first:at]
            first, longest = at, own
    yield pairs[first:]


class Teaching:
    """A base that is being taught: the model, its optimizer, and where it stands."""

    def __init__(self, scenario: Scenario, base: str, seed: int, steps: int, asked: Asked, answers: Answers) -> None:
        torch.manual_seed(seed)
        self.scenario, self.base, self.seed, self.steps = scenario, base, seed, steps
        self.asked, self.answers = asked, answers
        self.model, self.tokenizer = load_base(base)
        self.whole = sum(parameter.numel() for parameter in self.model.parameters()) <= SMALL
        if self.whole and self.model.dtype != torch.float32:
            self.model, self.tokenizer = load_base(base, dtype="float32")
        self.dtype = self.model.dtype  # of a LoRA's base; the LoRA has float32
        self.pad_id = pad_id(self.model, self.tokenizer)
        self.batch, self.peak, self.warm_up = (48, 3e-3, 20) if self.whole else (24, 2e-3, 10)
        self.at_once = 16_384 if self.whole else 2_048  # tokens of one forward and backward
        self._untaught = copy.deepcopy(self.model) if self.whole and answers == "own" else self.model
        if not self.whole:
            self.model = self._untaught = _with_lora(self.model)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.peak, weight_decay=0.0)
        self.step, self.rows, self.judged, self.best, self.seconds = 0, 0, 0, 0, 0.0
        self.losses: list[float] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def block(self) -> Iterator[float]:
        """Train to the end of the block, a step at a time; gives each step's loss."""
        first = self.step - self.step % BLOCK
        turns = self._turns(self.seed * 100_000 + first)
        mixed = itertools.chain.from_iterable(shuffled(turns, stream(self.seed, f"teach-block-{first}")))
        for _ in itertools.islice(mixed, (self.step - first) * self.batch):
            pass  # it has learned from these rows already
        while self.step < min(first + BLOCK, self.steps):
            yield self._learn(list(itertools.islice(mixed, self.batch)))

    def _turns(self, seed: int) -> Iterator[list[Row]]:
        if self.answers != "own":
            return rows_of(self.scenario, seed, self.asked.prompt, words=self.answers == "words")
        untaught = nullcontext if self.whole else self.model.disable_adapter
        base = LocalModel("base", self._untaught, self.tokenizer, chat=self.asked.chat)
        return own_rows(self.scenario, base, untaught, seed, self.asked.prompt)

    def _learn(self, rows: list[Row]) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * min(1.0, (self.step + 1) / self.warm_up) * max(0.05, 1 - self.step / self.steps)
        prefix, pairs = Source(self.tokenizer, iter(rows), self.asked.chat).batch(len(rows))
        trunk, head = trunk_and_head(self.model)
        tokens, loss = sum(len(answer) for _, answer in pairs), 0.0
        longest = len(prefix) + max(len(rest) + len(answer) for rest, answer in pairs)
        self.optimizer.zero_grad()
        for part in in_parts(pairs, self.at_once, 0 if longest <= longest_sharing(trunk) else len(prefix)):
            part_loss = -answer_logprobs(trunk, head, prefix, part, self.pad_id)[0].sum() / tokens
            part_loss.backward()  # type: ignore[no-untyped-call]
            loss += float(part_loss.detach())
        begun.check_finite(self.step, loss, float(torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)))
        self.optimizer.step()
        self.step, self.rows = self.step + 1, self.rows + len(rows)
        self.judged += sum(row.best is not None for row in rows)
        self.best += sum(row.best is True for row in rows)
        self.losses.append(loss)
        return self.losses[-1]

    @property
    def planned(self) -> str:
        """What must be the same for a teaching to go on."""
        whose = f"{self.scenario.id} {self.scenario.rules_hash} {weights_of(self.base)}"
        chat = f" --chat {json.dumps(self.asked.chat)}" if self.asked.chat else ""
        how = f"--prompt {self.asked.prompt.hash}{chat}{ANSWERED[self.answers]}"
        return f"{whose} {how} --seed {self.seed}"

    def save(self, file: Path) -> None:
        """All that the next step needs, whole or not at all."""
        saved = {name: getattr(self, name) for name in ("planned", *COUNTS)}
        saved["weights"] = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        begun.save(file, saved | {"optimizer": self.optimizer.state_dict()})

    def restore(self, file: Path) -> None:
        """Raises UsageError if something else was being taught there, or for longer than is asked for."""
        with begun.taking_over(file, self.planned) as saved:
            if saved["step"] > self.steps:
                raise UsageError(
                    f"{file.parent} has {counted(saved['step'], 'step')} already",
                    fix=f"--steps {saved['step']}, or more",
                )
            for name in COUNTS:
                setattr(self, name, saved[name])
            own = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, weights in saved["weights"].items():
                    own[name].copy_(weights)
            self.optimizer.load_state_dict(saved["optimizer"])

    def facts(self) -> dict[str, Any]:
        """What was done."""
        recent, before = self.losses[-20:], taught_as(self.base)
        return {
            "scenario": self.scenario.id,
            "rules": self.scenario.rules_hash,
            "base": self.base,
            "weights": weights_of(self.base),
            "trained": "all weights" if self.whole else f"LoRA of rank {RANK} on all linear layers, merged",
            "dtype": str(self.dtype).removeprefix("torch."),
            **self.asked.model_dump(exclude_defaults=True),
            **({"teacher": before.teacher} if before is not None and before.teacher else {}),
            "answers": self.answers,
            "steps": self.steps,
            "rows": self.rows,
            "best_actions": round(self.best / self.judged, 4) if self.judged else None,
            "seed": self.seed,
            "loss": sum(recent) / len(recent),
            "losses": [round(loss, 4) for loss in self.losses],
            "seconds": round(self.seconds, 1),
        }

    def write(self, out: Path) -> None:
        """The taught model as a folder that is a base like any other. It is the last that is done."""
        plain = self.model if self.whole else self._merged()
        plain.set_attn_implementation("sdpa")
        save_base(plain, self.tokenizer, out)

    def _merged(self) -> Any:
        """The base's own weights and what was learned, added up in float32: bfloat16 would lose a part of either."""
        if self.dtype == torch.float32:
            return self.model.merge_and_unload()
        learned = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        self.model = self._untaught = None  # room for the base in float32
        model = _with_lora(load_base(self.base, device=torch.device("cpu"), dtype="float32")[0])
        set_peft_model_state_dict(model, learned)
        return model.merge_and_unload()


def _with_lora(base: Any) -> Any:
    return get_peft_model(
        base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    )


COUNTS = ("step", "rows", "judged", "best", "seconds", "losses")


def teach(
    scenario: Scenario,
    out: Path,
    *,
    base: str = "nano",
    steps: int = STEPS,
    seed: int = 0,
    template: PromptTemplate | None = None,
    chat: Mapping[str, Any] | None = None,
    answers: Answers = "words",
    progress: Progress = lambda pace: None,
) -> dict[str, Any]:
    """Train `base` on the game's rows and write it to `out` as a base like any other; returns what was done.

    `template` is how it is asked, and `chat` are the arguments of its chat template; without them a base that was
    taught before is asked as it was then, any other as usual. Its answers are a bad player's, with `words` before the
    action or nothing but `actions`, or its `own` that hold a legal action.

    A teaching that was cut off goes on where it was written down last; with another number of steps it goes on by
    the learning rates of that many. Raises UsageError if `out` holds anything else.
    """
    check_kind(scenario)
    begun.check_steps(steps)
    with begun.alone_in(out, BEGUN):
        asked = (taught_as(base) or USUAL).but(template, chat)
        teaching = Teaching(scenario, base, seed, steps, asked, answers)
        if (out / BEGUN).exists():
            teaching.restore(out / BEGUN)
        _go_on(teaching, out / BEGUN, progress)
        facts = teaching.facts()
        replace_json(out / TAUGHT, facts)  # first: weights alone are asked as usual
        teaching.write(out)
    return facts


def _go_on(teaching: Teaching, file: Path, progress: Progress) -> None:
    """Train to the last step, and write down in `file` now and then what has been learned."""
    first, began, before = teaching.step, time.perf_counter(), teaching.seconds
    written = began
    while teaching.step < teaching.steps:
        for _ in teaching.block():
            now = time.perf_counter()
            teaching.seconds = before + now - began
            each = (now - began) / (teaching.step - first)
            recent = teaching.losses[-20:]
            loss = sum(recent) / len(recent)
            left_s = each * (teaching.steps - teaching.step)
            progress(Pace(teaching.step, teaching.steps, loss, teaching.batch / each, left_s))
            if now - written > SAVE_S or teaching.step == teaching.steps:
                teaching.save(file)
                written = now
