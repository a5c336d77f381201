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

RESERVED = ("$", "_INBOX.")
"""How subjects begin that are never a class's: servers' own, and where answers go."""

Watch = Callable[[int, str, bool], None]
"""Called with a class's id, a subject, and whether it is bound now, or no longer."""


class Bound:
    """Of one broker."""

    def __init__(self) -> None:
        self._bound: dict[tuple[int, str], None] = {}
        self._watches: list[Watch] = []

    def __len__(self) -> int:
        """How many pairs of a class and a subject there are."""
        return len(self._bound)

    def check(self, asked: Iterable[tuple[int, str]]) -> None:
        """Raise RemoteProtocolError unless these pairs can all be bound: bad_channel for a subject
        that is not legal, bad_request for too many."""
        new = [pair for pair in dict.fromkeys(asked) if pair not in self._bound]
        for _, subject in new:
            check_subject(subject)
        if len(self._bound) + len(new) > SUBJECTS_BOUND_MAX:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"{len(new)} new subjects were to be bound to classes; {len(self._bound)} are, "
                f"{SUBJECTS_BOUND_MAX} may be",
            )

    def bind(self, class_id: int, subject: str) -> None:
        """What is published on this subject is the class's, too. Raises as `check` does."""
        pair = (class_id, subject)
        if pair not in self._bound:
            self.check([pair])
            self._bound[pair] = None
            self._tell(pair, True)

    def unbind(self, class_id: int, subject: str) -> None:
        """It is not any more; what is stored stays. Raises KeyError for what is not bound."""
        if (class_id, subject) not in self._bound:
            raise KeyError(f"subject {subject!r} is not bound to class {class_id}")
        del self._bound[class_id, subject]
        self._tell((class_id, subject), False)

    def subjects(self, class_id: int) -> tuple[str, ...]:
        """Those bound to a class, in the order in which they were."""
        return tuple(subject for of, subject in self._bound if of == class_id)

    def watch(self, watch: Watch) -> None:
        """Have what is bound told by calling this: now, and whenever it changes."""
        self._watches.append(watch)
        for class_id, subject in self._bound:
            watch(class_id, subject, True)

    def _tell(self, pair: tuple[int, str], is_bound: bool) -> None:
        for watch in self._watches:
            watch(*pair, is_bound)


def check_subject(subject: str) -> str:
    """A subject to bind, as it is: a pattern with the wildcards of NATS.

    Raises RemoteProtocolError (bad_channel).
    """
    try:
        check_pattern(subject)
    except ValueError as error:
        raise RemoteProtocolError(Reason.BAD_CHANNEL, f"to be bound: {error}") from None
    if subject.startswith(RESERVED):
        raise RemoteProtocolError(
            Reason.BAD_CHANNEL,
            f"to be bound: the subject {subject!r} begins with {' or '.join(RESERVED)}, which are "
            "not for messages that are kept",
        )
    if subject.rpartition(".")[2] in OPEN - {SOME}:
        raise RemoteProtocolError(
            Reason.BAD_CHANNEL,
            f"to be bound: the subject {subject!r} ends with {REST}, which is a wildcard of "
            f"channels only; expected {SOME} for one or more segments",
        )
    return subject
