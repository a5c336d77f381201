"""The server's statistics for people: a live table in a terminal, plain lines elsewhere.

Rule 1: what is shown is computed by `rates`, which is pure; a display only draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from simplebus.core.statistics import BrokerStatistics


@dataclass(frozen=True, slots=True)
class ClassRates:
    """What happened to one class, per second, and where it stands."""

    class_id: int
    subscribers: int
    sent: float
    """Published by its publisher."""
    delivered: float
    """To all subscribers together, for the first time."""
    redelivered: float
    acknowledged: float
    in_flight: int
    """Delivered, not acknowledged yet."""
    stored: int
    """Kept for whoever still needs them."""


def rates(
    before: BrokerStatistics, now: BrokerStatistics, seconds: float
) -> tuple[ClassRates, ...]:
    """What happened between two snapshots."""
    former = {c.class_id: c for c in before.classes}
    rows = []
    for c in sorted(now.classes, key=lambda c: c.class_id):
        was = former.get(c.class_id)
        rows.append(
            ClassRates(
                class_id=c.class_id,
                subscribers=len(c.subscriptions),
                sent=(c.published - (was.published if was else 0)) / seconds,
                delivered=(c.delivered - (was.delivered if was else 0)) / seconds,
                redelivered=(c.redelivered - (was.redelivered if was else 0)) / seconds,
                acknowledged=(c.acknowledged - (was.acknowledged if was else 0)) / seconds,
                in_flight=c.in_flight,
                stored=c.ring.message_count,
            )
        )
    return tuple(rows)


def table(rows: Sequence[ClassRates], second: float) -> Table:
    """The rates as a table."""
    drawn = Table(
        title=f"second {second:.1f}, messages per second",
        title_justify="left",
        title_style="dim",
        box=box.SIMPLE,
        padding=0,
    )
    drawn.add_column("class")
    for name in ("subscribers", "sent", "delivered", "redelivered", "acknowledged"):
        drawn.add_column(name, justify="right", min_width=len(name))
    for name in ("in flight", "stored"):
        drawn.add_column(name, justify="right", min_width=len(name))
    for row in rows:
        drawn.add_row(
            str(row.class_id),
            str(row.subscribers),
            f"{row.sent:,.0f}",
            f"{row.delivered:,.0f}",
            Text(f"{row.redelivered:,.0f}", style="yellow" if row.redelivered else ""),
            f"{row.acknowledged:,.0f}",
            f"{row.in_flight:,}",
            f"{row.stored:,}",
        )
    return drawn


def line(row: ClassRates, second: float) -> str:
    """The rates of one class as a line."""
    return (
        f"{second:5.1f} s  class {row.class_id}: {row.sent:,.0f} sent/s, "
        f"{row.delivered:,.0f} delivered/s, {row.acknowledged:,.0f} acknowledged/s, "
        f"{row.redelivered:,.0f} redelivered/s, {row.in_flight:,} in flight, {row.stored:,} stored"
    )


class Display(Protocol):
    """Where the demo shows what it does. Enter it while the demo runs."""

    interval: float
    """Seconds between two updates."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def event(self, text: str, *, second: float) -> None:
        """Something was done, or noticed."""

    def update(self, rows: Sequence[ClassRates], *, second: float) -> None:
        """How things stand."""


class LiveDisplay:
    """For a terminal: a table that is drawn again in place, events scrolling by above it."""

    interval = 0.25

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def event(self, text: str, *, second: float) -> None:
        self._console.print(Text.assemble((f"{second:5.1f} s  ", "dim"), text))

    def update(self, rows: Sequence[ClassRates], *, second: float) -> None:
        self._live.update(table(rows, second), refresh=True)


class PlainDisplay:
    """For pipes and files: a line for each event, and one for each class once a second."""

    interval = 1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def event(self, text: str, *, second: float) -> None:
        print(f"{second:5.1f} s  {text}", flush=True)

    def update(self, rows: Sequence[ClassRates], *, second: float) -> None:
        for row in rows:
            print(line(row, second), flush=True)
