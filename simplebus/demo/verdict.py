"""Did everybody get what was theirs? Records in, verdict out.

Rule 1: pure. Nothing here reads a file, a clock or a server.
Rule 2: what cannot be explained is a fault. A message may come more than once only marked as sent
again, or to a process that took over from one that was killed.

    life 1   due from 0  ├────────────────── killed: what came is what counts
    life 2                 due from n ├───────────────────────────────── up to the last one sent
                           └ behind the end of life 1: lost, unless others hold the class
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simplebus.demo.records import DAMAGED, Receipts, is_named

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a subscriber, from its subscriptions to its end."""

    subscriber: str
    due_from: Mapping[int, int]
    """The first message that is due to it, by class: where the server let it in."""
    receipts: Receipts
    """What it wrote down."""
    killed: bool = False
    """Whether it was killed; if so, another life of the subscriber must follow."""


@dataclass(frozen=True, slots=True)
class Account:
    """What a subscriber got of one class, over all its lives."""

    subscriber: str
    class_id: int
    due: int
    """Messages that were due to it."""
    received: int
    """Different ones of these that came."""
    redelivered: int
    """Repetitions that were marked as sent again."""
    inherited: int
    """Repetitions that a new process got because the killed one had not acknowledged them."""

    @property
    def lost(self) -> int:
        return self.due - self.received


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of it."""

    sent: Mapping[int, int]
    """Messages published, by class."""
    accounts: tuple[Account, ...]
    faults: tuple[str, ...]
    """What went wrong, one sentence each. None of them: everything was as promised."""

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def lost(self) -> int:
        return sum(account.lost for account in self.accounts)

    @property
    def duplicates(self) -> int:
        """Messages that came more than once, and were allowed to."""
        return sum(account.redelivered + account.inherited for account in self.accounts)


def judge(
    *,
    sent: Mapping[int, int],
    lives: Sequence[Life],
    resent: Mapping[int, int],
    withheld: Collection[str] = (),
) -> Verdict:
    """Hold what subscribers wrote down against what was sent. Lives stand in order of time.

    `resent` is what the bus says it sent again, by class. `withheld` names those subscribers who
    left messages unacknowledged on purpose: they must have been sent something again.
    """
    faults: list[str] = []
    accounts: list[Account] = []
    for name in dict.fromkeys(life.subscriber for life in lives):
        mine = [life for life in lives if life.subscriber == name]
        if mine[-1].killed:
            faults.append(f"{name} was killed and did not come back")
        for life in mine:
            faults += _damage(life)
        for class_id in dict.fromkeys(c for life in mine for c in life.due_from):
            others = any(class_id in life.due_from for life in lives if life.subscriber != name)
            account, found = _account(
                name, class_id, mine, sent=sent.get(class_id, 0), others_hold_it=others
            )
            accounts.append(account)
            faults += found
    for class_id in sent:
        noted = sum(a.redelivered for a in accounts if a.class_id == class_id)
        if noted > resent.get(class_id, 0):
            faults.append(
                f"{noted:,} messages of class {class_id} came again, but the bus sent only "
                f"{resent.get(class_id, 0):,} again"
            )
    for name in withheld:
        if not any(a.redelivered for a in accounts if a.subscriber == name):
            faults.append(f"{name} left messages unacknowledged and was sent none of them again")
    return Verdict(sent=dict(sent), accounts=tuple(accounts), faults=tuple(faults))


def _damage(life: Life) -> list[str]:
    """Faults of single messages, whatever their order."""
    faults = []
    notes = life.receipts
    damaged = int(np.count_nonzero(notes["number"] == DAMAGED))
    if damaged:
        faults.append(f"{life.subscriber} got {damaged:,} messages with a content nobody sent")
    misnamed = np.flatnonzero((notes["number"] != DAMAGED) & ~is_named(notes))
    if misnamed.size:
        note = notes[misnamed[0]]
        faults.append(
            f"{life.subscriber} got message {note['number']} of class {note['class_id']} "
            f"under the id {note['message_id']}"
        )
    foreign = set(notes["class_id"].tolist()) - set(life.due_from)
    for class_id in sorted(foreign):
        faults.append(
            f"{life.subscriber} got messages of class {class_id}, which it never asked for"
        )
    return faults


def _account(
    name: str, class_id: int, lives: Sequence[Life], *, sent: int, others_hold_it: bool
) -> tuple[Account, list[str]]:
    """One subscriber's messages of one class."""
    faults: list[str] = []
    due = np.zeros(sent, np.bool_)
    came = np.zeros(sent, np.bool_)
    redelivered = inherited = 0
    end = None  # Behind the last message of the life before.
    for life in lives:
        if class_id not in life.due_from:
            continue
        first = life.due_from[class_id]
        if end is not None and not others_hold_it:
            due[end:first] = True
        notes = life.receipts[
            (life.receipts["class_id"] == class_id) & (life.receipts["number"] != DAMAGED)
        ]
        numbers: Numbers = notes["number"]
        unique, positions = np.unique(numbers, return_index=True)
        whose = f"of class {class_id} to {name}"
        faults += _unasked(unique, first=first, sent=sent, whose=whose)
        faults += _order(numbers[np.sort(positions)], whose)

        again = np.ones(numbers.size, np.bool_)
        again[positions] = False
        unmarked = numbers[again & (notes["redelivered"] == 0)]
        if unmarked.size:
            faults.append(
                f"message {unmarked[0]} {whose} came twice, not marked as sent again"
                + _and_more(unmarked.size)
            )
        redelivered += int(np.count_nonzero(again)) - unmarked.size

        unique = unique[unique < sent]
        inherited += int(np.count_nonzero(came[unique]))
        came[unique] = True
        end = sent if not life.killed else max(first, int(unique[-1]) + 1 if unique.size else 0)
        due[first:end] = True
    lost = np.flatnonzero(due & ~came)
    if lost.size:
        faults.append(
            f"message {lost[0]} of class {class_id} never came to {name}" + _and_more(lost.size)
        )
    account = Account(
        subscriber=name,
        class_id=class_id,
        due=int(np.count_nonzero(due)),
        received=int(np.count_nonzero(due & came)),
        redelivered=redelivered,
        inherited=inherited,
    )
    return account, faults


def _order(firsts: Numbers, whose: str) -> list[str]:
    """First deliveries must ascend."""
    steps = np.flatnonzero(firsts[1:] < firsts[:-1])
    if not steps.size:
        return []
    at = int(steps[0])
    return [
        f"message {firsts[at + 1]} {whose} came after message {firsts[at]}, out of order"
        + _and_more(steps.size)
    ]


def _unasked(unique: Numbers, *, first: int, sent: int, whose: str) -> list[str]:
    """Nothing may come from before a subscription began, or from nowhere."""
    faults = []
    early = unique[unique < first]
    if early.size:
        faults.append(
            f"message {early[0]} {whose} came although its subscription began at {first}"
            + _and_more(early.size)
        )
    late = unique[unique >= sent]
    if late.size:
        faults.append(f"message {late[0]} {whose} came, but was never sent" + _and_more(late.size))
    return faults


def _and_more(count: int) -> str:
    return f" (and {count - 1:,} more like it)" if count > 1 else ""


def lines(verdict: Verdict) -> list[str]:
    """The verdict in words."""
    told = []
    if verdict.sent:
        sent = ", ".join(f"{count:,} of class {c}" for c, count in verdict.sent.items())
        told.append(f"sent        {sum(verdict.sent.values()):,} messages: {sent}")
    for a in verdict.accounts:
        line = f"{a.subscriber:<11} class {a.class_id}: {a.received:,} of {a.due:,} due received"
        if a.redelivered:
            line += f", {a.redelivered:,} sent again because they were not acknowledged"
        if a.inherited:
            line += f", {a.inherited:,} again because their receiver was killed"
        told.append(line)
    if verdict.accounts:
        told.append(f"lost        {verdict.lost:,}")
        told.append(f"duplicates  {verdict.duplicates:,}, all of them redeliveries")
    if verdict.passed:
        told.append("order       every first delivery in its place")
        told.append("content     every payload as it was sent")
        told.append("PASSED: every subscriber got every message that was due to it.")
    else:
        told += [f"fault       {fault}" for fault in verdict.faults]
        told.append("FAILED.")
    return told
