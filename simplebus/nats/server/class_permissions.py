"""Class permissions applied to NATS subjects.

A subject that is bound to classes needs the permission of all of them, with the subject as
channel. A message that comes from a class needs the permission of that class only. A subject
without a class needs the user's own patterns; without patterns, a restricted user may use its
inbox only. Cached decisions are dropped when bindings or class names change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.users.permissions import (
    DEAD_LETTER_PREFIX,
    ClassIdentity,
    ClassPermissions,
    Grants,
    PermissionRules,
    Permissions,
    has_private_channels,
    unresolved_class,
)
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.nats import subjects
from simplebus.nats.class_requests import ClassRequest, make_class_request
from simplebus.nats.limits import CACHED_PERMISSIONS_MAX
from simplebus.nats.protocol.subject_table import SubjectTable
from simplebus.nats.server.permissions import PermissionCache, SubjectGrants, ignore_cost
from simplebus.nats.subjects import class_subject

_INBOX, _ACKS, _CLASS = "_INBOX.", "$JS.ACK.", "class."
_EVERYTHING = ClassPermissions(allow_all=True, allow=(), deny_all=False, deny=())
_NOTHING = ClassPermissions(allow_all=False, allow=(), deny_all=True, deny=())


class SubjectClasses:
    """Lookup of the classes of a subject, set by the bus adapter."""

    def __init__(self) -> None:
        self.find_classes: Callable[[bytes], Iterable[MessageClass]] = lambda subject: ()
        """Returns the classes that a subject is bound to."""
        self.can_publish: Callable[[str, bytes], bool] = lambda user, subject: True
        """Returns True if a user may publish on a subject."""
        self.resolve_class_subject: Callable[[str], tuple[int, str]] = lambda channel: (-1, "")
        """Returns id and name of the class whose messages without a channel use this subject."""
        self.find_dead_letter_sources: Callable[[str], Sequence[ClassIdentity]] = unresolved_class
        """Returns the classes whose dead letters go to `dead.<name>`; the parameter is `name`."""
        self.get_change_count: Callable[[], int] = lambda: 0
        """Returns a number that changes with bindings and class names."""
        self.source_class: MessageClass | None = None
        """Class of the messages that are being delivered; None for messages of NATS clients."""


class ClassSubjectGrants(SubjectGrants):
    """Subject permissions of a user with class permissions."""

    def __init__(
        self,
        permissions: SubjectPermissions | None,
        table: SubjectTable,
        class_grants: Grants,
        classes: SubjectClasses,
        add_cost: Callable[[int], None] = ignore_cost,
    ) -> None:
        """`permissions` are the user's own subject patterns; None for none."""
        super().__init__(permissions or SubjectPermissions(), table, add_cost)
        self.class_grants = class_grants
        self._has_own_patterns = permissions is not None
        self._classes = classes
        self._own_publish_cache = self.publish_cache
        self.publish_cache = _BindingPermissionCache(
            table, self._can_publish, add_cost, classes, class_grants.rule_count
        )
        self._delivery_filters: dict[tuple[str, ...], PermissionCache] = {}

    def _can_publish(self, name: str) -> bool:
        subject = name.encode()
        bound = list(self._classes.find_classes(subject))
        channel = subjects.to_text(subject)
        if bound:
            return all(
                self.class_grants.publish_permissions(cls.class_id, cls.name).is_allowed(channel)
                for cls in bound
            )
        if name.startswith(_CLASS):  # Receivers treat it as a message of that class.
            return self.class_grants.publish_permissions(
                *self._classes.resolve_class_subject(channel)
            ).is_allowed("")
        if self._has_own_patterns:
            return self._own_publish_cache.get(subject)
        return name.startswith((_INBOX, _ACKS)) or _is_unrestricted(
            self.class_grants.permissions.publish
        )

    def can_request_class(self, request: ClassRequest, queue: bytes) -> bool:
        # The permissions of the class apply later.
        return not self.is_request_denied(request, queue)

    def can_subscribe(self, subject: bytes, queue: bytes) -> bool:
        if not (self.class_grants.permissions.wildcards or _names_one_channel(subject)):
            return False
        return super().can_subscribe(subject, queue)

    def denied_patterns(self, subject: bytes, queue: bytes) -> tuple[str, ...]:
        return ()  # Subject patterns do not apply to messages from classes.

    def delivery_filter(self, subject: bytes, queue: bytes) -> PermissionCache | None:
        key = super().denied_patterns(subject, queue)
        cache = self._delivery_filters.get(key)
        if cache is None:
            is_denied = self._make_denied_check(self._filter_for_patterns(key))
            cache = _DeliveryPermissionCache(
                self._table, is_denied, self._add_cost, self._classes, self.class_grants
            )
            if len(self._delivery_filters) >= CACHED_PERMISSIONS_MAX:
                self._delivery_filters.clear()
            self._delivery_filters[key] = cache
        return cache

    def _make_denied_check(self, deny_cache: PermissionCache | None) -> Callable[[str], bool]:
        """Return a function that is True for subjects that are not delivered."""
        rights, classes = self.class_grants, self._classes

        def is_denied(name: str) -> bool:
            subject = name.encode()
            bound = list(classes.find_classes(subject))
            if bound:
                channel = subjects.to_text(subject)
                return not all(
                    rights.subscribe_permissions(cls.class_id, cls.name).is_allowed(channel)
                    for cls in bound
                )
            if deny_cache is not None and deny_cache.get(subject):
                return True
            if self._has_own_patterns or name.startswith(_INBOX):
                return False
            return not _is_unrestricted(rights.permissions.subscribe)

        return is_denied


class LocalSessionGrants(Grants):
    """Class permissions of the local session of a user that has subject permissions only.

    Publications were checked before; subscriptions are checked with the user's subject patterns.
    """

    def __init__(self, grants: SubjectGrants, classes: SubjectClasses) -> None:
        super().__init__(Permissions(), classes.find_dead_letter_sources)
        self._grants = grants

    def subscribe_permissions(self, class_id: int, name: str) -> ClassPermissions:
        is_denied = self._grants.is_request_denied(
            class_request(class_id, name, find_dead_letter_sources=self._resolve_class_name)
        )
        return _NOTHING if is_denied else _EVERYTHING


class _BindingPermissionCache(PermissionCache):
    """Cache that is cleared when bindings change."""

    def __init__(
        self,
        table: SubjectTable,
        decide: Callable[[str], bool],
        add_cost: Callable[[int], None],
        classes: SubjectClasses,
        rule_count: int,
    ) -> None:
        super().__init__(table, decide, add_cost, rule_count=rule_count)
        self._classes = classes
        self._change_count = 0

    def get(self, subject: bytes) -> bool:
        self._clear_if_changed()
        return super().get(subject)

    def decide(self, subject: bytes) -> bool:
        self._clear_if_changed()
        return super().decide(subject)

    def get_all(self, names: tuple[bytes, ...]) -> npt.NDArray[np.bool_]:
        self._clear_if_changed()
        return super().get_all(names)

    def _current_decisions(self) -> npt.NDArray[np.int8]:
        self._clear_if_changed()
        return super()._current_decisions()

    def _clear_if_changed(self) -> None:
        change_count = self._classes.get_change_count()
        if change_count != self._change_count:
            self._change_count = change_count
            self.clear()


class _DeliveryPermissionCache(_BindingPermissionCache):
    """Cache for deliveries: messages from a class need the permissions of that class."""

    def __init__(
        self,
        table: SubjectTable,
        decide: Callable[[str], bool],
        add_cost: Callable[[int], None],
        classes: SubjectClasses,
        class_grants: Grants,
    ) -> None:
        super().__init__(table, decide, add_cost, classes, class_grants.rule_count)
        self._class_grants = class_grants
        self._by_class: dict[tuple[int, bytes], bool] = {}
        """Decisions by the id of the source class and the subject."""

    def clear(self) -> None:
        super().clear()
        self._by_class.clear()

    def get(self, subject: bytes) -> bool:
        source_class = self._classes.source_class
        if source_class is None:
            return super().get(subject)
        self._clear_if_changed()
        key = source_class.class_id, subject
        decision = self._by_class.get(key)
        if decision is None:
            if len(self._by_class) >= CACHED_PERMISSIONS_MAX:
                self._by_class.clear()
            self._add_cost(self.decision_cost_bytes)
            decision = self._by_class[key] = self._decide_for_class(source_class, subject)
        return decision

    def decide(self, subject: bytes) -> bool:
        source_class = self._classes.source_class
        if source_class is None:
            return super().decide(subject)
        self._add_cost(self.decision_cost_bytes)
        return self._decide_for_class(source_class, subject)

    def _is_cached(self, subject: bytes) -> bool:
        source_class = self._classes.source_class
        if source_class is None:
            return super()._is_cached(subject)
        return (source_class.class_id, subject) in self._by_class

    def _decide_for_class(self, source_class: MessageClass, subject: bytes) -> bool:
        """Return True if messages of the class on the subject are not delivered."""
        if has_private_channels(source_class.name):
            return True  # NATS clients receive replies in their inboxes.
        permissions: ClassPermissions = self._class_grants.subscribe_permissions(
            source_class.class_id, source_class.name
        )
        is_plain = subject == class_subject(source_class.class_id, source_class.name)
        return not permissions.is_allowed("" if is_plain else subjects.to_text(subject))


def class_request(
    class_id: int,
    name: str,
    *,
    find_dead_letter_sources: Callable[[str], Sequence[ClassIdentity]],
    option_tokens: tuple[str, ...] = (),
    is_new: bool = False,
) -> ClassRequest:
    """Return the subjects that request a class, for permission checks.

    Args:
        class_id: Id of the class, or -1.
        name: Name of the class, or empty.
        find_dead_letter_sources: Returns the source classes of the dead letters in a class.
        option_tokens: Canonical tokens behind the class.
        is_new: True for a class that does not exist: only the requested id or name must be
            allowed.
    """
    names: list[int | str] = [name] if name else []
    related: list[int | str] = []
    (related if is_new and name else names).append(class_id)
    if name.startswith(DEAD_LETTER_PREFIX):
        for id_, source_name in find_dead_letter_sources(name.removeprefix(DEAD_LETTER_PREFIX)):
            related += [reference for reference in (id_, source_name) if reference not in (-1, "")]
    return make_class_request(
        [reference for reference in names if reference != -1], related, option_tokens
    )


def _names_one_channel(subject: bytes) -> bool:
    """Return True if the subject has no wildcard, or only inside the user's own inbox."""
    if subject.startswith(_INBOX.encode()):
        subject = b".".join(subject.split(b".")[:2])
    return subjects.is_literal(subject)


def _is_unrestricted(rules: PermissionRules) -> bool:
    return rules.allow is None
