"""What a user of all doors may publish and hear at this one: the rules of classes, for subjects.

Rule 1: a subject that is bound to classes is judged as their channel, by all of them. A message
that comes out of a class is judged by that one, whatever else its subject is bound to.
Rule 2: a subject that is bound to none is a matter of the user's own patterns. One that has none
and may not do everything with classes has nothing there but its inbox.
Rule 3: what was judged is forgotten when bindings or names of classes change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.users.permissions import (
    DEAD,
    Called,
    Right,
    Rules,
    Scope,
    called_so,
    is_private,
)
from simplebus.core.users.permissions import Grants as Rights
from simplebus.core.users.permissions import Permissions as RightsSaid
from simplebus.nats import subjects
from simplebus.nats.bus.convert import class_subject
from simplebus.nats.bus.subjects import Asked, asked
from simplebus.nats.limits import VERDICTS_MAX
from simplebus.nats.server.permissions import Grants, Permissions, Verdicts
from simplebus.nats.server.subject_table import SubjectTable

_INBOX, _ACKS, _CLASS = "_INBOX.", "$JS.ACK.", "class."
_EVERYTHING = Scope(everything=True, allow=(), nothing=False, deny=())
_NOTHING = Scope(everything=False, allow=(), nothing=True, deny=())


class BoundClasses:
    """Which classes a subject is bound to, and which class is being shown."""

    def __init__(self) -> None:
        self.of: Callable[[bytes], Iterable[MessageClass]] = lambda subject: ()
        """The classes that a subject is bound to."""
        self.may_speak: Callable[[str, bytes], bool] = lambda user, subject: True
        """Whether a user of all doors may publish on a subject."""
        self.called: Callable[[str], tuple[int, str]] = lambda channel: (-1, "")
        """Id and name of the class whose messages without a channel are on this one."""
        self.keep_letters_of: Callable[[str], Sequence[Called]] = called_so
        """Which classes' dead letters are in the class of this name, without `dead.`."""
        self.epoch: Callable[[], int] = lambda: 0
        """Changes when these, or their names, do."""
        self.shown: MessageClass | None = None
        """Out of which class what is sent comes; None for what clients of this door publish."""


class ClassGrants(Grants):
    """Grants of a user of all doors."""

    def __init__(
        self,
        permissions: Permissions | None,
        table: SubjectTable,
        rights: Rights,
        classes: BoundClasses,
    ) -> None:
        """Without permissions of its own, see Rule 2."""
        super().__init__(permissions or Permissions(), table)
        self.rights = rights
        self._has_own = permissions is not None
        self._classes = classes
        self._own = self.publishing
        self.publishing = _Epochs(table, self._may_publish, classes)
        self._hearing: dict[tuple[tuple[str, ...], bool], Verdicts] = {}

    def _may_publish(self, name: str) -> bool:
        subject = name.encode()
        bound = list(self._classes.of(subject))
        channel = subjects.to_text(subject)
        if bound:
            return all(
                self.rights.publishing(cls.class_id, cls.name).allows(channel) for cls in bound
            )
        if name.startswith(_CLASS):  # Others take it for one of that class.
            return self.rights.publishing(*self._classes.called(channel)).allows("")
        if self._has_own:
            return self._own.one(subject)
        return name.startswith((_INBOX, _ACKS)) or _is_free(self.rights.permissions.publish)

    def may_ask(self, asked: Asked, queue: bytes) -> bool:
        return not self.is_denied(asked, queue)  # What is allowed is asked of the class itself.

    def may_subscribe(self, subject: bytes, queue: bytes) -> bool:
        if not (self.rights.permissions.wildcards or _is_whole(subject)):
            return False
        return super().may_subscribe(subject, queue)

    def denied(self, subject: bytes, queue: bytes) -> tuple[str, ...]:
        return ()  # Of what comes out of a class that says nothing: see Rule 1.

    def filter(self, subject: bytes, queue: bytes) -> Verdicts | None:
        own = super().denied(subject, queue), subjects.is_literal(subject)
        found = self._hearing.get(own)
        if found is None:
            judge = self._judge(self._filter_of(own[0]))
            found = _Shown(self._table, judge, self._classes, self.rights, is_whole=own[1])
            if len(self._hearing) >= VERDICTS_MAX:
                self._hearing.clear()
            self._hearing[own] = found
        return found

    def _judge(self, own: Verdicts | None) -> Callable[[str], bool]:
        """Says whether a subject is not to be heard."""
        rights, classes = self.rights, self._classes

        def is_denied(name: str) -> bool:
            subject = name.encode()
            bound = list(classes.of(subject))
            if bound:
                channel = subjects.to_text(subject)
                return not all(
                    rights.subscribing(cls.class_id, cls.name).allows(channel) for cls in bound
                )
            if own is not None and own.one(subject):
                return True
            if self._has_own or name.startswith(_INBOX):
                return False
            return not _is_free(rights.permissions.subscribe)

        return is_denied


class GuestRights(Rights):
    """What a user of this door alone, who may not do everything, may do as a guest of the broker:
    what it publishes was judged before; which classes it may not ask for, its patterns say."""

    def __init__(self, grants: Grants, classes: BoundClasses) -> None:
        super().__init__(RightsSaid(), classes.keep_letters_of)
        self._grants = grants

    def subscribing(self, class_id: int, name: str) -> Scope:
        is_denied = self._grants.is_denied(asked_for(class_id, name, classes=self._called))
        return _NOTHING if is_denied else _EVERYTHING


class _Epochs(Verdicts):
    """Verdicts that are forgotten when bindings change."""

    def __init__(
        self, table: SubjectTable, judge: Callable[[str], bool], classes: BoundClasses
    ) -> None:
        super().__init__(table, judge)
        self._classes = classes
        self._epoch = 0

    def one(self, subject: bytes) -> bool:
        self._renew()
        return super().one(subject)

    def of(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        self._renew()
        return super().of(numbers)

    def _renew(self) -> None:
        epoch = self._classes.epoch()
        if epoch != self._epoch:
            self._epoch = epoch
            self.forget()


class _Shown(_Epochs):
    """Of what is heard: what comes out of a class is judged by that."""

    def __init__(
        self,
        table: SubjectTable,
        judge: Callable[[str], bool],
        classes: BoundClasses,
        rights: Rights,
        *,
        is_whole: bool,
    ) -> None:
        """`is_whole` says whether that is one subject, by its whole name."""
        super().__init__(table, judge, classes)
        self._rights = rights
        self._is_whole = is_whole

    def one(self, subject: bytes) -> bool:
        shown = self._classes.shown
        if shown is None:
            return super().one(subject)
        if is_private(shown.name) and not (
            self._is_whole or self._rights.has(Right.FETCH, shown.class_id, shown.name)
        ):
            return True
        scope: Scope = self._rights.subscribing(shown.class_id, shown.name)
        is_plain = subject == class_subject(shown.class_id, shown.name)
        return not scope.allows("" if is_plain else subjects.to_text(subject))


def asked_for(
    class_id: int,
    name: str,
    *,
    classes: Callable[[str], Sequence[Called]],
    behind: tuple[str, ...] = (),
    is_new: bool = False,
) -> Asked:
    """Of a class: how it is asked for. `classes` says of the name of one without `dead.` whose
    letters it keeps. One that `is_new` is only allowed as it was called."""
    own: list[int | str] = [name] if name else []
    others: list[int | str] = []
    (others if is_new and name else own).append(class_id)
    if name.startswith(DEAD):
        for id_, called in classes(name.removeprefix(DEAD)):
            others += [each for each in (id_, called) if each not in (-1, "")]
    return asked([each for each in own if each != -1], others, behind)


def _is_whole(subject: bytes) -> bool:
    """Whether this names each channel that is to be heard, or is one's own inbox."""
    if subject.startswith(_INBOX.encode()):
        subject = b".".join(subject.split(b".")[:2])
    return subjects.is_literal(subject)


def _is_free(rules: Rules) -> bool:
    return rules.allow is None
