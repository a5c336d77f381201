"""What a trace says: which messages were sent, delivered and acknowledged, and when.

Rule 1: a row is a call, not a message: a write that took messages 200 to 299 of a class is one
row. A trace of many million messages is small, and costs who writes it next to nothing.
Rule 2: a message is known by its class and its number in it. Numbers count from 0 within one run,
in the order in which the class's messages were sent, and are the same for all who write of them.
Rule 3: times of one run come from one clock: that of the machine, or clocks that are kept in step.
What the report says of latency is worth no more than that.
Rule 4: no Spark here. `check_columns` looks at names and types, `Rows.check` at values.

    column      type    what it says
    scenario    string  what was done; runs are compared within one
    variant     string  by whom: the bus, a peer, another setting
    round       int     the how manieth time; medians and spreads are over rounds
    process     string  who wrote this row; any name
    subscriber  string  whose row this is; null for what a publisher says of its messages
    kind        string  sent         the call that sent the last byte of these messages began
                        confirmed    the bus said that it has them; to a subscriber: their acks
                        delivered    the subscriber has them, checked
                        redelivered  the same, and they were marked as coming again
                        acked        the call that acknowledged them had returned
    class       string  name or id
    at          long    nanoseconds since the run began
    first       long    number of the first message
    last        long    number behind the last one: first <= last

`simplebus pipeline report` reads such rows as Parquet, whichever program wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from simplebus.spark.jobs.report.ranges import Integers, Ranges

KINDS = ("sent", "confirmed", "delivered", "redelivered", "acked")
HEARD = ("delivered", "redelivered", "acked")
"""What only a subscriber can say."""
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
"""Names and Spark's types, in order."""
DDL = ", ".join(f"`{name}` {kind}" for name, kind in COLUMNS.items())
RUN_FILE = "_run.json"
"""Beside the traces: on which machine, with which versions and by which command they were made."""


class TraceError(ValueError):
    """This is no trace. The text is one sentence."""


def check_columns(found: Mapping[str, str], *, where: str) -> None:
    """Whether columns with these types are a trace; more of them do no harm. Raises TraceError."""
    for name, kind in COLUMNS.items():
        if name not in found:
            there = ", ".join(found) or "none"
            raise TraceError(f"{where} is no trace: it has no column {name!r}; there are {there}")
        if found[name] != kind:
            raise TraceError(
                f"{where} is no trace: its column {name!r} is {found[name]}, expected {kind}"
            )


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a trace: texts as indexes into what there is of them. Arrays of one length."""

    kinds: tuple[str, ...]
    kind: Integers
    """Index into kinds."""
    subscribers: tuple[str, ...]
    subscriber: Integers
    """Index into subscribers; -1 for none."""
    ranges: Ranges

    def of(self, kind: str, subscriber: int | None = None) -> Ranges:
        """The ranges of one kind, of all or of one subscriber."""
        which = self.kind == (self.kinds.index(kind) if kind in self.kinds else -1)
        if subscriber is not None:
            which &= self.subscriber == subscriber
        return self.ranges[which]

    def check(self, group: str) -> None:
        """Whether they make sense. Raises TraceError that quotes the first that does not."""
        known = np.array([kind in KINDS for kind in self.kinds], bool)[self.kind]
        heard = np.array([kind in HEARD for kind in self.kinds], bool)[self.kind]
        sent = np.array([kind == "sent" for kind in self.kinds], bool)[self.kind]
        at, first, last = self.ranges.at, self.ranges.first, self.ranges.last
        for bad, expected in (
            (~known, f"a kind, one of {', '.join(KINDS)}"),
            (at < 0, "a time from 0 on"),
            ((first < 0) | (first > last), "0 <= first <= last"),
            (heard & (self.subscriber < 0), "a subscriber"),
            (sent & (self.subscriber >= 0), "no subscriber, for a publisher sends"),
        ):
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                by = self.subscribers[self.subscriber[i]] if self.subscriber[i] >= 0 else "nobody"
                raise TraceError(
                    f"the trace of {group} has a row {self.kinds[self.kind[i]]!r} at {at[i]} ns, "
                    f"{first[i]} to {last[i]}, subscriber {by}; expected {expected}"
                )
