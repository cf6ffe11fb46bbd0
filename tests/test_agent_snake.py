"""Snake: what must hold in every game, and the simultaneous moves one by one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msgrpo.game import Outcome
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.games.search import best_snake_actions, bit, layers, snake_scores, steps_to
from msgrpo.games.snake import DELTA, Cell, Snake, ahead

SNAKES = [s.id for s in SCENARIOS.values() if s.family == "snake"]
MOVES = st.lists(st.tuples(*[st.sampled_from([*DELTA, None])] * 2), min_size=1, max_size=100)


@given(id=st.sampled_from(SNAKES), start=st.integers(0, 10**6), chance=st.integers(0, 10**6), moves=MOVES)
def test_invariants(id: str, start: int, chance: int, moves: list[tuple[str | None, str | None]]) -> None:
    game = get_scenario(id).new(start, chance)
    assert isinstance(game, Snake)
    for pair in moves:
        if game.outcome is not Outcome.PLAYING:
            break
        before = {name: len(body) for name, body in game.bodies.items()}
        rewards = game.step(dict(zip(game.players, pair, strict=False)))
        cells = [cell for body in game.bodies.values() for cell in body]
        items = [cell for found in game.items.values() for cell in found]
        assert len(set(cells + items)) == len(cells) + len(items), "nothing overlaps"
        assert all(game.inside(cell) for cell in cells + items)
        for item in game.setting.items:
            assert len(game.items[item.name]) == item.count, "what is eaten comes back"
        for name, body in game.bodies.items():
            assert len(body) in (0, before[name], before[name] + 1)
            assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1 for a, b in pairwise(body))
        for player, reward in rewards.items():
            if not game.alive(player):
                assert reward == game.setting.death
            else:
                assert (reward != 0) == (len(game.bodies[player]) == before[player] + 1)


def duel(bodies: dict[str, list[Cell]], apples: list[Cell] | None = None) -> Snake:
    game = get_scenario("snake-duel").new(0, 0)
    assert isinstance(game, Snake)
    game.bodies = bodies
    game.items = {"apple": apples or [(9, 9), (9, 8), (9, 7), (9, 6), (9, 5)]}
    return game


def test_two_heads_on_one_cell_both_die() -> None:
    game = duel({"snake1": [(1, 1)], "snake2": [(3, 1)]})
    assert game.step({"snake1": "right", "snake2": "left"}) == {"snake1": -1.0, "snake2": -1.0}
    assert game.outcome is Outcome.TERMINATED


def test_who_dies_on_an_apple_does_not_eat_it() -> None:
    apples = [(2, 1), (9, 8), (9, 7), (9, 6), (9, 5)]
    game = duel({"snake1": [(1, 1)], "snake2": [(3, 1)]}, list(apples))
    assert game.step({"snake1": "right", "snake2": "left"}) == {"snake1": -1.0, "snake2": -1.0}
    assert game.items == {"apple": apples}


def test_two_heads_that_change_places_both_die() -> None:
    game = duel({"snake1": [(1, 1)], "snake2": [(2, 1)]})
    assert game.step({"snake1": "right", "snake2": "left"}) == {"snake1": -1.0, "snake2": -1.0}


def test_a_tail_that_is_about_to_leave_is_free() -> None:
    game = duel({"snake1": [(2, 2)], "snake2": [(4, 2), (3, 2)]})
    assert game.step({"snake1": "right", "snake2": "right"}) == {"snake1": 0.0, "snake2": 0.0}
    assert game.bodies == {"snake1": [(3, 2)], "snake2": [(5, 2), (4, 2)]}


def test_a_tail_that_stays_because_its_snake_eats_kills() -> None:
    game = duel({"snake1": [(2, 2)], "snake2": [(4, 2), (3, 2)]}, [(5, 2), (9, 8), (9, 7), (9, 6), (9, 5)])
    assert game.step({"snake1": "right", "snake2": "right"}) == {"snake1": -1.0, "snake2": 1.0}
    assert game.bodies["snake2"] == [(5, 2), (4, 2), (3, 2)]


@pytest.mark.parametrize("chance", range(6))
def test_an_enemy_follows_its_own_tail_where_nothing_else_is_free(chance: int) -> None:
    game = get_scenario("snake").new(0, chance)
    assert isinstance(game, Snake)
    game.bodies = {"snake1": [(8, 5)], "enemy1": [(0, 0), (1, 0), (1, 1), (0, 1)]}
    game.items = {"apple": [(9, 9), (9, 8), (9, 7), (9, 6), (9, 5)]}
    game.step({"snake1": "up"})
    assert game.bodies["enemy1"] == [(0, 1), (0, 0), (1, 0), (1, 1)]


def test_a_dead_enemy_disappears_and_the_game_goes_on() -> None:
    game = get_scenario("snake").new(0, 0)
    assert isinstance(game, Snake)
    game.bodies = {"snake1": [(8, 5)], "enemy1": [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0)]}  # nowhere to go
    game.items = {"apple": [(9, 9), (9, 8), (9, 7), (9, 6), (9, 5)]}
    assert game.step({"snake1": "up"}) == {"snake1": 0.0}
    assert (game.outcome, game.bodies["enemy1"], game.falls) == (Outcome.PLAYING, [], {})
    assert "Enemy snake 2: dead." in game.observe("snake1")


def test_walls_and_the_own_body_kill() -> None:
    assert duel({"snake1": [(0, 0)], "snake2": [(5, 5)]}).step({"snake1": "left", "snake2": "up"})["snake1"] == -1
    looped: list[Cell] = [(1, 1), (1, 2), (2, 2), (2, 1), (3, 1)]
    assert duel({"snake1": looped, "snake2": [(8, 8)]}).step({"snake1": "right", "snake2": "up"})["snake1"] == -1


def test_no_action_keeps_the_heading() -> None:
    game = duel({"snake1": [(1, 1)], "snake2": [(8, 1)]})
    game.step({"snake1": "right", "snake2": None})
    game.step({"snake1": None, "snake2": None})
    assert game.bodies == {"snake1": [(3, 1)], "snake2": [(8, 3)]}


def test_the_scores_of_the_search_player_by_hand() -> None:
    game = get_scenario("snake-poison-apple-and-banana").new(0, 0)
    assert isinstance(game, Snake)
    game.bodies = {"snake1": [(0, 0)], "enemy1": [(2, 0)]}
    game.items = {"apple": [(0, 1), (3, 3)], "banana": [(1, 0)]}
    # right: a banana, and one of the enemy's three ways; up: an apple, and the banana two steps on around the corner
    walls = {"down": -9.0, "left": -9.0}
    assert snake_scores(game, "snake1") == pytest.approx(walls | {"right": 1 - 0.5, "up": -1 + 0.6**2})
    solo = get_scenario("snake-solo").new(0, 0)
    assert isinstance(solo, Snake)
    solo.bodies, solo.items = {"snake1": [(1, 0), (1, 1), (0, 1), (0, 2)]}, {"apple": [(3, 0)]}
    scores = {"up": -9.0, "down": -9.0, "left": -1.0, "right": 0.6}  # left: a single cell
    assert snake_scores(solo, "snake1") == pytest.approx(scores)
    solo.bodies, solo.items = {"snake1": [(1, 1), (1, 0), (0, 0), (0, 1)]}, {"apple": [(0, 5)]}
    assert snake_scores(solo, "snake1")["left"] == pytest.approx(0.6**4)  # the tail leaves
    solo.bodies, solo.items = {"snake1": [(5, 5)]}, {"apple": [(5, 7)]}
    assert snake_scores(solo, "snake1")["down"] == pytest.approx(0.6**5)  # around where it was
    assert best_snake_actions(solo, "snake1") == ["up"]  # the others come to it as well, later


def test_a_board_and_an_ending_by_hand() -> None:
    game = duel({"snake1": [(2, 2), (1, 2)], "snake2": [(4, 0)]})
    board = game.board()
    assert board.chains == (((7, 2), (7, 1)), ((9, 4),))
    assert board.facing == {(7, 2): "up", (9, 4): "up"}
    assert [board.roles[glyph] for glyph in "1o2xA"] == ["own", "own-body", "other", "other-body", "good"]
    poison = get_scenario("snake-poison-apple").new(0, 0).board()
    assert poison is not None
    assert poison.roles["A"] == "bad"
    game.steps = game.step_limit - 1
    game.step({"snake1": None, "snake2": None})
    assert (game.outcome, game.ending) == (Outcome.TRUNCATED, "all steps played")


@pytest.mark.parametrize("id", SNAKES)
def test_start_and_luck_are_apart(id: str) -> None:
    scenario = get_scenario(id)
    starts = {scenario.new(5, chance).observe(scenario.players[0]) for chance in range(5)}
    assert len(starts) == 1
    assert len({scenario.new(start, 5).observe(scenario.players[0]) for start in range(5)}) == 5


def test_luck_differs_between_chance_seeds() -> None:
    def enemy_path(chance: int) -> list[Cell]:
        game = get_scenario("snake").new(1, chance)
        assert isinstance(game, Snake)
        seen = []
        for _ in range(3):
            if game.outcome is Outcome.PLAYING:
                game.step({"snake1": None})
                seen += game.bodies["enemy1"][:1]
        return seen

    assert len({tuple(enemy_path(chance)) for chance in range(8)}) > 1


@given(st.integers(1, 12), st.data())
def test_layers_are_those_of_a_walk_from_cell_to_cell(size: int, data: st.DataObject) -> None:
    """One cell after the other; without the masks a step would go on at the other side of the board."""
    cells = [(x, y) for x in range(size) for y in range(size)]
    source = data.draw(st.sampled_from(cells))
    blocked = data.draw(st.sets(st.sampled_from(cells), max_size=size * size // 2))
    steps, queue = {source: 0}, [source]
    for cell in queue:
        for following in (ahead(cell, action) for action in DELTA):
            if following in cells and following not in blocked and following not in steps:
                steps[following] = steps[cell] + 1
                queue.append(following)
    reached = layers(size, source, blocked)
    assert {cell: found for cell in cells if (found := steps_to(reached, bit(size, cell))) is not None} == steps
