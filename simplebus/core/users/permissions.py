"""Permissions of a user: classes and channels to publish to and to subscribe to, and admin rights.

Deny rules win over allow rules and over admin rights, and also apply to dead letters of the denied
messages. Without rules for publishing or subscribing, everything is allowed; admin rights must be
granted. An admin right concerns whole classes, so a deny rule for a single channel also denies the
right. Results are cached by class and by channel number. A subscriber that may see only some
channels of a class receives only the messages of these channels.

    "orders"            class by name, with all channels
    "7"                 class by id
    "dead.*", "*"       classes whose names match; all classes
    "orders eu.#"       channels of a class that match a pattern

A rule begins with a class. "#", "eu.#" and "eu.>" alone are channel patterns, and an error.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2s

import numpy as np
import numpy.typing as npt

from simplebus.core.channel.pattern import check_pattern, is_literal, matches, overlaps
from simplebus.core.limits import PERMISSION_CACHE_MAX, RULES_MAX
from simplebus.core.protocol.frames import Flags

_NO, _YES, _UNKNOWN = range(3)
_SHOWN_CHARACTERS = 80
_CHANNEL_WILDCARDS = ("#", ">")
"""Wildcards for any number of segments, which end a channel pattern."""
DEAD_LETTER_PREFIX = "dead."
"""Prefix of the class names of dead letters."""


REPLIES_CLASS = "simplebus.replies"
"""Class of replies to requests. A user with permissions receives only replies to itself."""


def reply_channel_prefix(user: str | None) -> str:
    """Return the prefix of the channels on which a user may receive replies.

    Args:
        user: Name of a user with permissions; None for clients that may receive all replies.
    """
    if user is None:
        return f"{REPLIES_CLASS}."
    return f"{REPLIES_CLASS}.{blake2s(user.encode(), digest_size=8).hexdigest()}."


def has_private_channels(name: str) -> bool:
    """Return True if subscribers of this class must give each channel by its full name.

    Also true for the dead letters of such a class.
    """
    return name.removeprefix(DEAD_LETTER_PREFIX) == REPLIES_CLASS


class AdminRight(enum.StrEnum):
    """Right that is not granted by default."""

    INQUIRE = "inquire"
    """Inspect sessions, positions and classes of other users."""
    PURGE = "purge"
    """Discard stored messages."""
    FETCH = "fetch"
    """Read stored messages by sequence."""
    CONFIGURE = "configure"
    """Change the retention and the NATS subjects of a class."""
    MONITOR = "monitor"
    """Read the metrics of the bus. Includes `inquire`, because both show the activity of all users.
    """


ClassIdentity = tuple[int, str]
"""Id and name of a class; -1 and "" if unknown."""
_CacheKey = tuple[int | str | ClassIdentity, ...]


def unresolved_class(text: str) -> list[ClassIdentity]:
    """Return the identity of a class of which only the id or the name is known."""
    return [(int(text) if text.isdecimal() else -1, text)]


class ClassAccess(enum.Enum):
    """Access of a user to one class."""

    ALL = "all"
    SOME = "some"
    """Access to some channels."""
    NONE = "none"


@functools.lru_cache(maxsize=1024)
def _class_pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)


def is_class_match(pattern: str, class_id: int, name: str) -> bool:
    """Return True if a class pattern matches the id or the name of a class; `*` matches any
    characters.
    """
    regex = _class_pattern(pattern)
    return bool(regex.fullmatch(str(class_id)) or (name and regex.fullmatch(name)))


@dataclass(frozen=True, slots=True)
class PermissionRule:
    """One or more classes, and channels in them. Raises ValueError if either is not legal."""

    class_: str
    """Class id, class name, or a name with `*` for any characters."""
    channel: str = ""
    """Pattern; empty for all channels and for messages without a channel."""

    def __post_init__(self) -> None:
        if not self.class_ or not self.class_.isprintable() or " " in self.class_:
            raise ValueError(
                f"{self.class_[:_SHOWN_CHARACTERS]!r} is not a class, expected an id, a name, or "
                "a name with *"
            )
        if self.class_.rpartition(".")[2] in _CHANNEL_WILDCARDS:
            shown = self.class_[:_SHOWN_CHARACTERS]
            raise ValueError(
                f"{shown!r} is a pattern of channels, expected a class: * for all, or "
                f"{'* ' + shown!r} for these channels of all; for a class with such a name, "
                "write its id"
            )
        if self.channel:
            check_pattern(self.channel)

    def __str__(self) -> str:
        return f"{self.class_} {self.channel}".strip()

    @classmethod
    def parse(cls, text: str) -> PermissionRule:
        """Parse a class, optionally followed by a blank and a pattern. Raises ValueError."""
        class_, _, channel = text.strip().partition(" ")
        return cls(class_, channel.strip())


@dataclass(frozen=True, slots=True)
class PermissionRules:
    """Allow and deny rules for publishing or for subscribing."""

    allow: tuple[PermissionRule, ...] | None = None
    """None for everything."""
    deny: tuple[PermissionRule, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.allow or ()) + len(self.deny)
        if count > RULES_MAX:
            raise ValueError(f"there are {count} rules, expected at most {RULES_MAX}")

    def for_class(
        self, class_id: int, name: str, dead_letter_sources: Iterable[ClassIdentity] = ()
    ) -> ClassPermissions:
        """Return the permissions for one class.

        Args:
            class_id: Id of the class.
            name: Name of the class; may be empty.
            dead_letter_sources: Classes whose dead letters the class may contain.
        """
        allow = [r for r in self.allow or () if is_class_match(r.class_, class_id, name)]
        deny = [r for r in self.deny if is_class_match(r.class_, class_id, name)]
        for source in dead_letter_sources:  # Deny rules also apply to dead letters.
            deny += [r for r in self.deny if is_class_match(r.class_, *source)]
        return ClassPermissions(
            allow_all=self.allow is None or any(not rule.channel for rule in allow),
            allow=tuple(sorted({rule.channel for rule in allow if rule.channel})),
            deny_all=any(not rule.channel for rule in deny),
            deny=tuple(sorted({rule.channel for rule in deny if rule.channel})),
        )


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permissions of one user. Raises ValueError if they are inconsistent."""

    publish: PermissionRules = PermissionRules()
    subscribe: PermissionRules = PermissionRules()
    admin: tuple[tuple[AdminRight, str], ...] = ()
    """Admin rights and the class pattern that each applies to; `*` for all classes."""
    wildcards: bool = True
    """True if the user may subscribe with wildcards, and without naming channels."""

    @staticmethod
    def parse_right(text: str) -> tuple[AdminRight, str]:
        """Parse an admin right, optionally followed by a blank and a class. Raises ValueError."""
        word, _, class_ = text.strip().partition(" ")
        try:
            right = AdminRight(word)
        except ValueError:
            rights = ", ".join(AdminRight)
            raise ValueError(f"{word!r} is not a right, expected one of {rights}") from None
        class_pattern = PermissionRule(class_.strip() or "*").class_
        if class_pattern != "*" and right in (AdminRight.INQUIRE, AdminRight.MONITOR):
            raise ValueError(f"{text.strip()!r}: the right {word!r} cannot be limited to a class")
        return right, class_pattern


class ClassPermissions:
    """Channels of one class that a user may publish to or subscribe to."""

    __slots__ = (
        "_cache_key",
        "_cached_bytes",
        "_cached_results",
        "access",
        "allow",
        "comparison_key",
        "deny",
    )

    def __init__(
        self, *, allow_all: bool, allow: tuple[str, ...], deny_all: bool, deny: tuple[str, ...]
    ) -> None:
        """Allow everything or the channels of `allow`, except everything (`deny_all`) or the
        channels of `deny`.
        """
        self.allow = ("#",) if allow_all else allow
        self.deny = ("#",) if deny_all else deny
        self.comparison_key = (self.allow, self.deny)
        """Key that is equal for equal permissions."""
        if deny_all or not self.allow:
            self.access = ClassAccess.NONE
        elif allow_all and not deny:
            self.access = ClassAccess.ALL
        else:
            self.access = ClassAccess.SOME
        self._cached_bytes = bytearray()
        """Cached results by channel number."""
        self._cached_results = np.frombuffer(self._cached_bytes, np.uint8)
        """Array over the memory of `_cached_bytes`, which is faster for many channels."""
        self._cache_key: object = None
        """Channel list and generation that the cached results belong to."""

    @property
    def rule_count(self) -> int:
        """Number of rules that a channel may have to be compared with."""
        return len(self.deny) + len(self.allow)

    def is_allowed(self, channel: str) -> bool:
        """Return True if messages of this channel are allowed; "" stands for no channel."""
        if any(matches(pattern, channel) for pattern in self.deny):
            return False
        return any(matches(pattern, channel) for pattern in self.allow)

    def can_overlap(self, pattern: str) -> bool:
        """Return True if some channel that `pattern` matches may be allowed."""
        if is_literal(pattern):
            return self.is_allowed(pattern)
        return self.access is not ClassAccess.NONE and any(
            overlaps(pattern, allowed) for allowed in self.allow
        )

    def allowed_flags(
        self, names: Sequence[str], generation: int, numbers: npt.NDArray[np.integer] | int
    ) -> Flags:
        """Return flags of the allowed channels, shape (n,), or (1,) for a single number.

        Args:
            names: Channel names by number, valid for this `generation`.
            generation: Changes if numbers are reused.
            numbers: Channel numbers, shape (n,), or one number.
        """
        self._resize_cache(names, generation)
        channel_numbers = np.atleast_1d(np.asarray(numbers))
        results = self._cached_results[channel_numbers]
        is_unknown = results == _UNKNOWN
        if is_unknown.any():
            for number in np.unique(channel_numbers[is_unknown]).tolist():
                self._cached_results[number] = _YES if self.is_allowed(names[number]) else _NO
            results = self._cached_results[channel_numbers]
        allowed: Flags = results == _YES
        return allowed

    def is_all_allowed(self, names: Sequence[str], generation: int, numbers: Sequence[int]) -> bool:
        """Return True if all of these channels are allowed. Fast for a few numbers."""
        self._resize_cache(names, generation)
        cached = self._cached_bytes
        for number in numbers:
            if cached[number] != _YES:
                return bool(self.allowed_flags(names, generation, np.array(numbers)).all())
        return True

    def _resize_cache(self, names: Sequence[str], generation: int) -> None:
        """Make room for a result for each of these channels."""
        cache_key = (id(names), generation)
        if self._cache_key == cache_key and len(names) <= self._cached_results.size:
            return
        before = bytes(self._cached_bytes) if self._cache_key == cache_key else b""
        self._cache_key = cache_key
        size = min(max(16, 2 * len(names)), max(PERMISSION_CACHE_MAX, len(names)))
        self._cached_bytes = bytearray(before.ljust(size, bytes([_UNKNOWN])))
        self._cached_results = np.frombuffer(self._cached_bytes, np.uint8)


class Grants:
    """Permissions with cached results, shared by all sessions of a user."""

    def __init__(
        self,
        permissions: Permissions,
        resolve_class_name: Callable[[str], Sequence[ClassIdentity]] | None = None,
    ) -> None:
        """Create grants. `resolve_class_name` returns the classes that a name may stand for."""
        self.permissions = permissions
        self._resolve_class_name = resolve_class_name or unresolved_class
        self._publish_cache: dict[_CacheKey, ClassPermissions] = {}
        self._subscribe_cache: dict[_CacheKey, ClassPermissions] = {}

    @property
    def rule_count(self) -> int:
        """Number of rules that may have to be compared with a class."""
        rules = self.permissions
        groups = (rules.publish.allow, rules.publish.deny, rules.subscribe.allow)
        return sum(
            len(rules_of_kind or ())
            for rules_of_kind in (*groups, rules.subscribe.deny, rules.admin)
        )

    def publish_permissions(self, class_id: int, name: str) -> ClassPermissions:
        """Return the permissions to publish to this class."""
        return self._cached_permissions(
            self._publish_cache, self.permissions.publish, class_id, name
        )

    def subscribe_permissions(self, class_id: int, name: str) -> ClassPermissions:
        """Return the permissions to receive messages of this class."""
        return self._cached_permissions(
            self._subscribe_cache, self.permissions.subscribe, class_id, name
        )

    def has_right(self, right: AdminRight, class_id: int | None = None, name: str = "") -> bool:
        """Return True if the user has an admin right in this class; None for all classes.

        A rule that denies subscribing also denies every right, and a rule that denies publishing
        also denies the rights to change the class. With `None`, deny rules for any class count,
        except for `inquire`, because reports leave out the denied classes.
        """
        return self._is_granted(right, class_id, name) and not self._is_denied(
            right, class_id, name
        )

    def _is_granted(self, right: AdminRight, class_id: int | None, name: str) -> bool:
        for granted, pattern in self.permissions.admin:
            includes_right = granted is right or (
                granted is AdminRight.MONITOR and right is AdminRight.INQUIRE
            )
            if includes_right and (
                pattern == "*" or (class_id is not None and is_class_match(pattern, class_id, name))
            ):
                return True
        return False

    def _is_denied(self, right: AdminRight, class_id: int | None, name: str) -> bool:
        can_change_class = right in (AdminRight.PURGE, AdminRight.CONFIGURE)
        if class_id is None:
            rules = self.permissions
            is_denied = bool(rules.subscribe.deny or (can_change_class and rules.publish.deny))
            return is_denied and right is not AdminRight.INQUIRE
        if right is AdminRight.FETCH and has_private_channels(name):
            return True
        return bool(
            self.subscribe_permissions(class_id, name).deny
            or (can_change_class and self.publish_permissions(class_id, name).deny)
        )

    def has_any_access(self, class_id: int, name: str) -> bool:
        """Return True if the user may do anything with this class."""
        if self.publish_permissions(class_id, name).access is not ClassAccess.NONE:
            return True
        if self.subscribe_permissions(class_id, name).access is not ClassAccess.NONE:
            return True
        return any(self.has_right(right, class_id, name) for right in AdminRight)

    def _cached_permissions(
        self,
        cached: dict[_CacheKey, ClassPermissions],
        rules: PermissionRules,
        class_id: int,
        name: str,
    ) -> ClassPermissions:
        sources: Sequence[ClassIdentity] = ()
        if name.startswith(DEAD_LETTER_PREFIX):
            sources = self._resolve_class_name(name.removeprefix(DEAD_LETTER_PREFIX))
        permissions = cached.get((class_id, name, *sources))
        if permissions is None:
            if len(cached) >= PERMISSION_CACHE_MAX:
                cached.clear()
            permissions = rules.for_class(class_id, name, sources)
            cached[class_id, name, *sources] = permissions
        return permissions
