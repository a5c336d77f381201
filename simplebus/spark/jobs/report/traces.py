"""Trace of a run: messages sent, delivered and acknowledged, with times.

A row is a call, not a message: a write of messages 200 to 299 of a class is one row. So a trace of
millions of messages is small and cheap to write. A message is identified by its class and its
number, counted from 0 within a run in sending order. The times of one run come from one clock, or
from synchronized clocks; latencies are only as accurate as those.

    column      type    content
    scenario    string  the workload; runs are compared within one
    variant     string  the bus, a peer, or another setting
    round       int     number of the repetition; medians are over rounds
    process     string  writer of the row; any name
    subscriber  string  the subscriber; null for a publisher's rows
    kind        string  sent         the call that sent the last byte of these messages started
                        confirmed    the bus confirmed them; for a subscriber: its acks
                        delivered    the subscriber received and verified them
                        redelivered  the same, marked as redelivered
                        acked        the call that acked them returned
    class       string  name or id
    at          long    nanoseconds since the start of the run
    first       long    number of the first message
    last        long    number after the last message: first <= last

`simplebus pipeline report` reads such rows as Parquet, from any program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from simplebus.spark.jobs.report.ranges import Integers, TimedRanges

KINDS = ("sent", "confirmed", "delivered", "redelivered", "acked")
SUBSCRIBER_KINDS = ("delivered", "redelivered", "acked")
"""Kinds that only a subscriber writes."""
COLUMNS = {
    "scenario": "string",
    "variant": "string",
    "round": "int",
    "process": "string",
    "subscriber": "string",
    "kind": "string",
    "class": "string",
    "at": "bigint",
    "first": "bigint",
    "last": "bigint",
}
"""Names and Spark types, in order."""
DDL = ", ".join(f"`{name}` {kind}" for name, kind in COLUMNS.items())
RUN_FILE = "_run.json"
"""File beside the traces with machine, versions and command of the run."""


class TraceError(ValueError):
    """Invalid trace."""


def check_columns(found: Mapping[str, str], *, place: str) -> None:
    """Raise TraceError unless a table has the columns of a trace. Further columns are allowed."""
    for name, kind in COLUMNS.items():
        if name not in found:
            columns = ", ".join(found) or "none"
            raise TraceError(f"{place} is not a trace: it has no column {name!r}, only {columns}")
        if found[name] != kind:
            raise TraceError(
                f"{place} is not a trace: its column {name!r} is {found[name]}, expected {kind}"
            )


@dataclass(frozen=True, slots=True)
class TraceRows:
    """Rows of a trace; arrays of equal length, with texts as indexes."""

    kinds: tuple[str, ...]
    kind: Integers
    """Index into kinds."""
    subscribers: tuple[str, ...]
    subscriber: Integers
    """Index into subscribers; -1 for none."""
    ranges: TimedRanges

    def of(self, kind: str, subscriber: int | None = None) -> TimedRanges:
        """Return the ranges of one kind; of all subscribers if `subscriber` is None."""
        is_selected = self.kind == (self.kinds.index(kind) if kind in self.kinds else -1)
        if subscriber is not None:
            is_selected &= self.subscriber == subscriber
        return self.ranges[is_selected]

    def check(self, group: str) -> None:
        """Raise TraceError that quotes the first invalid row."""
        is_known_kind = np.array([kind in KINDS for kind in self.kinds], bool)[self.kind]
        is_subscriber_kind = np.array([kind in SUBSCRIBER_KINDS for kind in self.kinds], bool)[
            self.kind
        ]
        sent = np.array([kind == "sent" for kind in self.kinds], bool)[self.kind]
        at, first, last = self.ranges.at, self.ranges.first, self.ranges.last
        for bad, expected in (
            (~is_known_kind, f"a kind, one of {', '.join(KINDS)}"),
            (at < 0, "a time from 0 on"),
            ((first < 0) | (first > last), "0 <= first <= last"),
            (is_subscriber_kind & (self.subscriber < 0), "a subscriber"),
            (sent & (self.subscriber >= 0), "no subscriber, for a publisher sends"),
        ):
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                by = self.subscribers[self.subscriber[i]] if self.subscriber[i] >= 0 else "none"
                raise TraceError(
                    f"the trace of {group} has a row {self.kinds[self.kind[i]]!r} at {at[i]} ns, "
                    f"{first[i]} to {last[i]}, subscriber {by}; expected {expected}"
                )
