"""Which subjects of the NATS door are bound to which classes.

Rule 1: this file knows that a class and a subject belong together, and since when nobody says so
any more; who publishes on a subject, and what becomes of that, is the door's business.
Rule 2: binding is idempotent. A subject may be bound to several classes, a class to several
subjects; in no case does a message get into one class twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from simplebus.core.channel.pattern import OPEN, REST, SOME, check_pattern
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import SUBJECTS_BOUND_MAX

RESERVED_SUBJECT_PREFIXES = ("$", "_INBOX.")
"""How subjects begin that are never a class's: servers' own, and where answers go."""

OnBindingChanged = Callable[[int, str, bool], None]
"""Called with a class's id, a subject, and whether it is bound now, or no longer."""


class ClassSubjectBindings:
    """Of one broker."""

    def __init__(self) -> None:
        self._bindings: dict[tuple[int, str], None] = {}
        self._observers: list[OnBindingChanged] = []

    def __len__(self) -> int:
        """How many pairs of a class and a subject there are."""
        return len(self._bindings)

    def check_bindings(self, bindings: Iterable[tuple[int, str]]) -> None:
        """Raise RemoteProtocolError unless these pairs can all be bound: bad_channel for a subject
        that is not legal, bad_request for too many."""
        new = [pair for pair in dict.fromkeys(bindings) if pair not in self._bindings]
        for _, subject in new:
            check_subject(subject)
        if len(self._bindings) + len(new) > SUBJECTS_BOUND_MAX:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"{len(new)} new subjects were to be bound to classes; {len(self._bindings)} are, "
                f"{SUBJECTS_BOUND_MAX} may be",
            )

    def bind(self, class_id: int, subject: str) -> None:
        """What is published on this subject is the class's, too. Raises as `check` does."""
        pair = (class_id, subject)
        if pair not in self._bindings:
            self.check_bindings([pair])
            self._bindings[pair] = None
            self._notify_observers(pair, True)

    def unbind(self, class_id: int, subject: str) -> None:
        """It is not any more; what is stored stays. Raises KeyError for what is not bound."""
        if (class_id, subject) not in self._bindings:
            raise KeyError(f"subject {subject!r} is not bound to class {class_id}")
        del self._bindings[class_id, subject]
        self._notify_observers((class_id, subject), False)

    def subjects_of(self, class_id: int) -> tuple[str, ...]:
        """Those bound to a class, in the order in which they were."""
        return tuple(subject for of, subject in self._bindings if of == class_id)

    def add_observer(self, observer: OnBindingChanged) -> None:
        """Have what is bound told by calling this: now, and whenever it changes."""
        self._observers.append(observer)
        for class_id, subject in self._bindings:
            observer(class_id, subject, True)

    def _notify_observers(self, binding: tuple[int, str], is_bound: bool) -> None:
        for watch in self._observers:
            watch(*binding, is_bound)


def check_subject(subject: str) -> str:
    """A subject to bind, as it is: a pattern with the wildcards of NATS.

    Raises RemoteProtocolError (bad_channel).
    """
    try:
        check_pattern(subject)
    except ValueError as error:
        raise RemoteProtocolError(Reason.BAD_CHANNEL, f"to be bound: {error}") from None
    if subject.startswith(RESERVED_SUBJECT_PREFIXES):
        raise RemoteProtocolError(
            Reason.BAD_CHANNEL,
            f"to be bound: the subject {subject!r} begins with "
            f"{' or '.join(RESERVED_SUBJECT_PREFIXES)}, which are "
            "not for messages that are kept",
        )
    if subject.rpartition(".")[2] in OPEN - {SOME}:
        raise RemoteProtocolError(
            Reason.BAD_CHANNEL,
            f"to be bound: the subject {subject!r} ends with {REST}, which is a wildcard of "
            f"channels only; expected {SOME} for one or more segments",
        )
    return subject
