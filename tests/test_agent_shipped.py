"""What comes with the package: nano, built from this suite's training starts, and its adapters."""

from __future__ import annotations

import asyncio
import json

import pytest
from peft import PeftModel

from msgrpo.agent import LanguageAgent, Sampling
from msgrpo.episode import play_episode
from msgrpo.errors import ModelError, UsageError
from msgrpo.evals.suites import SUITE_VERSION, episode_seeds
from msgrpo.game import Outcome, stream
from msgrpo.games import get_scenario
from msgrpo.models.loading import load_adapted
from msgrpo.models.lora import read_adapter_config
from msgrpo.models.paths import NANO_DIR, shipped_adapters
from msgrpo.specs import make_agent
from msgrpo.train.nano.words import Words, truth


def test_nanos_text_is_from_the_training_starts_of_this_suite() -> None:
    """Where the splits change, what trained it may be what tests it."""
    assert json.loads((NANO_DIR / "build.json").read_text())["suite_version"] == SUITE_VERSION


@pytest.mark.parametrize("scenario", ["frozen-lake", "snake"])
def test_an_adapter_for_it_comes_with_nano(scenario: str) -> None:
    assert read_adapter_config(shipped_adapters()[scenario])["base_model_name_or_path"] == "nano"


def test_a_scenario_without_an_adapter_names_those_that_have_one() -> None:
    with pytest.raises(UsageError, match="no adapter for 'snake-duel'") as caught:
        make_agent("nano:snake-duel")
    assert "nano:snake" in str(caught.value)
    assert "msgrpo train snake-duel" in str(caught.value)


async def test_the_shipped_adapter_of_the_lake_wins_where_nano_does_not() -> None:
    scenario = get_scenario("frozen-lake")
    won = {}
    for spec in ("nano", "nano:frozen-lake"):
        agent = make_agent(spec, Sampling(max_tokens=64))
        episodes = await asyncio.gather(  # turns that wait at the same time are one batch
            *(
                play_episode(scenario, {"player": agent}, start_seed=s, chance_seed=c, sampling_seed=d)
                for s, c, d in episode_seeds(scenario, 30)
            )
        )
        won[spec] = sum(bool(episode.success) for episode in episodes)
        await agent.close()
    assert won["nano:frozen-lake"] >= won["nano"] + 8


@pytest.mark.parametrize("scenario_id", ["frozen-lake", "snake", "snake-poison-apple-and-banana"])
async def test_nano_reads_the_board(scenario_id: str) -> None:
    """Greedy, what it says of the four directions is true nearly everywhere, on boards that it never saw."""
    scenario = get_scenario(scenario_id)
    agent = make_agent("nano", Sampling(temperature=0, max_tokens=64))
    assert isinstance(agent, LanguageAgent)
    asked = []
    for start, chance, _ in episode_seeds(scenario, 12):
        game, generator = scenario.new(start, chance), stream(start, "tour")
        for _ in range(4):
            prompt = agent.template.render(scenario, game.observe(game.players[0]))
            asked.append((game.copy(), agent.model.complete(prompt, agent.sampling, 0)))
            game.step(dict.fromkeys(game.players, str(generator.choice(game.actions))))
            if game.outcome is not Outcome.PLAYING:
                break
    answers = await asyncio.gather(*(answer for _, answer in asked))
    await agent.close()
    right = sum(
        truth(Words.read(answer.text), game, game.players[0]).directions
        for (game, _), answer in zip(asked, answers, strict=True)
    )
    assert right >= 0.95 * len(asked)


@pytest.mark.parametrize(
    ("error", "says"), [(MemoryError("no room"), "cannot be loaded"), (KeyError("rank"), "does not fit its base")]
)
def test_what_the_memory_refuses_of_an_adapter_is_no_fault_of_its_base(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(PeftModel, "from_pretrained", refuse)
    with pytest.raises(ModelError, match=says):
        load_adapted(shipped_adapters()["frozen-lake"])
