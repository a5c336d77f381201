"""Display of the server's statistics: a live table on a terminal, otherwise plain lines."""

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
    """Rates and state of one class."""

    class_id: int
    subscribers: int
    sent: float
    """Messages published per second."""
    delivered: float
    """First deliveries per second, to all subscribers."""
    redelivered: float
    acknowledged: float
    in_flight: int
    """Delivered but not yet acked."""
    stored: int
    """Messages in the ring."""


def compute_rates(
    before: BrokerStatistics, now: BrokerStatistics, seconds: float
) -> tuple[ClassRates, ...]:
    """Return the rates between two snapshots."""
    previous = {c.class_id: c for c in before.classes}
    rows = []
    for c in sorted(now.classes, key=lambda c: c.class_id):
        was = previous.get(c.class_id)
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


def build_table(rows: Sequence[ClassRates], second: float) -> Table:
    """Return the rates as a table."""
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


def format_line(row: ClassRates, second: float) -> str:
    """Return the rates of one class as a line."""
    return (
        f"{second:5.1f} s  class {row.class_id}: {row.sent:,.0f} sent/s, "
        f"{row.delivered:,.0f} delivered/s, {row.acknowledged:,.0f} acknowledged/s, "
        f"{row.redelivered:,.0f} redelivered/s, {row.in_flight:,} in flight, {row.stored:,} stored"
    )


class DemoDisplay(Protocol):
    """Output of the demo; a context manager."""

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
        """Show an event."""

    def update(self, rows: Sequence[ClassRates], *, second: float) -> None:
        """Show the current rates."""


class LiveDisplay:
    """Terminal output: a table redrawn in place, with events above it."""

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
        self._live.update(build_table(rows, second), refresh=True)


class PlainDisplay:
    """Output for pipes and files: a line per event, and one per class every second."""

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
            print(format_line(row, second), flush=True)
