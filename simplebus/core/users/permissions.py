"""What one user may do with which classes and channels.

Rule 1: what is denied is denied, whatever is allowed, and so is what was given up of it. Where
nothing is said of publishing or of subscribing, everything is allowed; of looking after the bus,
nothing is.
Rule 2: a class is judged once, by its id and name; a channel of it once, by its number. A run of
messages is a look into a table.
Rule 3: who may see some channels of a class and subscribes to more is sent what it may see.

    "orders"            a class, by its name, and all that is in it
    "7"                 by its id
    "dead.*", "*"       classes whose name begins so; all
    "orders eu.#"       channels of a class that a pattern matches

A class comes first: "#", "eu.#" and "eu.>" alone are channels, and a mistake.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simplebus.core.channel.pattern import check_pattern, is_literal, matches, overlaps
from simplebus.core.limits import RULES_MAX, VERDICTS_KEPT_MAX
from simplebus.core.protocol.frames import Flags

_NO, _YES, _UNKNOWN = range(3)
_SHOWN_CHARACTERS = 80
_OF_CHANNELS = ("#", ">")
"""How patterns of channels end that stand for any number of segments."""
DEAD = "dead."
"""What the name of a class begins with that keeps what was given up in another one."""


REPLIES = "simplebus.replies"
"""The class of replies to requests, each of which is for who listens on its channel alone."""


def is_private(name: str) -> bool:
    """Whether a class of this name has channels that are for those who know them by their whole
    name. So have its dead letters."""
    return name.removeprefix(DEAD) == REPLIES


class Right(enum.StrEnum):
    """What is not everybody's business."""

    INQUIRE = "inquire"
    """To be told what others do."""
    PURGE = "purge"
    """To take away what others have published."""
    FETCH = "fetch"
    """To see messages by their sequences, whoever they are for."""
    CONFIGURE = "configure"
    """To say what a class keeps, and which subjects are its own."""
    MONITOR = "monitor"
    """To see the figures of the bus, and all that `inquire` tells: both show who does what."""


Called = tuple[int, str]
"""Id and name of a class; -1 and empty where it has none that is known."""
_Judged = tuple[int | str | Called, ...]


def called_so(text: str) -> list[Called]:
    """The class that is called so, where no more is known of it."""
    return [(int(text) if text.isdecimal() else -1, text)]


class Verdict(enum.Enum):
    """What is known of a class."""

    ALL = "all"
    SOME = "some"
    """It depends on the channel."""
    NONE = "none"


@functools.lru_cache(maxsize=1024)
def _class_pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)


def is_of_class(pattern: str, class_id: int, name: str) -> bool:
    """Whether a class's id or name is what this stands for; `*` are any characters."""
    found = _class_pattern(pattern)
    return bool(found.fullmatch(str(class_id)) or (name and found.fullmatch(name)))


@dataclass(frozen=True, slots=True)
class Rule:
    """A class, or several, and channels of it. Raises ValueError for what is none."""

    class_: str
    """An id, a name, or a name with `*` for any characters."""
    channel: str = ""
    """A pattern; empty for all, and for messages without a channel."""

    def __post_init__(self) -> None:
        if not self.class_ or not self.class_.isprintable() or " " in self.class_:
            raise ValueError(
                f"{self.class_[:_SHOWN_CHARACTERS]!r} is no class, expected an id, a name, or a "
                "name with * in it"
            )
        if self.class_.rpartition(".")[2] in _OF_CHANNELS:
            shown = self.class_[:_SHOWN_CHARACTERS]
            raise ValueError(
                f"{shown!r} is a pattern of channels, expected a class: * for all, or "
                f"{'* ' + shown!r} for these channels of all; a class that is called so goes by "
                "its id"
            )
        if self.channel:
            check_pattern(self.channel)

    def __str__(self) -> str:
        return f"{self.class_} {self.channel}".strip()

    @classmethod
    def parse(cls, text: str) -> Rule:
        """From a class, perhaps a blank and a pattern of channels. Raises ValueError."""
        class_, _, channel = text.strip().partition(" ")
        return cls(class_, channel.strip())


@dataclass(frozen=True, slots=True)
class Rules:
    """What is allowed, and what is not."""

    allow: tuple[Rule, ...] | None = None
    """None for everything."""
    deny: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.allow or ()) + len(self.deny)
        if count > RULES_MAX:
            raise ValueError(f"there are {count} rules, expected at most {RULES_MAX}")

    def scope(self, class_id: int, name: str, of: Iterable[Called] = ()) -> Scope:
        """What they say of one class. If it keeps what was given up, `of` are those in which it may
        have been."""
        allow = [r for r in self.allow or () if is_of_class(r.class_, class_id, name)]
        deny = [r for r in self.deny if is_of_class(r.class_, class_id, name)]
        for each in of:  # What is denied is denied when it is given up, too.
            deny += [r for r in self.deny if is_of_class(r.class_, *each)]
        return Scope(
            everything=self.allow is None or any(not rule.channel for rule in allow),
            allow=tuple(sorted({rule.channel for rule in allow if rule.channel})),
            nothing=any(not rule.channel for rule in deny),
            deny=tuple(sorted({rule.channel for rule in deny if rule.channel})),
        )


@dataclass(frozen=True, slots=True)
class Permissions:
    """What one user may do. Raises ValueError for what makes no sense."""

    publish: Rules = Rules()
    subscribe: Rules = Rules()
    admin: tuple[tuple[Right, str], ...] = ()
    """Rights, and in which classes: `*` for all."""
    wildcards: bool = True
    """Whether it may subscribe to channels without naming each."""

    @staticmethod
    def parse_right(text: str) -> tuple[Right, str]:
        """A right, perhaps a blank and a class. Raises ValueError."""
        word, _, class_ = text.strip().partition(" ")
        try:
            right = Right(word)
        except ValueError:
            known = ", ".join(Right)
            raise ValueError(f"{word!r} is no right, expected one of {known}") from None
        of = Rule(class_.strip() or "*").class_
        if of != "*" and right in (Right.INQUIRE, Right.MONITOR):
            raise ValueError(f"{text.strip()!r}: the right {word!r} is one in all classes")
        return right, of


class Scope:
    """Of one class, what is allowed."""

    __slots__ = ("_kept", "_valid_for", "_verdicts", "allow", "deny", "key", "verdict")

    def __init__(
        self, *, everything: bool, allow: tuple[str, ...], nothing: bool, deny: tuple[str, ...]
    ) -> None:
        """`everything` is allowed, or the channels of `allow`; `nothing` is, or not those of
        `deny`."""
        self.allow = ("#",) if everything else allow
        self.deny = ("#",) if nothing else deny
        self.key = (self.allow, self.deny)
        """Two with the same key allow the same."""
        if nothing or not self.allow:
            self.verdict = Verdict.NONE
        elif everything and not deny:
            self.verdict = Verdict.ALL
        else:
            self.verdict = Verdict.SOME
        self._kept = bytearray()
        """Verdicts by channel number."""
        self._verdicts = np.frombuffer(self._kept, np.uint8)
        """The same ones: a few are read sooner there, many here."""
        self._valid_for: object = None
        """For which channels the numbers stand."""

    def allows(self, channel: str) -> bool:
        """Whether messages of this channel are; "" for those without one."""
        if any(matches(pattern, channel) for pattern in self.deny):
            return False
        return any(matches(pattern, channel) for pattern in self.allow)

    def may_allow(self, pattern: str) -> bool:
        """Whether any channel that this pattern matches may be allowed."""
        if is_literal(pattern):
            return self.allows(pattern)
        return self.verdict is not Verdict.NONE and any(
            overlaps(pattern, allowed) for allowed in self.allow
        )

    def of(
        self, names: Sequence[str], generation: int, numbers: npt.NDArray[np.integer] | int
    ) -> Flags:
        """Of which of these channels messages are allowed. `names` are the channels by number, as
        long as `generation` stays. Shape (n,), or (1,) for a single number."""
        self._reach(names, generation)
        asked = np.atleast_1d(np.asarray(numbers))
        found = self._verdicts[asked]
        unknown = found == _UNKNOWN
        if unknown.any():
            for number in np.unique(asked[unknown]).tolist():
                self._verdicts[number] = _YES if self.allows(names[number]) else _NO
            found = self._verdicts[asked]
        allowed: Flags = found == _YES
        return allowed

    def allows_all(self, names: Sequence[str], generation: int, numbers: Sequence[int]) -> bool:
        """Whether messages of all of these channels are: what `of` says, for a few."""
        self._reach(names, generation)
        kept = self._kept
        for number in numbers:
            if kept[number] != _YES:
                return bool(self.of(names, generation, np.array(numbers)).all())
        return True

    def _reach(self, names: Sequence[str], generation: int) -> None:
        """Have a verdict for each of these channels, known or not."""
        known = (id(names), generation)
        if self._valid_for == known and len(names) <= self._verdicts.size:
            return
        before = bytes(self._kept) if self._valid_for == known else b""
        self._valid_for = known
        size = min(max(16, 2 * len(names)), max(VERDICTS_KEPT_MAX, len(names)))
        self._kept = bytearray(before.ljust(size, bytes([_UNKNOWN])))
        self._verdicts = np.frombuffer(self._kept, np.uint8)


class Grants:
    """Permissions as they are asked; one for all sessions of a user."""

    def __init__(
        self, permissions: Permissions, called: Callable[[str], Sequence[Called]] | None = None
    ) -> None:
        """`called` says of the name of a class without `dead.` which classes' letters it keeps."""
        self.permissions = permissions
        self._called = called or called_so
        self._publishing: dict[_Judged, Scope] = {}
        self._subscribing: dict[_Judged, Scope] = {}

    def publishing(self, class_id: int, name: str) -> Scope:
        """What may be published to this class."""
        return self._scope(self._publishing, self.permissions.publish, class_id, name)

    def subscribing(self, class_id: int, name: str) -> Scope:
        """What may be seen of it."""
        return self._scope(self._subscribing, self.permissions.subscribe, class_id, name)

    def has(self, right: Right, class_id: int | None = None, name: str = "") -> bool:
        """Whether it has a right: in this class, or in all for None."""
        for granted, pattern in self.permissions.admin:
            is_it = granted is right or (granted is Right.MONITOR and right is Right.INQUIRE)
            if is_it and (
                pattern == "*" or (class_id is not None and is_of_class(pattern, class_id, name))
            ):
                return True
        return False

    def knows(self, class_id: int, name: str) -> bool:
        """Whether it has anything to do with this class."""
        if self.publishing(class_id, name).verdict is not Verdict.NONE:
            return True
        if self.subscribing(class_id, name).verdict is not Verdict.NONE:
            return True
        return any(self.has(right, class_id, name) for right in Right)

    def _scope(self, cached: dict[_Judged, Scope], rules: Rules, class_id: int, name: str) -> Scope:
        of: Sequence[Called] = ()
        if name.startswith(DEAD):
            of = self._called(name.removeprefix(DEAD))
        found = cached.get((class_id, name, *of))
        if found is None:
            if len(cached) >= VERDICTS_KEPT_MAX:
                cached.clear()
            found = cached[class_id, name, *of] = rules.scope(class_id, name, of)
        return found
