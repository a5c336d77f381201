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
        mine = [run for run in runs if run.subscriber == name]
        if mine[-1].was_killed:
            faults.append(f"{name} was killed and did not come back")
        for run in mine:
            faults += _check_content(run)
        for class_id in dict.fromkeys(c for run in mine for c in run.first_due):
            others = any(class_id in run.first_due for run in runs if run.subscriber != name)
            account, found = _account_class(
                name, class_id, mine, sent=sent.get(class_id, 0), is_shared=others
            )
            accounts.append(account)
            faults += found
    for class_id in sent:
        marked = sum(a.redelivered for a in accounts if a.class_id == class_id)
        if marked > redelivered_by_server.get(class_id, 0):
            redeliveries = format_count(marked, "redelivery", "redeliveries")
            faults.append(
                f"{redeliveries} of class {class_id} arrived, but the bus sent only "
                f"{redelivered_by_server.get(class_id, 0):,} again"
            )
    for name in withholding:
        if not any(a.redelivered for a in accounts if a.subscriber == name):
            faults.append(f"{name} left messages unacknowledged and was sent none of them again")
    return DemoVerdict(sent=dict(sent), accounts=tuple(accounts), faults=tuple(faults))


def _check_content(run: SubscriberRun) -> list[str]:
    """Return faults of single messages, regardless of order."""
    faults = []
    receipts = run.receipts
    damaged = int(np.count_nonzero(receipts["number"] == CORRUPT))
    if damaged:
        faults.append(
            f"{run.subscriber} got {format_count(damaged, 'message')} with a content nobody sent"
        )
    misnamed = np.flatnonzero((receipts["number"] != CORRUPT) & ~has_expected_id(receipts))
    if misnamed.size:
        note = receipts[misnamed[0]]
        faults.append(
            f"{run.subscriber} got message {note['number']} of class {note['class_id']} "
            f"under the id {note['message_id']}"
        )
    foreign = set(receipts["class_id"].tolist()) - set(run.first_due)
    for class_id in sorted(foreign):
        faults.append(
            f"{run.subscriber} got messages of class {class_id}, which it never asked for"
        )
    return faults


def _account_class(
    name: str, class_id: int, runs: Sequence[SubscriberRun], *, sent: int, is_shared: bool
) -> tuple[DeliveryAccount, list[str]]:
    """Return a subscriber's account of one class, and its faults."""
    faults: list[str] = []
    due = np.zeros(sent, np.bool_)
    came = np.zeros(sent, np.bool_)
    redelivered = inherited = 0
    end = None  # Behind the last message of the life before.
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
        of_whom = f"of class {class_id} to {name}"
        faults += _check_bounds(unique, first=first, sent=sent, of_whom=of_whom)
        faults += _check_order(numbers[np.sort(positions)], of_whom)

        again = np.ones(numbers.size, np.bool_)
        again[positions] = False
        unmarked = numbers[again & (receipts["redelivered"] == 0)]
        if unmarked.size:
            faults.append(
                f"message {unmarked[0]} {of_whom} came twice, not marked as sent again"
                + _and_more(unmarked.size)
            )
        redelivered += int(np.count_nonzero(again)) - unmarked.size

        unique = unique[unique < sent]
        inherited += int(np.count_nonzero(came[unique]))
        came[unique] = True
        end = sent if not run.was_killed else max(first, int(unique[-1]) + 1 if unique.size else 0)
        due[first:end] = True
    lost = np.flatnonzero(due & ~came)
    if lost.size:
        faults.append(
            f"message {lost[0]} of class {class_id} never came to {name}" + _and_more(lost.size)
        )
    account = DeliveryAccount(
        subscriber=name,
        class_id=class_id,
        due=int(np.count_nonzero(due)),
        received=int(np.count_nonzero(due & came)),
        redelivered=redelivered,
        inherited=inherited,
    )
    return account, faults


def _check_order(firsts: Numbers, of_whom: str) -> list[str]:
    """Return a fault if first deliveries are out of order."""
    steps = np.flatnonzero(firsts[1:] < firsts[:-1])
    if not steps.size:
        return []
    at = int(steps[0])
    return [
        f"message {firsts[at + 1]} {of_whom} came after message {firsts[at]}, out of order"
        + _and_more(steps.size)
    ]


def _check_bounds(unique: Numbers, *, first: int, sent: int, of_whom: str) -> list[str]:
    """Return faults for messages before the subscription's start or never sent."""
    faults = []
    early = unique[unique < first]
    if early.size:
        faults.append(
            f"message {early[0]} {of_whom} came although its subscription began at {first}"
            + _and_more(early.size)
        )
    late = unique[unique >= sent]
    if late.size:
        faults.append(
            f"message {late[0]} {of_whom} came, but was never sent" + _and_more(late.size)
        )
    return faults


def _and_more(count: int) -> str:
    return f" (and {count - 1:,} more like it)" if count > 1 else ""


def format_verdict(verdict: DemoVerdict) -> list[str]:
    """Return the lines of the verdict."""
    text = []
    if verdict.sent:
        sent = ", ".join(f"{count:,} of class {c}" for c, count in verdict.sent.items())
        text.append(f"sent        {sum(verdict.sent.values()):,} messages: {sent}")
    for a in verdict.accounts:
        line = f"{a.subscriber:<11} class {a.class_id}: {a.received:,} of {a.due:,} due received"
        if a.redelivered:
            line += f", {a.redelivered:,} sent again because they were not acknowledged"
        if a.inherited:
            line += f", {a.inherited:,} again because their receiver was killed"
        text.append(line)
    if verdict.accounts:
        text.append(f"lost        {verdict.lost:,}")
        text.append(f"duplicates  {verdict.duplicates:,}, all of them redeliveries")
    if verdict.has_passed:
        text.append("order       every first delivery in its place")
        text.append("content     every payload as it was sent")
        text.append("PASSED: every subscriber got every message that was due to it.")
    else:
        text += [f"fault       {fault}" for fault in verdict.faults]
        text.append("FAILED.")
    return text
