"""What one program shows: its facts as they are, and how they have changed each second.

Rule 1: whoever looks, and however many they are, the facts are told once per look; a look is as
good as new for a short while.
Rule 2: sentences are told only while somebody reads them.

    tick ─► facts ─► rates of the last minutes ─┐
    who asks ─► facts, unless they are fresh ───┴─► /facts, /metrics
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from simplebus.monitor import page
from simplebus.monitor.exposition import Exposition
from simplebus.monitor.facts import Facts, Health, Teller, Telling, tell
from simplebus.monitor.requests import Answer, Answering, Request, Response, Routes, health_answers

TICK_SECONDS = 1.0
KEPT_TICKS = 180
FRESH_SECONDS = 0.5
"""How long a look is as good as new."""
READERS_SECONDS = 5.0
"""How long somebody who has read the sentences is believed to want them again."""
_METRICS_AT_ONCE = 4


class Rates(msgspec.Struct, frozen=True):
    """How fast everything went, second by second."""

    first: int
    """The number of the first one: they are numbered as long as the program runs."""
    seconds: list[float]
    """How long each was."""
    flows: dict[str, list[float | None]]
    """Per second, by what it is; None where it was not there."""


class Board:
    """Of one program."""

    def __init__(self, teller: Teller, health: Callable[[], Health] | None = None) -> None:
        """`health` tells it at any time; without it, it is as of the last look."""
        self._teller = teller
        self._ask_health = health
        self._facts: Facts | None = None
        self._told_at = float("-inf")
        self._is_detailed = False
        self._read_at = float("-inf")
        self._exposition = Exposition()
        self._encoded: tuple[Facts, bytes] | None = None
        self._rates: deque[tuple[float, dict[str, float]]] = deque(maxlen=KEPT_TICKS)
        self._before: tuple[float, Mapping[str, float]] | None = None
        self._ticks = 0
        self.now = 0.0
        """In seconds, from whenever. The driver sets it before it asks for anything."""

    def tick(self) -> Telling:
        """Once per second, in pieces: how far has everything come?"""
        at = self.now
        is_read = at - self._read_at < READERS_SECONDS
        facts = yield from self._look(detailed=is_read)
        if self._before is not None and at > self._before[0]:
            passed, before = at - self._before[0], self._before[1]
            rates = {
                name: max(0.0, value - before[name]) / passed
                for name, value in facts.flows.items()
                if name in before
            }
            self._rates.append((passed, rates))
            self._ticks += 1
        self._before = at, facts.flows
        return facts

    def look(self, *, detailed: bool) -> Telling:
        """The facts, in pieces, as they are or have just been."""
        if detailed:
            self._read_at = self.now
        is_fresh = self.now - self._told_at < FRESH_SECONDS
        if self._facts is not None and is_fresh and (self._is_detailed or not detailed):
            yield
            return self._facts
        return (yield from self._look(detailed=detailed))

    def _look(self, *, detailed: bool) -> Telling:
        at = self.now
        facts = yield from tell(self._teller, detailed=detailed)
        self._facts, self._told_at, self._is_detailed = facts, at, detailed
        return facts

    def rates(self, since: int = 0) -> Rates:
        """Of the last minutes, from the second with this number on."""
        first = max(self._ticks - len(self._rates), min(since, self._ticks))
        kept = list(self._rates)[len(self._rates) - (self._ticks - first) :]
        names = dict.fromkeys(name for _, rates in kept for name in rates)
        return Rates(
            first,
            [round(seconds, 3) for seconds, _ in kept],
            {
                name: [None if (rate := r.get(name)) is None else round(rate, 1) for _, r in kept]
                for name in names
            },
        )

    def health(self) -> Health:
        """Whether the program takes work."""
        if self._ask_health is not None:
            return self._ask_health()
        return (
            self._facts.health if self._facts is not None else Health(ready=False, why="starting")
        )

    # Answers -------------------------------------------------------------------------------------

    def routes(self, more: Mapping[str, Answer] | None = None) -> Routes:
        """Every path, and who answers it; `more` are the program's own."""
        own: dict[str, Answer] = {
            **page.answers(),
            **health_answers(self.health),
            "/facts": self._answer_facts,
            "/metrics": self._answer_metrics,
        }
        return Routes({**own, **(more or {})})

    def _answer_facts(self, request: Request) -> Answering:
        """What the page and `simplebus top` are made of. `since` leaves out the seconds before."""
        since = request.number("since", 0, most=1 << 53)
        facts = yield from self.look(detailed=True)
        if self._encoded is None or self._encoded[0] is not facts:
            self._encoded = facts, msgspec.json.encode(_without_metrics(facts))
        said = {"facts": msgspec.Raw(self._encoded[1]), "rates": self.rates(since)}
        return Response(msgspec.json.encode(said))

    def _answer_metrics(self, request: Request) -> Answering:
        facts = yield from self.look(detailed=False)
        kind, lines = self._exposition.of(facts.metrics, request.accept)
        parts: list[bytes] = []
        for count, part in enumerate(lines):
            parts.append(part)
            if count % _METRICS_AT_ONCE == _METRICS_AT_ONCE - 1:
                yield
        return Response(b"".join(parts), kind)


def _without_metrics(facts: Facts) -> Facts:
    return msgspec.structs.replace(facts, metrics=[])
