"""NATS subjects that are bound to classes: messages published on them are stored in these classes.

A subject can be bound to several classes and a class to several subjects. A message is stored at
most once per class. The NATS listener observes the bindings and routes the messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable

from simplebus.core.channel.pattern import ONE_OR_MORE, TAIL_WILDCARDS, ZERO_OR_MORE, check_pattern
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    ADDRESS_QUOTA_DIVISOR,
    CHECKED_CLASSES_PER_TURN,
    SUBJECT_BINDINGS_MAX,
)
from simplebus.core.steps import run_to_end

RESERVED_SUBJECT_PREFIXES = ("$", "_INBOX.")
"""Prefixes of subjects that cannot be bound: server APIs and reply subjects."""

OnBindingChanged = Callable[[int, str, bool], None]
"""Called with a class id, a subject, and True if it was bound, False if it was unbound."""


class ClassSubjectBindings:
    """Bindings of all classes of a bus."""

    def __init__(self) -> None:
        self._bindings: dict[tuple[int, str], str] = {}
        """Address of the client that bound a subject without a user, by class id and subject."""
        self._count_by_address: Counter[str] = Counter()
        self._reserved: set[tuple[int, str]] = set()
        """Bindings that were not reported to the observers yet."""
        self._observers: list[OnBindingChanged] = []

    def __len__(self) -> int:
        """Return the number of (class, subject) pairs."""
        return len(self._bindings)

    def check_bindings(self, bindings: Iterable[tuple[int, str]], address: str = "") -> None:
        """Check that (class id, subject) pairs can be bound, by a client of `address` if it has no
        user.

        Raises:
            RemoteProtocolError: bad_channel if a subject is not valid, bad_request if there are too
                many.
        """
        run_to_end(self.check_in_parts(bindings, address))

    def check_in_parts(
        self, bindings: Iterable[tuple[int, str]], address: str = ""
    ) -> Generator[None, None, None]:
        """Like `check_bindings`, in parts. Valid if no bindings are added between the parts."""
        new = [pair for pair in dict.fromkeys(bindings) if pair not in self._bindings]
        if len(self._bindings) + len(new) > SUBJECT_BINDINGS_MAX:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"cannot bind {len(new)} more subjects to classes: {len(self._bindings)} are "
                f"bound, {SUBJECT_BINDINGS_MAX} are allowed",
            )
        quota = SUBJECT_BINDINGS_MAX // ADDRESS_QUOTA_DIVISOR
        if address and self._count_by_address[address] + len(new) > quota:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"cannot bind {len(new)} more subjects to classes: clients of {address} without a "
                f"user have bound {self._count_by_address[address]} of at most {quota}",
            )
        for number, (_, subject) in enumerate(new, 1):
            if number % CHECKED_CLASSES_PER_TURN == 0:
                yield
            check_subject(subject)

    def reserve(self, bindings: Iterable[tuple[int, str]], address: str = "") -> None:
        """Count these bindings, for which `check_bindings` was called. `bind` makes each valid."""
        for pair in bindings:
            if pair not in self._bindings:
                self._bindings[pair] = address
                self._reserved.add(pair)
                if address:
                    self._count_by_address[address] += 1

    def bind(self, class_id: int, subject: str, address: str = "") -> None:
        """Bind a subject to a class. Arguments and errors as in `check_bindings`."""
        pair = (class_id, subject)
        if pair not in self._bindings:
            self.check_bindings([pair], address)
            self.reserve([pair], address)
        if pair in self._reserved:
            self._reserved.remove(pair)
            self._notify_observers(pair, True)

    def unbind(self, class_id: int, subject: str) -> None:
        """Remove a binding. Stored messages stay. Raises KeyError if the subject is not bound."""
        if (class_id, subject) not in self._bindings:
            raise KeyError(f"subject {subject!r} is not bound to class {class_id}")
        address = self._bindings.pop((class_id, subject))
        if address:
            self._count_by_address[address] -= 1
            if not self._count_by_address[address]:
                del self._count_by_address[address]
        if (class_id, subject) in self._reserved:
            self._reserved.remove((class_id, subject))
        else:
            self._notify_observers((class_id, subject), False)

    def class_ids(self) -> set[int]:
        """Return the ids of the classes with subjects."""
        return {class_id for class_id, _ in self._bindings}

    def subjects_of(self, class_id: int) -> tuple[str, ...]:
        """Return the subjects of a class in the order in which they were bound."""
        return tuple(subject for bound_id, subject in self._bindings if bound_id == class_id)

    def add_observer(self, observer: OnBindingChanged) -> None:
        """Call `observer` for every existing binding now, and for every change later."""
        self._observers.append(observer)
        for class_id, subject in self._bindings:
            if (class_id, subject) not in self._reserved:
                observer(class_id, subject, True)

    def _notify_observers(self, binding: tuple[int, str], is_bound: bool) -> None:
        for observer in self._observers:
            observer(*binding, is_bound)


def check_subject(subject: str) -> str:
    """Return `subject` if it can be bound. It may contain the wildcards of NATS.

    Raises:
        RemoteProtocolError: bad_channel.
    """
    try:
        check_pattern(subject)
    except ValueError as error:
        raise RemoteProtocolError(Reason.BAD_CHANNEL, f"cannot bind the subject: {error}") from None
    if subject.startswith(RESERVED_SUBJECT_PREFIXES):
        raise RemoteProtocolError(
            Reason.BAD_CHANNEL,
            f"cannot bind the subject {subject!r}: subjects that begin with "
            f"{' or '.join(RESERVED_SUBJECT_PREFIXES)} are reserved",
        )
    if subject.rpartition(".")[2] in TAIL_WILDCARDS - {ONE_OR_MORE}:
        raise RemoteProtocolError(
            Reason.BAD_CHANNEL,
            f"cannot bind the subject {subject!r}: {ZERO_OR_MORE} is a wildcard of channels only; "
            f"expected {ONE_OR_MORE} for one or more segments",
        )
    return subject
