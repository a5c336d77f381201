"""Quotas: limits on how many classes and durables one user or address creates.

A class or durable counts for its creator as long as it exists, across restarts if there is a
journal. Users with restricted permissions have a default quota, and together they leave a part of
all classes to others. Clients without a user are counted by address, so that one of them leaves a
part to the others. Clients in the process of the server have no address and no quota.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from simplebus.core.dead_letters import CLASS_PREFIX, is_dead_letter_class
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    ADDRESS_QUOTA_DIVISOR,
    CONNECTION_QUOTA_DIVISOR,
    DURABLE_BYTES,
    DURABLES_MEMORY_DIVISOR,
    RESERVED_CLASSES_DIVISOR,
    USER_QUOTA_DIVISOR,
)
from simplebus.core.message_class.class_registry import class_limit_hint
from simplebus.core.message_class.last_values import BRIDGE_RECORDS_CLASS
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.session.rate_limits import address_network
from simplebus.core.session.session import Session
from simplebus.core.store.store import Store
from simplebus.core.subscription.position import Position
from simplebus.core.users.permissions import REPLIES_CLASS, AdminRight
from simplebus.core.users.user_directory import UserDirectory

_OWN_CLASSES = (REPLIES_CLASS, BRIDGE_RECORDS_CLASS)
"""Classes that clients of simplebus create for themselves."""


class Quotas:
    """Quotas of one broker."""

    def __init__(self, user_directory: UserDirectory, store: Store) -> None:
        self._user_directory = user_directory
        self._store = store
        self.durable_count = 0
        self.position_count_by_user: Counter[str] = Counter()
        """Durables and groups by owner."""
        self.position_count_by_address: Counter[str] = Counter()
        """Durables and groups by the address of their creators without a user."""

    def anonymous_address(self, session: Session) -> str:
        """Return the address to which a session is charged: empty if it has a user, or is in the
        process of the server. All addresses of an IPv6 /64 network count as one address.
        """
        if self._user_directory.users is not None or session.is_internal or not session.address:
            return ""
        return address_network(session.address)

    def check_new_classes(
        self, session: Session, requested: Sequence[tuple[int, str]], new_ids: Sequence[int]
    ) -> None:
        """Check that the user, or the client without a user, may create the missing classes.

        Args:
            session: Session that declares classes.
            requested: Id and name of each class.
            new_ids: Ids of the classes that do not exist.

        Raises:
            RemoteProtocolError: too_many_classes; or unknown_class if only the operator declares
                classes.
        """
        registry = self._store.class_registry
        new = set(new_ids)
        if new and self._store.settings.declare_only:
            self._check_declared(
                session, [id_and_name for id_and_name in requested if id_and_name[0] in new]
            )
        if new and (address := self.anonymous_address(session)):
            self._check_anonymous_classes(session, address, len(new))
        quota = self._quota_of(session, "classes", self._store.settings.limits.classes)
        if not new or quota is None:
            return
        created_count = registry.count_created_by(session.user)
        if created_count + len(new) > quota:
            raise RemoteProtocolError(
                Reason.TOO_MANY_CLASSES,
                f"user {session.user!r} declares {len(new)} new classes, but has created "
                f"{created_count} of at most {quota}{self._user_quota_hint()}",
            )
        total = self._store.settings.limits.classes
        reserved = total // RESERVED_CLASSES_DIVISOR
        if (
            self._configured_quota(session, "classes") is None
            and registry.class_count + len(new) > total - reserved
        ):
            raise RemoteProtocolError(
                Reason.TOO_MANY_CLASSES,
                f"user {session.user!r} declares {len(new)} new classes, but "
                f"{registry.class_count} of {total} exist, and the last {reserved} are reserved "
                f"for users without restrictions{self._user_quota_hint()}",
            )

    def _user_quota_hint(self) -> str:
        return class_limit_hint(self._store.settings, "max-classes in the table of the user")

    def _check_anonymous_classes(self, session: Session, address: str, new_count: int) -> None:
        """Raise RemoteProtocolError (too_many_classes) if a client without a user may not create so
        many classes.
        """
        limits = self._store.settings.limits
        created_count = self._store.class_registry.class_count_by_address[address]
        quota = _quota_of_all(limits.classes_per_address, limits.classes, ADDRESS_QUOTA_DIVISOR)
        client, setting = f"clients of {address} have", "--max-classes-per-address"
        connection_quota = _quota_of_all(
            limits.classes_per_connection, limits.classes, CONNECTION_QUOTA_DIVISOR
        )
        if connection_quota and session.created_class_count + new_count > connection_quota:
            created_count, quota = session.created_class_count, connection_quota
            client, setting = "the connection has", "--max-classes-per-connection"
        if quota and created_count + new_count > quota:
            raise RemoteProtocolError(
                Reason.TOO_MANY_CLASSES,
                f"a client without a user declares {new_count} new classes, but {client} created "
                f"{created_count} of at most {quota}"
                f"{class_limit_hint(self._store.settings, setting)}",
            )

    def _check_declared(self, session: Session, missing: Iterable[tuple[int, str]]) -> None:
        """Raise RemoteProtocolError (unknown_class) if the user may not declare a class."""
        grants, registry = session.grants, self._store.class_registry
        for class_id, name in missing:
            is_authorized = self._user_directory.users is not None and (
                grants is None or grants.has_right(AdminRight.CONFIGURE, class_id, name)
            )
            sources = registry.find_dead_letter_sources(name.removeprefix(CLASS_PREFIX))
            is_dead = is_dead_letter_class(name) and any(
                id_ in registry.classes for id_, _ in sources
            )
            if is_authorized or session.is_internal or is_dead or name in _OWN_CLASSES:
                continue
            label, similar = name or str(class_id), list[str]()
            if grants is None:  # Others must not learn the names of classes.
                similar = get_close_matches(name, filter(None, registry.class_id_by_name), n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise RemoteProtocolError(
                Reason.UNKNOWN_CLASS,
                f"there is no class {label!r}; expected one that the server's file declares, "
                f"because of --declare-only{hint}",
            )

    def check_position_quota(
        self, session: Session, cls: MessageClass, *, is_durable: bool
    ) -> None:
        """Raise RemoteProtocolError (too_many_subscriptions) if the user may not create one more
        durable or group in this class.
        """
        limits = self._store.settings.limits
        if is_durable:
            durables_max = limits.total_bytes // (DURABLES_MEMORY_DIVISOR * DURABLE_BYTES)
            if self.durable_count >= durables_max:
                raise RemoteProtocolError(
                    Reason.TOO_MANY_SUBSCRIPTIONS,
                    f"{self.durable_count} durables exist, at most {durables_max} fit into the "
                    "memory of this bus",
                )
        if len(cls.named_positions) >= limits.durables:
            raise RemoteProtocolError(
                Reason.TOO_MANY_SUBSCRIPTIONS,
                f"class {cls.class_id} has {len(cls.named_positions)} durables and groups, "
                f"at most {limits.durables} are allowed",
            )
        if address := self.anonymous_address(session):
            address_quota = _quota_of_all(
                limits.durables_per_address, limits.durables, ADDRESS_QUOTA_DIVISOR
            )
            count = self.position_count_by_address[address]
            if address_quota and count >= address_quota:
                raise RemoteProtocolError(
                    Reason.TOO_MANY_SUBSCRIPTIONS,
                    f"clients of {address} without a user have {count} durables and groups in all "
                    f"classes, at most {address_quota} are allowed; set "
                    "--max-durables-per-address to change the limit",
                )
        quota = self._quota_of(session, "durables", limits.durables)
        if quota is not None and self.position_count_by_user[session.user] >= quota:
            raise RemoteProtocolError(
                Reason.TOO_MANY_SUBSCRIPTIONS,
                f"user {session.user!r} has {self.position_count_by_user[session.user]} durables "
                f"and groups in all classes, at most {quota} are allowed",
            )

    def add_position(self, position: Position) -> None:
        """Count a new position."""
        self.durable_count += bool(position.durable)

    def assign_owner(self, position: Position, user: str, address: str = "") -> None:
        """Make `user`, or clients of `address` without a user, the owner of a position that has
        none.
        """
        counts: Counter[str] | None = None
        if user and not position.owner:
            self._uncount_owner(position)
            position.set_owner(user)
            counts = self.position_count_by_user
        elif address and not (position.owner or position.owner_address):
            position.set_owner("", address)
            counts = self.position_count_by_address
        if counts is not None and (position.durable or position.group):
            counts[user or address] += 1

    def change_owner(self, position: Position, user: str) -> None:
        """Make `user` the owner of a position; an empty name removes the owner."""
        self._uncount_owner(position)
        position.set_owner("")
        self.assign_owner(position, user)

    def remove_position(self, position: Position) -> None:
        """Stop counting a position that was removed."""
        self.durable_count -= bool(position.durable)
        self._uncount_owner(position)

    def _uncount_owner(self, position: Position) -> None:
        for owner, counts in (
            (position.owner, self.position_count_by_user),
            (position.owner_address, self.position_count_by_address),
        ):
            if owner and (position.durable or position.group):
                counts[owner] -= 1
                if not counts[owner]:
                    del counts[owner]

    def _quota_of(self, session: Session, resource: str, total: int) -> int | None:
        """Return how many of a resource the user of a session may create; None for no limit."""
        configured = self._configured_quota(session, resource)
        if configured is not None:
            return configured or None
        return None if session.grants is None else max(1, total // USER_QUOTA_DIVISOR)

    def _configured_quota(self, session: Session, resource: str) -> int | None:
        """Return the quota in the user's table: 0 for no limit, None if it is not set."""
        user = self._user_directory.find_by_name(session.user)
        return None if user is None else getattr(user, f"{resource}_max")


def _quota_of_all(limit: int | None, total: int, divisor: int) -> int:
    """Return a configured limit, or a part of `total` without one; 0 for no limit."""
    return max(1, total // divisor) if limit is None else limit
