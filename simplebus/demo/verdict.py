"""Verdict of the demo: comparison of published messages with subscribers' receipts. No I/O.

A message may arrive more than once only if it is marked as redelivered, or at a process that
replaced a killed one. Everything else is a fault.

    run 1    due from 0  ├────────────────── killed: its receipts count
    run 2                  due from n ├───────────────────────────────── up to the last message
                           └ after the end of run 1: lost, unless another subscriber has the class
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simplebus.core.broker.wait_reasons import format_count
from simplebus.demo.records import CORRUPT, Receipts, has_expected_id

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SubscriberRun:
    """One process of a subscriber, from its subscriptions to its end."""

    subscriber: str
    first_due: Mapping[int, int]
    """First message due to the process, by class: the cursor at its subscription."""
    receipts: Receipts
    """Receipts that the process wrote."""
    was_killed: bool = False
    """True if the process was killed; another run of the subscriber must follow."""


@dataclass(frozen=True, slots=True)
class DeliveryAccount:
    """Deliveries of one class to a subscriber, over all its runs."""

    subscriber: str
    class_id: int
    due: int
    """Messages due to the subscriber."""
    received: int
    """Due messages that arrived."""
    redelivered: int
    """Repetitions marked as redelivered."""
    inherited: int
    """Repetitions at a new process, because the killed one had not acked them."""

    @property
    def lost(self) -> int:
        return self.due - self.received


@dataclass(frozen=True, slots=True)
class DemoVerdict:
    """Result of the demo."""

    sent: Mapping[int, int]
    """Messages published, by class."""
    accounts: tuple[DeliveryAccount, ...]
    faults: tuple[str, ...]
    """One sentence per fault; empty if the demo passed."""

    @property
    def has_passed(self) -> bool:
        return not self.faults

    @property
    def lost(self) -> int:
        return sum(account.lost for account in self.accounts)

    @property
    def duplicates(self) -> int:
        """Allowed repetitions."""
        return sum(account.redelivered + account.inherited for account in self.accounts)


def evaluate_runs(
    *,
    sent: Mapping[int, int],
    runs: Sequence[SubscriberRun],
    redelivered_by_server: Mapping[int, int],
    withholding: Collection[str] = (),
) -> DemoVerdict:
    """Compare receipts with published messages.

    Args:
        sent: Messages published, by class.
        runs: Runs of all subscribers, in order of time.
        redelivered_by_server: Redeliveries according to the server, by class.
        withholding: Subscribers that left messages unacked on purpose and must get redeliveries.
    """
    faults: list[str] = []
    accounts: list[DeliveryAccount] = []
    for name in dict.fromkeys(run.subscriber for run in runs):
        own_runs = [run for run in runs if run.subscriber == name]
        if own_runs[-1].was_killed:
            faults.append(f"{name} was killed and not restarted")
        for run in own_runs:
            faults += _check_content(run)
        for class_id in dict.fromkeys(c for run in own_runs for c in run.first_due):
            is_shared = any(class_id in run.first_due for run in runs if run.subscriber != name)
            account, found = _account_class(
                name, class_id, own_runs, sent=sent.get(class_id, 0), is_shared=is_shared
            )
            accounts.append(account)
            faults += found
    for class_id in sent:
        marked = sum(a.redelivered for a in accounts if a.class_id == class_id)
        if marked > redelivered_by_server.get(class_id, 0):
            redeliveries = format_count(marked, "redelivery", "redeliveries")
            faults.append(
                f"{redeliveries} of class {class_id} arrived, but the server counted only "
                f"{redelivered_by_server.get(class_id, 0):,}"
            )
    for name in withholding:
        if not any(a.redelivered for a in accounts if a.subscriber == name):
            faults.append(f"{name} left messages unacknowledged and got no redelivery")
    return DemoVerdict(sent=dict(sent), accounts=tuple(accounts), faults=tuple(faults))


def _check_content(run: SubscriberRun) -> list[str]:
    """Return faults of single messages, regardless of order."""
    faults = []
    receipts = run.receipts
    damaged = int(np.count_nonzero(receipts["number"] == CORRUPT))
    if damaged:
        faults.append(
            f"{format_count(damaged, 'message')} to {run.subscriber}: the payload was not published"
        )
    misnamed = np.flatnonzero((receipts["number"] != CORRUPT) & ~has_expected_id(receipts))
    if misnamed.size:
        receipt = receipts[misnamed[0]]
        faults.append(
            f"message {receipt['number']} of class {receipt['class_id']} to {run.subscriber} "
            f"has the wrong id {receipt['message_id']}"
        )
    foreign = set(receipts["class_id"].tolist()) - set(run.first_due)
    for class_id in sorted(foreign):
        faults.append(
            f"{run.subscriber} received messages of class {class_id} without subscribing to it"
        )
    return faults


def _account_class(
    name: str, class_id: int, runs: Sequence[SubscriberRun], *, sent: int, is_shared: bool
) -> tuple[DeliveryAccount, list[str]]:
    """Return a subscriber's account of one class, and its faults."""
    faults: list[str] = []
    due = np.zeros(sent, np.bool_)
    has_arrived = np.zeros(sent, np.bool_)
    redelivered = inherited = 0
    end = None  # End of the messages due to the previous run.
    for run in runs:
        if class_id not in run.first_due:
            continue
        first = run.first_due[class_id]
        if end is not None and not is_shared:
            due[end:first] = True
        receipts = run.receipts[
            (run.receipts["class_id"] == class_id) & (run.receipts["number"] != CORRUPT)
        ]
        numbers: Numbers = receipts["number"]
        unique, positions = np.unique(numbers, return_index=True)
        messages = f"of class {class_id} to {name}"
        faults += _check_bounds(unique, first=first, sent=sent, messages=messages)
        faults += _check_order(numbers[np.sort(positions)], messages)

        is_repeated = np.ones(numbers.size, np.bool_)
        is_repeated[positions] = False
        unmarked = numbers[is_repeated & (receipts["redelivered"] == 0)]
        if unmarked.size:
            faults.append(
                f"message {unmarked[0]} {messages} arrived twice, not marked as redelivered"
                + _and_more(unmarked.size)
            )
        redelivered += int(np.count_nonzero(is_repeated)) - unmarked.size

        unique = unique[unique < sent]
        inherited += int(np.count_nonzero(has_arrived[unique]))
        has_arrived[unique] = True
        end = sent if not run.was_killed else max(first, int(unique[-1]) + 1 if unique.size else 0)
        due[first:end] = True
    lost = np.flatnonzero(due & ~has_arrived)
    if lost.size:
        faults.append(
            f"message {lost[0]} of class {class_id} never arrived at {name}" + _and_more(lost.size)
        )
    account = DeliveryAccount(
        subscriber=name,
        class_id=class_id,
        due=int(np.count_nonzero(due)),
        received=int(np.count_nonzero(due & has_arrived)),
        redelivered=redelivered,
        inherited=inherited,
    )
    return account, faults


def _check_order(firsts: Numbers, messages: str) -> list[str]:
    """Return a fault if first deliveries are out of order."""
    steps = np.flatnonzero(firsts[1:] < firsts[:-1])
    if not steps.size:
        return []
    at = int(steps[0])
    return [
        f"message {firsts[at + 1]} {messages} arrived after message {firsts[at]}, out of order"
        + _and_more(steps.size)
    ]


def _check_bounds(unique: Numbers, *, first: int, sent: int, messages: str) -> list[str]:
    """Return faults for messages before the subscription's start or not published."""
    faults = []
    early = unique[unique < first]
    if early.size:
        faults.append(
            f"message {early[0]} {messages} arrived, but the subscription starts at {first}"
            + _and_more(early.size)
        )
    late = unique[unique >= sent]
    if late.size:
        faults.append(
            f"message {late[0]} {messages} arrived, but was not published" + _and_more(late.size)
        )
    return faults


def _and_more(count: int) -> str:
    return f" (and {count - 1:,} more like it)" if count > 1 else ""


def format_verdict(verdict: DemoVerdict) -> list[str]:
    """Return the lines of the verdict."""
    text = []
    if verdict.sent:
        sent = ", ".join(f"{count:,} to class {c}" for c, count in verdict.sent.items())
        text.append(f"published   {sum(verdict.sent.values()):,} messages: {sent}")
    for a in verdict.accounts:
        line = f"{a.subscriber:<11} class {a.class_id}: received {a.received:,} of {a.due:,}"
        if a.redelivered:
            line += f", {a.redelivered:,} redelivered after the ack timeout"
        if a.inherited:
            line += f", {a.inherited:,} redelivered after the kill"
        text.append(line)
    if verdict.accounts:
        text.append(f"lost        {verdict.lost:,}")
        text.append(f"duplicates  {verdict.duplicates:,}, all of them redeliveries")
    if verdict.has_passed:
        text.append("order       all first deliveries in order")
        text.append("payloads    all unchanged")
        text.append("PASSED: each subscriber received all messages that were due to it.")
    else:
        text += [f"fault       {fault}" for fault in verdict.faults]
        text.append("FAILED.")
    return text
