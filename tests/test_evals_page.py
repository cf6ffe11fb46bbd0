"""The page: what it embeds, what its charts show, and what it does in a real browser."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msgrpo.agent import ParseFailure
from msgrpo.episode import Episode, Turn
from msgrpo.evals import page
from msgrpo.evals.leaderboard import build
from msgrpo.evals.plays import Play
from msgrpo.evals.record import seeds_of
from msgrpo.evals.rows import Row
from tests.browser import CHROMIUM, Ask, opened
from tests.evals_helpers import suite_episode

LAKE, SNAKE = "frozen-lake", "snake"
EVIL = "</script><script>alert(1)</script><img src=x onerror=\"document.title='run'\"><!--\u2028&amp;"


def episode(i: int, *rewards: float, **fields: Any) -> Episode:
    """The i-th episode of the suite, one turn for each reward."""
    turns = [
        Turn(step=step, player="player", state=f"state {i}.{step}", action="up", reward=reward)
        for step, reward in enumerate(rewards)
    ]
    return suite_episode(i, turns, **fields)


def series(*episodes: Episode) -> Play:
    first = episodes[0]
    return Play(first.agents["player"], first.scenario, {}, {seeds_of(e): e for e in episodes})


def embedded(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="plays">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def row(agent: str = "a", **fields: Any) -> Row:
    return build([series(episode(0, 1.0))]).rows[0].model_copy(update={"agent": agent, **fields})


def returned(mean: float, low: float, high: float, **fields: Any) -> Row:
    scores = {"return_mean": mean, "return_low": low, "return_high": high}
    return row(success_rate=None, optimum=None, **scores, **fields)


# ── what it embeds ──


def test_the_page_needs_nothing_else_and_runs_no_answer() -> None:
    evil = series(episode(0, 1.0, agent=EVIL))
    evil.finished[next(iter(evil.finished))].turns[0].answer = EVIL  # as if nobody had cleaned it
    text = page.html(build([evil], [EVIL]), [evil])
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)
    assert text.count("<script") == text.count("</script") == 2
    assert "<img" not in text
    assert "<!--" not in text
    (play,) = embedded(text)
    assert play["agent"] == evil.agent
    assert play["episodes"][0]["turns"][0]["answer"] == EVIL


@given(st.text(alphabet=st.sampled_from("<>/!-&\"'\\script\u2028\u2029\ud800 \n")))
def test_json_comes_back_and_holds_no_tag_and_no_line_separator(text: str) -> None:
    written = page._json({text: text})
    assert json.loads(written) == {text: text}
    assert not set(written) & {"<", "\u2028", "\u2029", "\ud800", "\n"}


def test_a_browser_may_run_this_script_and_load_nothing() -> None:
    play = series(episode(0, 1.0))
    text = page.html(build([play]), [play])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "http" not in policy
    assert text.index("Content-Security-Policy") < text.index("<style") < text.index("<script")


def test_only_the_first_episodes_are_there_and_the_page_knows_how_many_there_were() -> None:
    play = series(*(episode(i, 1.0) for i in range(5)))
    (shown,) = embedded(page.html(build([play]), [play], replays=2))
    assert (shown["finished"], [e["index"] for e in shown["episodes"]]) == (5, [1, 2])
    assert page.REPLAYS == 50


def test_a_start_has_one_index_whoever_played_it() -> None:
    foreign = [episode(0, 1.0, start_seed=7, chance_seed=chance) for chance in (2, 1)]
    a = series(episode(0, 1.0), episode(1, 1.0), episode(3, 1.0), *foreign)
    b = series(*(e.model_copy(update={"agents": {"player": "b"}}) for e in [episode(3, 1.0), foreign[1]]))
    first, second = embedded(page.html(build([a, b]), [a, b]))
    assert [e["index"] for e in first["episodes"]] == [1, 2, 4, 6, 5]
    assert [e["index"] for e in second["episodes"]] == [4, 5]


def test_what_an_episode_says_of_itself() -> None:
    turns = [
        Turn(step=0, player="player", state="s", action="up", regret=0.1, reward=-1.0),
        Turn(step=1, player="player", state="s", answer="x", failure=ParseFailure.ILLEGAL, regret=0.05),
        Turn(step=2, player="player", state="s", answer="y", reasoning="z", action="up"),
    ]
    long_seed = 2**60 + 1
    play = series(episode(0, -1.0, scenario=SNAKE, turns=turns, start_seed=long_seed))
    play.lines = dict.fromkeys(play.finished, 3)
    ((shown,),) = (play["episodes"] for play in embedded(page.html(build([play]), [play])))
    assert (shown["seed"], shown["line"], shown["return"]) == (str(long_seed), 3, -1.0)
    assert (shown["won"], shown["success"], shown["outcome"]) == (False, None, "terminated")
    assert (shown["invalid"], shown["mistakes"], shown["regret"]) == (1, 1, pytest.approx(0.075))
    assert shown["turns"][0] == {"state": "s", "reward": -1.0, "action": "up", "regret": 0.1}
    assert shown["turns"][1]["failure"] == "illegal"
    assert shown["turns"][2] == {"state": "s", "reward": 0.0, "answer": "y", "reasoning": "z", "action": "up"}


def test_a_return_above_zero_wins_where_there_is_no_goal() -> None:
    play = series(*(episode(i, total, scenario=SNAKE) for i, total in enumerate((2.0, 0.0, -1.0))))
    (shown,) = embedded(page.html(build([play]), [play]))
    assert [e["won"] for e in shown["episodes"]] == [True, False, False]


def test_the_prompts_fixed_part_is_there_once() -> None:
    prefix = {"player": "the <b>rules</b> of this game"}
    a = series(*(episode(i, 1.0, prefix=prefix) for i in range(3)))
    b = series(episode(0, 1.0, agent="b", prefix=prefix), episode(1, 0.0, agent="b"))
    text = page.html(build([a, b]), [a, b])
    assert text.count("the &lt;b&gt;rules&lt;/b&gt; of this game") == text.count("rules") == 1


# ── charts ──


@given(
    st.lists(st.tuples(*[st.floats(-1e6, 1e6).map(lambda x: round(x, 3))] * 3), min_size=1, max_size=5),
)
def test_every_return_stands_on_the_one_scale(estimates: list[tuple[float, float, float]]) -> None:
    rows = [returned(mean, low, high) for low, mean, high in map(sorted, estimates)]
    scale = page.return_axis(rows)
    steps = [after - before for before, after in zip(scale.ticks, scale.ticks[1:], strict=False)]
    assert 2 <= len(scale.ticks) <= 8
    assert min(steps) == pytest.approx(max(steps))
    assert 0.0 in scale.ticks
    for one in rows:
        places = [float(scale.x(value)[:-1]) for value in (one.return_low, one.return_mean, one.return_high)]
        assert page.MARGIN <= places[0] <= places[1] <= places[2] <= 100 - page.MARGIN


def test_the_scale_of_returns_does_not_care_for_scenarios_with_a_goal() -> None:
    assert page.return_axis([row(return_high=50.0), returned(1.0, 0.0, 2.0)]).ticks[-1] == 2.0
    assert page.return_axis([returned(5e-324, 0.0, 5e-324)]).ticks[-1] == 0.2  # the smallest number had no logarithm


def test_charts_of_returns_share_their_ticks_and_charts_of_success_go_to_one() -> None:
    low = series(*(episode(i, 1.0, scenario=SNAKE) for i in range(2)))
    high = series(*(episode(i, 12.0, scenario="snake-poison-apple") for i in range(2)))
    goal = series(episode(0, 1.0), episode(1, 0.0))
    text = page.html(build([goal, low, high]), [])
    of_goal, *of_returns = re.findall(r"<svg.*?</svg>", text)
    ticks = [re.findall(r'class="tick" [^>]*>([^<]*)<', chart) for chart in of_returns]
    assert ticks == [["0", "5", "10", "15"]] * 2
    assert re.findall(r'class="tick" [^>]*>([^<]*)<', of_goal) == ["0%", "25%", "50%", "75%", "100%"]
    widths = [float(re.findall(r'class="bar" [^>]*width="([\d.]+)%', chart)[0]) for chart in of_returns]
    assert widths[1] == pytest.approx(12 * widths[0], rel=0.01)


def test_a_chart_spans_negative_and_positive_returns() -> None:
    rows = [returned(-1.0, -2.0, -0.5), returned(0.5, 0.0, 1.0)]
    svg = page.chart(rows, page.return_axis(rows))
    assert svg.count('class="bar"') == 2
    assert svg.count('class="zero"') == 1
    assert "Mean return" in svg
    assert "-1.000 [-2.000, -0.500]" in svg
    assert not re.search(r'(width|x\d?|cx)="-', svg)


def test_a_chart_of_a_goal_shows_success_its_interval_and_the_optimum() -> None:
    won = series(episode(0, 1.0), episode(1, 0.0))
    svg = page.chart(build([won]).rows, page.SUCCESS)
    assert "Success; the dot is the exact optimum" in svg
    assert re.findall(r'<circle cx="([\d.]+)%', svg) == ["98.00"]
    assert "50.0% [9.5%, 90.5%]" in svg
    assert 'width="48.00%"' in svg
    assert "dot" not in page.chart([row(optimum=None)], page.SUCCESS)


def test_long_names_lose_their_middle() -> None:
    name = "endpoint:http://127.0.0.1:8000/v1#Qwen/Qwen3-4B"
    assert page.shortened(name) == "endpoint:…000/v1#Qwen/Qwen3-4B"
    assert page.shortened("n" * page.LABEL) == "n" * page.LABEL
    svg = page.chart([row(name)], page.SUCCESS)
    assert f"<title>{name}: " in svg
    assert f">{page.shortened(name)}</text>" in svg


# ── in a browser ──


def written(folder: Path) -> str:
    """A page of two agents in two scenarios, as an address."""
    a = series(episode(0, 0.0, 0.0, 1.0), episode(1, 0.0), episode(2, 0.0, 0.0))
    b = series(*(episode(i, *[0.0] * 4, 1.0, agent="b " * 40) for i in range(2)))
    c = series(episode(0, -1.0, scenario=SNAKE, prefix={"player": "long" * 200}))
    first, second, _ = a.finished.values()
    first.turns[2].reasoning = "At last"
    (turn,) = second.turns
    turn.answer, turn.action, turn.failure, turn.regret = EVIL, None, ParseFailure.ILLEGAL, 0.5
    path = folder / "leaderboard.html"
    path.write_text(page.html(build([a, b, c], ["long" * 200]), [a, b, c]))
    return path.as_uri()


class Screen:
    """What a person does to the page, and what is then to be seen."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def run(self, script: str) -> Any:
        answer = await self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def open(self, url: str) -> None:
        await self._ask("Page.navigate", url="about:blank")
        await self._ask("Page.navigate", url=url)
        await self.wait("document.readyState === 'complete' && document.querySelectorAll('#episodes tr').length > 0")

    async def wait(self, condition: str) -> None:
        deadline = time.monotonic() + 90
        while not await self.run(condition):
            assert time.monotonic() < deadline, f"{condition}: {await self.run('document.body.innerText')}"
            await asyncio.sleep(0.05)

    async def set(self, name: str, value: str) -> None:
        events = "for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, {bubbles: true}))"
        await self.run(f"{{ const e = $({name!r}); e.value = {value!r}; {events}; }}")

    async def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            await self._ask("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        x, y = await self.run(
            f"{{ const r = document.querySelector({selector!r}).getBoundingClientRect();"
            " [r.x + r.width / 2, r.y + r.height / 2] }"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def width(self, pixels: int) -> int:
        await self._ask(
            "Emulation.setDeviceMetricsOverride", width=pixels, height=800, deviceScaleFactor=1, mobile=False
        )
        return int(await self.run("document.documentElement.scrollWidth"))

    async def indices(self) -> list[str]:
        return list(await self.run("[...$('episodes').rows].map(row => row.cells[1].textContent)"))

    async def states(self) -> list[str]:
        return list(await self.run("[...document.querySelectorAll('.state')].map(e => e.textContent)"))

    async def ends(self) -> list[str]:
        return list(await self.run("[...document.querySelectorAll('.end:not([hidden])')].map(e => e.textContent)"))


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
async def test_the_page_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp, which speaks to Chromium, is not installed")
    url = written(tmp_path)
    async with opened("about:blank", tmp_path / "profile") as ask:
        screen = Screen(ask)
        await screen.open(url)
        assert await screen.indices() == ["1", "2", "3", "1", "2"]
        assert (
            await screen.run("$('kept').textContent")
            == "Episodes in this file: all 3 of a; all 2 of " + "b " * 40 + "."
        )
        await _filters(screen)
        await _scrubs(screen)
        await _plays_side_by_side(screen)
        await _is_found_again(screen, url)
        await _fits_a_phone(screen)


async def _filters(screen: Screen) -> None:
    for name, value, left in [
        ("result", "won", ["1", "1", "2"]),
        ("result", "lost", ["2", "3"]),
        ("result", "invalid", ["2"]),
        ("result", "mistake", ["2"]),
        ("agent", "a", ["1", "2", "3"]),
        ("index", "2", ["2", "2"]),
        ("text", "ONERROR", ["2"]),
        ("text", "nobody wrote this", []),
    ]:
        await screen.set(name, value)
        assert await screen.indices() == left, (name, value)
        if value == "ONERROR":  # what an agent wrote is text, and nothing else
            assert "<img src=x onerror" in await screen.run("document.querySelector('.answer').textContent")
            assert (
                await screen.run("document.querySelector('.move').textContent") == "step 1: no legal action (illegal)"
            )
            assert await screen.run("document.querySelectorAll('img').length") == 0
            assert await screen.run("document.title") == "msgrpo leaderboard"
        await screen.set(name, "")
    assert await screen.run("$('player').hidden") is False
    await screen.set("scenario", SNAKE)
    assert await screen.indices() == ["1"]
    assert await screen.ends() == ["The end: terminated after 1 step, return -1."]
    await screen.set("scenario", LAKE)


async def _scrubs(screen: Screen) -> None:
    await screen.click("#episodes tr:nth-child(2) td:nth-child(4)")
    assert await screen.states() == ["state 1.0"]
    await screen.click("#episodes tr:nth-child(1) button")
    assert await screen.states() == ["state 0.0"]
    await screen.press("ArrowRight", 39)
    assert (await screen.states(), await screen.ends()) == (["state 0.1"], [])
    await screen.press("ArrowRight", 39)
    assert await screen.run("document.querySelector('.sums').textContent") == "reward +1 · return so far +1"
    assert await screen.ends() == ["The end: terminated after 3 steps, return +1, success."]
    await screen.press("ArrowLeft", 37)
    assert await screen.states() == ["state 0.1"]
    steps = [("last", "0.2"), ("next", "0.2"), ("back", "0.1"), ("first", "0.0"), ("back", "0.0"), ("next", "0.1")]
    for button, state in steps:
        await screen.click(f"#{button}")
        assert await screen.states() == [f"state {state}"]
    await screen.set("text", "at last")
    await screen.click("#episodes tr:nth-child(1)")
    assert await screen.states() == ["state 0.2"]  # where the text stands
    await screen.set("text", "")
    await screen.set("scrub", "3")
    assert await screen.run("$('place').textContent") == "step 3 of 3"


async def _plays_side_by_side(screen: Screen) -> None:
    await screen.set("against", "b " * 40)
    await screen.set("scrub", "4")
    assert await screen.states() == ["state 0.2", "state 0.3"]  # one has ended, the other goes on
    assert len(await screen.ends()) == 1
    await screen.click("#first")
    await screen.set("speed", "0.5")
    await screen.press(" ", 32)
    assert await screen.run("$('play').textContent") == "pause"
    await screen.set("speed", "8")
    await screen.wait("$('place').textContent === 'step 5 of 5' && $('play').textContent === 'play'")
    assert await screen.states() == ["state 0.2", "state 0.4"]
    await screen.click("#episodes tr:nth-child(3)")
    assert await screen.states() == ["state 2.0"]
    assert "holds no episode of it with index 3" in await screen.run("$('panes').textContent")


async def _is_found_again(screen: Screen, url: str) -> None:
    await screen.set("result", "won")
    await screen.click("#episodes tr:nth-child(1)")
    await screen.click("#next")
    await screen.wait("location.hash.includes('step=2')")
    kept = await screen.run("location.hash")
    assert kept.startswith("#scenario=frozen-lake&agent=a&index=1&step=2")
    await screen.open(url + kept)
    assert await screen.states() == ["state 0.1", "state 0.1"]
    assert await screen.indices() == ["1", "1", "2"]
    await screen.run("location.hash = '#scenario=frozen-lake&agent=a&index=3&step=2'")
    await screen.wait("document.querySelector('.state').textContent === 'state 2.1'")
    assert await screen.indices() == ["1", "2", "3", "1", "2"]
    await screen.run("location.hash = '#scenario=frozen-lake&agent=a&index=9&step=2'")
    await screen.wait("$('count').textContent.endsWith('The episode of the link is not in this file.')")


async def _fits_a_phone(screen: Screen) -> None:
    await screen.set("against", "b " * 40)
    await screen.run("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    for width in (1200, 400):
        assert await screen.width(width) <= width
    await screen.set("scenario", SNAKE)
    assert await screen.width(400) <= 400
