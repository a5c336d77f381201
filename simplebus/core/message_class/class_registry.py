"""Which classes there are, by id and by name, and which subjects are bound to them.

Rule 1: a class that is there stays; what cannot be had whole is refused whole, and changes nothing.
Rule 2: this file makes classes; what happens in them is the store's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from simplebus.core import dead_letters
from simplebus.core.commit_log import Ledger
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.histogram import Histogram
from simplebus.core.limits import (
    CLASS_ID_MAX,
    DEAD_LETTERS_ASIDE,
    DEAD_LETTERS_PART,
    NAME_CHARACTERS_MAX,
    RING_BYTES_MIN,
    SPILL_MEMORY_PART,
)
from simplebus.core.message_class.class_ids import distinct, given_ids, is_plain, named_class
from simplebus.core.message_class.last_values import RECORDS
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.spill import Spill, Spilling
from simplebus.core.message_class.subject_bindings import Bound
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.ring.memory_budget import MemoryBudget, MemoryShare
from simplebus.core.ring.ring import Ring
from simplebus.core.settings import FullPolicy, Keep, Settings
from simplebus.core.users.permissions import Called, called_so

K = TypeVar("K")
"""How a class is asked for."""


def _budgets(settings: Settings) -> tuple[int, int, int, int]:
    """Memory of all classes, of what is read back from disk, of dead letters, and what of the first
    is for those alone."""
    total = settings.limits.total_bytes
    spilled = max(total // SPILL_MEMORY_PART, 4 * settings.limits.frame_bytes)
    whole = max(total - spilled, total // 2) if settings.spills else total
    one = 2 * (settings.limits.frame_bytes + RING_BYTES_MIN)  # So that any one finds room.
    aside = min(max(whole // DEAD_LETTERS_ASIDE, one), whole // 8)
    # Less is room for none.
    return whole, spilled, whole // DEAD_LETTERS_PART, aside if aside >= 2 * RING_BYTES_MIN else 0


def _too_many(new: int, there: int, most: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        Reason.TOO_MANY_CLASSES,
        f"a Connect named {new} new classes; {there} exist, {most} may exist",
    )


class ClassTable:
    """See the module's law."""

    def __init__(self, settings: Settings, ledger: Ledger | None = None) -> None:
        self.settings = settings
        self.ledger = ledger
        """New classes and names are noted in it; None where nothing is kept past the process."""
        self.classes: dict[int, MessageClass] = {}
        self.names: dict[str, int] = {}
        """Ids of the classes that have names."""
        self.own: set[int] = set()
        """Ids of those that the bus has made for dead letters: no limit of others keeps it from
        that."""
        self.bound = Bound()
        whole, spilled, dead, aside = _budgets(settings)
        self.spill_budget = MemoryBudget(spilled)
        """Of what is read back from disk."""
        self.spilling: Spilling | None = None
        """Set when classes may be larger than memory."""
        self.budget = MemoryBudget(whole)
        self.dead_budget = MemoryShare(dead, self.budget, set_aside=aside)
        """Of all dead letters."""
        self.make: Callable[[Ring, Keep, FullPolicy], MessageClass] = MessageClass
        """What makes a class."""
        self.duplicate_seconds = 0.0
        """Where classes keep their messages elsewhere, these are known there for so long by their
        publishers' numbers; 0 where they are kept here."""
        self.first_number: Callable[[float], int] | None = None
        """Which number a program begins with that connects at this time; None where all that is
        known of its name is known here."""
        self.named: Callable[[MessageClass, str], None] = lambda cls, why: None
        """Called with a class of which something else may be true now, and with what has happened:
        it has a name, or one has whose dead letters it keeps."""
        self.opened: Callable[[int], None] = lambda class_id: None
        """Called with the id of a class that is new."""
        self._acknowledged_after: Histogram | None = None

    def measure(self, acknowledged_after: Histogram) -> None:
        """Have every class count how long some messages take until everybody has acknowledged
        them."""
        self._acknowledged_after = acknowledged_after
        for cls in self.classes.values():
            cls.acknowledged_after = acknowledged_after

    def adopt(self, settings: Settings) -> None:
        """Have all classes, those that are there too, do what these say. What is stored beyond a
        limit that is lower now stays until it is taken."""
        self.settings = settings
        whole, spilled, dead, aside = _budgets(settings)
        self.budget.limit, self.spill_budget.limit = whole, spilled
        self.dead_budget.resize(dead, set_aside=aside)
        for cls in self.classes.values():
            self._obey(cls)

    def called(self, text: str) -> list[Called]:
        """Which classes have dead letters in the class of this name, without what it begins with:
        those of this name or, without a name, of this id, and those of names too long for it."""
        found = called_so(text)
        ids = {self.names.get(text, -1), *(class_id for class_id, _ in found)}
        if len(dead_letters.PREFIX + text) >= NAME_CHARACTERS_MAX:
            ids |= {class_id for name, class_id in self.names.items() if name.startswith(text)}
        found += [(id_, self.classes[id_].name) for id_ in sorted(ids) if id_ in self.classes]
        return list(dict.fromkeys(found))

    def open_classes(
        self, found: Iterable[tuple[int, str]], *, are_own: bool = False, maker: str = ""
    ) -> None:
        """Have the classes with these ids and names, as `find_ids` has found them; "" is for no
        name, or for the one that it has. The bus's own are not limited. `maker`
        is the user whose new ones are.

        Raises RemoteProtocolError (too_many_classes), and has none of them then.
        """
        names: dict[int, str] = {}
        for class_id, name in found:
            names[class_id] = name or names.get(class_id, "")
        if are_own:
            self.own.update(names.keys() - self.classes.keys())
        for class_id in self.new_classes(names):
            self._open_class(class_id, names[class_id])
            self.classes[class_id].maker = maker
        for class_id, name in names.items():
            if name:
                self._name_class(self.classes[class_id], name)

    def _open_class(self, class_id: int, name: str) -> None:
        limits = self.settings.limits
        ring = Ring(
            class_id=class_id,
            messages_max=limits.class_messages,
            bytes_max=limits.class_bytes,
            budget=self.dead_budget if dead_letters.are_kept_in(name) else self.budget,
        )
        cls = self.make(ring, self.settings.keep, self.settings.full_policy)
        cls.acknowledged_after = self._acknowledged_after
        self.classes[class_id] = cls
        self._obey(cls)
        if self.ledger is not None:
            self.ledger.hurries[class_id] = None
        self.opened(class_id)

    def _name_class(self, cls: MessageClass, name: str) -> None:
        if self.ledger is not None and cls.name != name:
            self.ledger.hurries[cls.class_id] = None
        is_news = cls.name != name
        cls.name = name
        self.names[name] = cls.class_id
        self._obey(cls)
        if is_news:
            letters = self.names.get(dead_letters.class_name(str(cls.class_id)), cls.class_id)
            for class_id in {cls.class_id, letters}:
                self.named(
                    self.classes[class_id], f"class {cls.class_id} has the name {name!r} now"
                )

    def _obey(self, cls: MessageClass) -> None:
        """Have a class do what the settings say of it, by the name that it has now."""
        settings, limits = self.settings, self.settings.limits
        own = settings.of_class(cls.class_id, cls.name)
        cls.is_to_keep(settings.keep if own.keep is None else own.keep)
        cls.policy = settings.policy(own)
        if cls.policy is FullPolicy.SPILL and cls.name == RECORDS:
            cls.policy = FullPolicy.BLOCK
        ring = cls.ring
        ring.messages_max = min(own.messages_max or limits.class_messages, limits.class_messages)
        ring.bytes_max = min(own.bytes_max or limits.class_bytes, limits.class_bytes)
        if cls.policy is FullPolicy.SPILL and not dead_letters.are_kept_in(cls.name):
            assert self.spilling is not None
            cls.spill = cls.spill or Spill(cls, self.spilling)
            cls.spill.bytes_max = own.disk_bytes_max or 0
        elif cls.spill is not None and not cls.spill.messages and not cls.spill.behind:
            cls.spill = None  # Without its name it did what others do.
        asked = cls.is_asked_for_values if own.last_values is None else own.last_values
        cls.holds_values = (
            bool(asked) and cls.spill is None and not dead_letters.are_kept_in(cls.name)
        )
        if dead_letters.are_kept_in(cls.name):
            if own.full_policy is not FullPolicy.BLOCK:
                cls.policy = FullPolicy.DROP_OLDEST
            ring.bytes_max = min(limits.dead_letter_bytes, ring.bytes_max)

    def new_classes(self, class_ids: Iterable[int]) -> list[int]:
        """Those of these classes that do not exist yet. Raises as `open_classes` does."""
        new = [class_id for class_id in dict.fromkeys(class_ids) if class_id not in self.classes]
        most = self.settings.limits.classes
        if len(self.classes) + len(new) - len(self.own) > most:
            raise _too_many(len(new), len(self.classes), most)
        return new

    def distinct(self, asked: Sequence[K]) -> list[K]:
        """Each id and each name once. Raises RemoteProtocolError (too_many_classes) for more that
        are new, by either, than there may be by both: nothing else is looked at then."""
        found = distinct(asked)
        known = (one in self.classes or one in self.names for one in found if is_plain(one))
        new, most = len(found) - sum(known), self.settings.limits.classes
        if new > 2 * most:
            raise _too_many(new, len(self.classes), most)
        return found

    def _known(self, asked: Sequence[int | str | NamedClass]) -> list[tuple[int, str]] | None:
        """What `find_ids` finds where all are known; None where one is not."""
        found = []
        for one in asked:
            if isinstance(one, str) and one in self.names:
                found.append((self.names[one], one))
            elif isinstance(one, int) and one in self.classes:
                found.append((one, ""))
            else:
                return None
        return found

    def find_ids(self, asked: Sequence[int | str | NamedClass]) -> list[tuple[int, str]]:
        """The id of each class that is asked for, and its name, if it is asked for by name. Who has
        a new name and no id is given one. Changes nothing.

        Raises RemoteProtocolError (bad_connect, class_name_conflict, too_many_classes).
        """
        if (all_known := self._known(asked)) is not None:
            return all_known
        named = [named_class(one) for one in asked]
        ids = {one.id for one in named}
        id_of: dict[str, int] = {}
        name_of: dict[int, str] = {}

        def is_free(class_id: int) -> bool:
            return class_id not in self.classes and class_id not in ids and class_id not in name_of

        others = filter(is_free, range(CLASS_ID_MAX, -1, -1))
        found: list[tuple[int, str]] = []
        for one in named:
            name = one.name or ""
            known = self.names.get(name, id_of.get(name)) if name else None
            class_id = one.id if one.id is not None else known
            if class_id is None:
                class_id = next(filter(is_free, given_ids(name)), None)
                class_id = next(others, None) if class_id is None else class_id
            if class_id is None:
                raise RemoteProtocolError(
                    Reason.TOO_MANY_CLASSES, f"no class id is left for the class {name!r}"
                )
            if name:
                there = name_of.get(class_id, "")
                if class_id in self.classes:
                    there = self.classes[class_id].name or there
                if (known is not None and known != class_id) or there not in ("", name):
                    raise RemoteProtocolError(
                        Reason.CLASS_NAME_CONFLICT,
                        f"the class {name!r} was named with id {class_id}; "
                        + (f"that one is {there!r}" if there else f"it has id {known}"),
                    )
                id_of[name], name_of[class_id] = class_id, name
            found.append((class_id, name))
        return found

    def bind(self, subject: str, class_: int | str) -> int:
        """Have what NATS clients publish on a subject stored in a class, too; the class, given by
        id or name, is made if it is not there. Returns its id.

        Raises RemoteProtocolError as `name_classes` does.
        """
        if isinstance(class_, int):
            asked = NamedClass(id=class_, subjects=[subject])
        else:
            asked = NamedClass(name=class_, subjects=[subject])
        [(class_id, _)] = self.name_classes([asked])
        return class_id

    def name_classes(
        self, asked: Sequence[int | str | NamedClass], *, maker: str = ""
    ) -> list[tuple[int, str]]:
        """Have these classes, bound to these subjects. `maker` is the user whose new ones are.
        Returns what `find_ids` does.

        Raises RemoteProtocolError as `find_ids`, `new_classes` and `Bound.check` do, and has none
        of them then.
        """
        found, bound = self.check_classes(asked)
        self.open_classes(found, maker=maker)
        for (class_id, _), one in zip(found, asked, strict=True):
            if isinstance(one, NamedClass) and one.last_values:
                self.ask_for_values(class_id)
        for class_id, subject in bound:
            self.bound.bind(class_id, subject)
        return found

    @property
    def is_remote(self) -> bool:
        """Whether classes are such that keep their messages elsewhere."""
        return self.duplicate_seconds > 0

    def ask_for_values(self, class_id: int) -> None:
        """Have a class keep its last values, unless the settings say that it does not."""
        cls = self.classes[class_id]
        if not cls.is_asked_for_values:
            cls.is_asked_for_values = True
            self._obey(cls)
            for first, last in cls.purged:
                cls.values.forget(first, last)
            if self.ledger is not None:
                self.ledger.hurries[class_id] = None

    def check_classes(
        self, asked: Sequence[int | str | NamedClass]
    ) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """Raise what `name_classes` would. Returns what `find_ids` does, and which subjects are
        bound then to which ids."""
        found = self.find_ids(asked)
        self.new_classes(class_id for class_id, _ in found)
        if self.is_remote and any(isinstance(o, NamedClass) and o.last_values for o in asked):
            raise RemoteProtocolError(
                Reason.BAD_REQUEST, "a door before a JetStream cluster keeps no last values"
            )
        for (class_id, name), one in zip(found, asked, strict=True):
            if isinstance(one, NamedClass) and one.last_values:
                self._check_values(class_id, name)
        bound = [
            (class_id, subject)
            for (class_id, _), one in zip(found, asked, strict=True)
            if isinstance(one, NamedClass)
            for subject in one.subjects
        ]
        self.bound.check(bound)
        return found, bound

    def _check_values(self, class_id: int, name: str) -> None:
        """Raise RemoteProtocolError (bad_request) for a class that keeps no last values, unless
        the settings say just that."""
        if not name and class_id in self.classes:
            name = self.classes[class_id].name
        own = self.settings.of_class(class_id, name)
        spills = self.settings.policy(own) is FullPolicy.SPILL and name != RECORDS
        if spills and own.last_values is None:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"class {name or class_id} spills, and such a class keeps no last values",
            )

    def dead_class(self, of: str) -> MessageClass:
        """The class of this one's dead letters, made if it is not there. Raises
        RemoteProtocolError as `find_ids` does."""
        name = dead_letters.class_name(of)
        class_id = self.names.get(name)
        if class_id is None:
            found = self.find_ids([name])
            self.open_classes(found, are_own=True)
            [(class_id, _)] = found
        return self.classes[class_id]
