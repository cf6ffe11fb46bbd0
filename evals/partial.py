"""Answered turns of unfinished episodes, written as they come, so that a kill loses none."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Set
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from msgrpo.episode import Episode, Turn, observation_of, pay_late
from msgrpo.errors import GameError, RecordError, first_fault, unknown_names
from msgrpo.evals.record import as_recorded
from msgrpo.evals.suites import EpisodeSeeds
from msgrpo.files import read_regular, replace_text
from msgrpo.game import Game
from msgrpo.text import Clean

TURNS = TypeAdapter(list[Turn])
PREFIX = TypeAdapter(dict[Clean, Clean])
Begun = dict[EpisodeSeeds, list[list[Turn]]]  # the turns of each step


class Partial:
    """The file beside a record: who answered how (`settings`, and the prompt's prefix), then one line for each step.

    Whoever holds the record's lock writes it. Turns of episodes that are `done`, which grows as they end, are not
    taken up. Raises RecordError for turns of others that were answered under other settings, or that a later version
    wrote. A damaged line, as the last one of a killed writer is, ends what is read.
    """

    def __init__(self, record: Path, settings: dict[str, Any], done: Set[EpisodeSeeds]) -> None:
        self.path = record.with_suffix(".turns")
        self._settings = as_recorded(settings)
        self._prefix: dict[str, str] = {}
        self._begun: Begun = defaultdict(list)
        self._written: set[EpisodeSeeds] = set()
        self._file: int | None = None
        self._done = done
        self._read()

    def _read(self) -> None:
        try:
            lines = read_regular(self.path).split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise RecordError(f"{self.path} cannot be read: {error.strerror}") from error
        try:
            head = from_json(lines[0])
            same = head["settings"] == self._settings
            self._prefix = PREFIX.validate_python(head["prefix"])
            for line in filter(None, lines[1:]):
                turns_so_far = from_json(line)
                seeds = EpisodeSeeds(*map(int, turns_so_far["seeds"]))
                if seeds in self._done:
                    continue
                if not same:
                    raise RecordError(
                        f"{self.path} holds answers that were given under other settings",
                        fix="use the same options, or give another --out, or remove it",
                    )
                self._begun[seeds].append(TURNS.validate_python(turns_so_far["turns"]))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            if isinstance(error, ValidationError) and unknown_names(error):
                raise RecordError(
                    f"{self.path} is of another version of msgrpo: {first_fault(error, 'a step')}",
                    fix="go on with the msgrpo that wrote it; or remove it, and what it holds is asked again",
                ) from error

    def take_up(self, seeds: EpisodeSeeds, game: Game, episode: Episode) -> None:
        """Bring game and episode to where they were when the evaluation was interrupted, as far as that replays."""
        for turns in self._begun.get(seeds, []):
            seen = {player: observation_of(game, player) for player in game.to_move}
            try:
                if {turn.player: turn.state for turn in turns} != seen:
                    return
                rewards = game.step({turn.player: turn.action for turn in turns})
            except GameError:
                return
            pay_late(episode, rewards, set(seen))  # a step is written before what comes later is known
            episode.turns += [turn.model_copy(update={"late": 0.0}) for turn in turns]
            episode.prefix = dict(self._prefix)
            episode.outcome, episode.success, episode.returns = game.outcome, game.success, dict(game.returns)

    def add(self, seeds: EpisodeSeeds, episode: Episode) -> None:
        """Write the last step of an episode if a language model answered it."""
        last = [turn for turn in episode.turns if turn.step == episode.turns[-1].step]
        if any(turn.answer is not None for turn in last):
            self._prefix = episode.prefix
            self._write(seeds, last)
            self._written.add(seeds)

    def _write(self, seeds: EpisodeSeeds, turns: list[Turn]) -> None:
        try:
            if self._file is None:
                self._begin()
            assert self._file is not None
            os.write(self._file, _line(seeds, turns).encode())
        except OSError as error:
            raise RecordError(
                f"{self.path} cannot be written: {error.strerror}",
                fix="make it writable and start the same command again; finished episodes stay",
            ) from error

    def _begin(self) -> None:
        """Rewrite the file: the head, and only the turns that are still needed."""
        head = json.dumps({"settings": self._settings, "prefix": self._prefix}) + "\n"
        kept = (_line(seeds, turns) for seeds, steps in self._begun.items() for turns in steps)
        replace_text(self.path, head + "".join(kept))
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def close(self, *, ended: bool) -> None:
        """Close the file, and delete it if the evaluation has ended and all episodes in it are done: a longer one may
        have begun others, and a game that takes too long too often ends none of its own.
        """
        if self._file is not None:
            os.close(self._file)
        if ended and self._begun.keys() | self._written <= self._done:
            self.path.unlink(missing_ok=True)


def _line(seeds: EpisodeSeeds, turns: list[Turn]) -> str:
    return json.dumps({"seeds": seeds, "turns": [turn.model_dump(mode="json") for turn in turns]}) + "\n"
