"""How much one user may have of what all share: classes that it has made, durables and groups.

Rule 1: what was made counts as its maker's as long as it is there, whoever is connected, and past
the process where anything is kept past it. What nobody in particular has made is nobody's share.
Rule 2: who may not do everything has a part of the bus at most, and all of them together leave a
part of it, unless its user says how much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import DURABLE_BYTES, DURABLES_PART, LEFT_PART, USER_PART
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.session.session import Session
from simplebus.core.store.store import Store
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.core.users.users import Users

_CLASS_QUOTA_HINT = (
    "; classes stay once they are made, and max-classes in its user's table says how many"
)


class Quotas:
    """Of one broker."""

    def __init__(self, users: Callable[[], Users | None], store: Store) -> None:
        """`users` says who they are now."""
        self._users = users
        self._store = store
        self.durable_count = 0
        """How many there are."""
        self.position_count_by_user: Counter[str] = Counter()
        """By maker, durables and groups."""

    def check_class_quota(self, session: Session, requested: Iterable[tuple[int, str]]) -> None:
        """Raise RemoteProtocolError (too_many_classes) unless a session's user may make those of
        these classes that are not there."""
        classes = self._store.classes
        new = {class_id for class_id, _ in requested} - classes.keys()
        most = self._quota_of(session, "classes", self._store.settings.limits.classes)
        if not new or most is None:
            return
        made = sum(cls.creator == session.user for cls in classes.values())
        if made + len(new) > most:
            raise RemoteProtocolError(
                Reason.TOO_MANY_CLASSES,
                f"user {session.user!r} names {len(new)} new classes; it has made {made}, and may "
                f"make {most}{_CLASS_QUOTA_HINT}",
            )
        all_ = self._store.settings.limits.classes
        left = all_ // LEFT_PART
        if (
            self._configured_quota(session, "classes") is None
            and len(classes) + len(new) > all_ - left
        ):
            raise RemoteProtocolError(
                Reason.TOO_MANY_CLASSES,
                f"user {session.user!r} names {len(new)} new classes; {len(classes)} of {all_} "
                f"exist, and the last {left} are for who may do everything{_CLASS_QUOTA_HINT}",
            )

    def check_position_quota(
        self, session: Session, cls: MessageClass, *, is_durable: bool
    ) -> None:
        """Raise RemoteProtocolError (too_many_subscriptions) unless there may be one more durable,
        or group, in this class, made by this session's user."""
        limits = self._store.settings.limits
        if is_durable:
            most = limits.total_bytes // (DURABLES_PART * DURABLE_BYTES)
            if self.durable_count >= most:
                raise RemoteProtocolError(
                    Reason.TOO_MANY_SUBSCRIPTIONS,
                    f"{self.durable_count} durables exist; by the memory of this bus {most} may "
                    "exist",
                )
        if len(cls.named_positions) >= limits.durables:
            raise RemoteProtocolError(
                Reason.TOO_MANY_SUBSCRIPTIONS,
                f"class {cls.class_id} has {len(cls.named_positions)} durables and groups",
            )
        share = self._quota_of(session, "durables", limits.durables)
        if share is not None and self.position_count_by_user[session.user] >= share:
            raise RemoteProtocolError(
                Reason.TOO_MANY_SUBSCRIPTIONS,
                f"user {session.user!r} has {self.position_count_by_user[session.user]} durables "
                "and groups in all "
                f"classes, and may have {share}",
            )

    def add_position(self, position: BrokerSubscription) -> None:
        """A position is new."""
        self.durable_count += bool(position.durable)

    def assign_owner(self, position: BrokerSubscription, user: str) -> None:
        """A position that is nobody's is this user's from now on."""
        if user and not position.owner:
            position.owner = user
            if position.durable or position.group:
                self.position_count_by_user[user] += 1

    def change_owner(self, position: BrokerSubscription, user: str) -> None:
        """A position is not whose it was taken for, but this user's; nobody's for an empty one."""
        self._uncount_owner(position)
        position.owner = ""
        self.assign_owner(position, user)

    def remove_position(self, position: BrokerSubscription) -> None:
        """A position is gone for good."""
        self.durable_count -= bool(position.durable)
        self._uncount_owner(position)

    def _uncount_owner(self, position: BrokerSubscription) -> None:
        if position.owner and (position.durable or position.group):
            self.position_count_by_user[position.owner] -= 1
            if not self.position_count_by_user[position.owner]:
                del self.position_count_by_user[position.owner]

    def _quota_of(self, session: Session, resource: str, total: int) -> int | None:
        """How many of something a session's user may have; None for any number."""
        said = self._configured_quota(session, resource)
        if said is not None:
            return said or None
        return None if session.grants is None else max(1, total // USER_PART)

    def _configured_quota(self, session: Session, resource: str) -> int | None:
        """What its user says of that, 0 for any number; None where it says nothing."""
        users = self._users()
        user = users.named(session.user) if users is not None else None
        return None if user is None else getattr(user, f"{resource}_max")
