"""Are a model's own words true, and what is the best that could be made of them?

    PYTHONPATH=benchmarks python benchmarks/studies/words.py nano --result benchmarks/results/words-nano.json
    PYTHONPATH=benchmarks python benchmarks/studies/words.py adapter:runs/fl --scenario frozen-lake \\
        --result benchmarks/results/words-fl.json

The model plays, and each of its thoughts is held against the game. Then two players that know nothing but its words
act on them as well as can be (`train.nano.words.follow`): one that hears no looking ahead, one that always does
(the words with which it begins are put into the model's mouth). What they reach is the ceiling of any training that
only teaches the model to act on what it says; it stands next to every result of such a training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from machine import options, write

from msgrpo.agent import Agent, Completion, Decision, LanguageAgent, OnText, Sampling, View
from msgrpo.episode import Episode, play_episode
from msgrpo.evals.stats import bootstrap_mean, wilson
from msgrpo.evals.suites import HeldOut, episode_seeds
from msgrpo.game import Scenario, stream
from msgrpo.games import SCENARIOS
from msgrpo.models.local import LocalModel
from msgrpo.prompt import Prompt, PromptTemplate, as_given
from msgrpo.references import OptimalAgent
from msgrpo.specs import is_language_model, make_agent
from msgrpo.train.nano.words import Sight, Words, follow, truth

SAMPLING = Sampling(max_tokens=64)
MARK = "\u241fwords\u241f"


def asked(name: str, template: PromptTemplate | None = None) -> tuple[LanguageAgent, LocalModel]:
    """`nano`, `adapter:DIR`, or the folder of a base model; without `template` asked as it was trained or taught."""
    agent = make_agent(name if is_language_model(name) else f"base:{name}", SAMPLING, template=template)
    assert isinstance(agent, LanguageAgent)
    assert isinstance(agent.model, LocalModel)
    return agent, agent.model


def load(name: str) -> LocalModel:
    """The model alone."""
    return asked(name)[1]


class Continued:
    """A model whose answers begin with words that are put into its mouth."""

    def __init__(self, name: str, template: PromptTemplate | None = None) -> None:
        agent, self._model = asked(name, template)
        self.name, self.template, chat = name, agent.template, self._model.chat
        self._head, _, self._tail = chat._rendered(Prompt("", MARK, self.template.system)).partition(MARK)
        chat.ids = self._ids  # type: ignore[method-assign]

    def _ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        texts = [
            self._head + prompt.prefix + prompt.state for prompt in prompts
        ]  # a state that has its answer's begin
        encoded: list[list[int]] = self._model.chat.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return encoded

    async def answer(self, prompt: Prompt, seed: int, said: str = "") -> Completion:
        """The whole answer: `said`, and how the model goes on."""
        begun = Prompt(prompt.prefix, prompt.state + self._tail + said)
        continued = await self._model.complete(begun, SAMPLING, seed)
        return replace(continued, text=said + continued.text)


@dataclass
class Follower:
    """Acts on the words of a model, without or with a look ahead."""

    model: Continued
    further: bool
    spec: str = "follower"

    def settings(self) -> dict[str, Any]:
        return {"model": self.model.name}

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        sight = Sight(view.game, view.player)
        prompt = self.model.template.render(view.scenario, view.observation, view.past)
        answer = await self.model.answer(prompt, view.seed)
        words = Words.read(answer.text)
        if self.further and words is not None and not words.looks_ahead:
            said = answer.text.partition("<action>")[0] + (" chances" if sight.slippery else " path")
            answer = await self.model.answer(prompt, view.seed, said)
            words = Words.read(answer.text) or words
        if words is not None and not self.further:
            words = replace(words, path=None, chances=None)
        generator = stream(view.seed, "follow")
        chosen = follow(words, sight.values, sight.slippery, generator)
        return Decision(chosen, None, prompt, replace(answer, text=f"{answer.text}<action>{chosen}</action>"))

    async def close(self) -> None:
        """The model belongs to others too."""


def play(agent: Agent, scenario: Scenario, episodes: int, split: HeldOut) -> list[Episode]:
    async def everything() -> list[Episode]:
        seats = dict.fromkeys(scenario.players, agent)
        return await asyncio.gather(
            *(
                play_episode(scenario, seats, start_seed=s, chance_seed=c, sampling_seed=d)
                for s, c, d in episode_seeds(scenario, episodes, split)
            )
        )

    return asyncio.run(everything())


def score(episodes: list[Episode]) -> dict[str, Any]:
    """Success where there is a goal, else the return (of all players together), with its interval."""
    scores = [episode.score for episode in episodes]
    goal = episodes[0].success is not None
    interval = wilson(round(sum(scores)), len(scores)) if goal else bootstrap_mean(scores, seed=0)
    return {"mean": sum(scores) / len(scores), "interval": interval}


def truths(scenario: Scenario, episodes: list[Episode]) -> dict[str, Any]:
    """How many of the thoughts are true, part by part; the episodes are played again to know."""
    found, ahead = [], []
    for episode in episodes:
        game = scenario.new(episode.start_seed, episode.chance_seed)
        for i in range(0, len(episode.turns), len(scenario.players)):
            together = episode.turns[i : i + len(scenario.players)]
            for turn in together:
                said = truth(Words.read(turn.answer or ""), game, turn.player)
                found.append(said)
                ahead += [said.ahead] if said.ahead is not None else []
            game.step({turn.player: turn.action for turn in together})
    turns = len(found)
    return {
        "turns": turns,
        "directions": sum(said.directions for said in found) / turns,
        "target": sum(said.target for said in found) / turns,
        "true": sum(said.whole for said in found) / turns,
        "looks_ahead": len(ahead) / turns,
        "ahead": sum(ahead) / len(ahead) if ahead else None,
    }


def measured(model: Continued, scenario: Scenario, episodes: int, split: HeldOut) -> dict[str, Any]:
    """What it plays, what its words are worth, and how true they are: where it comes, and where a follower comes."""
    own = play(asked(model.name, model.template)[0], scenario, episodes, split)
    short = play(Follower(model, further=False), scenario, episodes, split)
    further = play(Follower(model, further=True), scenario, episodes, split)
    return {
        "own": score(own),
        "ceiling": score(short),
        "ceiling_ahead": score(further),
        "optimal": score(play(OptimalAgent(), scenario, episodes, split)),
        "truth": truths(scenario, own),
        "truth_of_a_follower": truths(scenario, further),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("model", help="nano, adapter:DIR, or a folder with a base model")
    parser.add_argument("--scenario", action="append", default=[], help="default: all")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--split", choices=["val", "test"], default="test")
    parser.add_argument("--prompt", help="brief, none, free, or a file; default: as it was trained or taught")
    parser.add_argument("--result", type=Path)
    given = parser.parse_args()
    model = Continued(given.model, as_given(given.prompt, None)["template"])
    result: dict[str, Any] = {"model": given.model, "episodes": given.episodes}
    result |= {"split": given.split, "prompt": model.template.written, "scenarios": {}}
    for name in given.scenario or SCENARIOS:
        found = measured(model, SCENARIOS[name], given.episodes, given.split)
        result["scenarios"][name] = found
        scores = (f"{key} {found[key]['mean']:.3f}" for key in ("own", "ceiling", "ceiling_ahead", "optimal"))
        parts = (
            f"{key} {share:.3f}"
            for key in ("truth", "truth_of_a_follower")
            for share in list(found[key].values())[1:4]
        )
        print(f"{name:30}", *scores, "|", *parts, f"ahead {found['truth']['looks_ahead']:.2f}", flush=True)
        if given.result:
            write(given.result, result)


if __name__ == "__main__":
    main()
