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
from simplebus.core.message_class.class_ids import (
    candidate_ids,
    deduplicate_references,
    is_id_or_name,
    to_named_class,
)
from simplebus.core.message_class.last_values import BRIDGE_RECORDS_CLASS
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.spill import ClassSpill, SpillManager
from simplebus.core.message_class.subject_bindings import ClassSubjectBindings
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.ring.memory_budget import MemoryBudget, MemoryShare
from simplebus.core.ring.ring import Ring
from simplebus.core.settings import FullPolicy, Keep, Settings
from simplebus.core.users.permissions import Called, called_so

ClassKeyT = TypeVar("ClassKeyT")
"""How a class is asked for."""


def _compute_budgets(settings: Settings) -> tuple[int, int, int, int]:
    """Memory of all classes, of what is read back from disk, of dead letters, and what of the first
    is for those alone."""
    total = settings.limits.total_bytes
    spilled = max(total // SPILL_MEMORY_PART, 4 * settings.limits.frame_bytes)
    whole = max(total - spilled, total // 2) if settings.spills else total
    one = 2 * (settings.limits.frame_bytes + RING_BYTES_MIN)  # So that any one finds room.
    aside = min(max(whole // DEAD_LETTERS_ASIDE, one), whole // 8)
    # Less is room for none.
    return whole, spilled, whole // DEAD_LETTERS_PART, aside if aside >= 2 * RING_BYTES_MIN else 0


def _too_many_classes_error(
    new_count: int, existing_count: int, max_count: int
) -> RemoteProtocolError:
    return RemoteProtocolError(
        Reason.TOO_MANY_CLASSES,
        f"a Connect named {new_count} new classes; {existing_count} exist, {max_count} may exist",
    )


class ClassRegistry:
    """See the module's law."""

    def __init__(self, settings: Settings, commit_log: Ledger | None = None) -> None:
        self.settings = settings
        self.commit_log = commit_log
        """New classes and names are noted in it; None where nothing is kept past the process."""
        self.classes: dict[int, MessageClass] = {}
        self.class_id_by_name: dict[str, int] = {}
        """Ids of the classes that have names."""
        self.internal_class_ids: set[int] = set()
        """Ids of those that the bus has made for dead letters: no limit of others keeps it from
        that."""
        self.subject_bindings = ClassSubjectBindings()
        whole, spilled, dead, aside = _compute_budgets(settings)
        self.spill_budget = MemoryBudget(spilled)
        """Of what is read back from disk."""
        self.spill_manager: SpillManager | None = None
        """Set when classes may be larger than memory."""
        self.budget = MemoryBudget(whole)
        self.dead_letter_budget = MemoryShare(dead, self.budget, set_aside=aside)
        """Of all dead letters."""
        self.make_class: Callable[[Ring, Keep, FullPolicy], MessageClass] = MessageClass
        """What makes a class."""
        self.dedup_window_seconds = 0.0
        """Where classes keep their messages elsewhere, these are known there for so long by their
        publishers' numbers; 0 where they are kept here."""
        self.choose_first_number: Callable[[float], int] | None = None
        """Which number a program begins with that connects at this time; None where all that is
        known of its name is known here."""
        self.on_renamed: Callable[[MessageClass, str], None] = lambda cls, why: None
        """Called with a class of which something else may be true now, and with what has happened:
        it has a name, or one has whose dead letters it keeps."""
        self.on_class_created: Callable[[int], None] = lambda class_id: None
        """Called with the id of a class that is new."""
        self._ack_latency: Histogram | None = None

    def enable_ack_latency(self, histogram: Histogram) -> None:
        """Have every class count how long some messages take until everybody has acknowledged
        them."""
        self._ack_latency = histogram
        for cls in self.classes.values():
            cls.ack_latency = histogram

    def apply_settings(self, settings: Settings) -> None:
        """Have all classes, those that are there too, do what these say. What is stored beyond a
        limit that is lower now stays until it is taken."""
        self.settings = settings
        whole, spilled, dead, aside = _compute_budgets(settings)
        self.budget.limit, self.spill_budget.limit = whole, spilled
        self.dead_letter_budget.resize(dead, set_aside=aside)
        for cls in self.classes.values():
            self._apply_class_settings(cls)

    def find_dead_letter_sources(self, text: str) -> list[Called]:
        """Which classes have dead letters in the class of this name, without what it begins with:
        those of this name or, without a name, of this id, and those of names too long for it."""
        found = called_so(text)
        ids = {self.class_id_by_name.get(text, -1), *(class_id for class_id, _ in found)}
        if len(dead_letters.PREFIX + text) >= NAME_CHARACTERS_MAX:
            ids |= {
                class_id
                for name, class_id in self.class_id_by_name.items()
                if name.startswith(text)
            }
        found += [(id_, self.classes[id_].name) for id_ in sorted(ids) if id_ in self.classes]
        return list(dict.fromkeys(found))

    def create_classes(
        self,
        ids_and_names: Iterable[tuple[int, str]],
        *,
        are_internal: bool = False,
        creator: str = "",
    ) -> None:
        """Have the classes with these ids and names, as `find_ids` has found them; "" is for no
        name, or for the one that it has. The bus's own are not limited. `maker`
        is the user whose new ones are.

        Raises RemoteProtocolError (too_many_classes), and has none of them then.
        """
        names: dict[int, str] = {}
        for class_id, name in ids_and_names:
            names[class_id] = name or names.get(class_id, "")
        if are_internal:
            self.internal_class_ids.update(names.keys() - self.classes.keys())
        for class_id in self.select_new_ids(names):
            self._create_class(class_id, names[class_id])
            self.classes[class_id].creator = creator
        for class_id, name in names.items():
            if name:
                self._set_class_name(self.classes[class_id], name)

    def _create_class(self, class_id: int, name: str) -> None:
        limits = self.settings.limits
        ring = Ring(
            class_id=class_id,
            messages_max=limits.class_messages,
            bytes_max=limits.class_bytes,
            budget=self.dead_letter_budget if dead_letters.are_kept_in(name) else self.budget,
        )
        cls = self.make_class(ring, self.settings.keep, self.settings.full_policy)
        cls.ack_latency = self._ack_latency
        self.classes[class_id] = cls
        self._apply_class_settings(cls)
        if self.commit_log is not None:
            self.commit_log.hurries[class_id] = None
        self.on_class_created(class_id)

    def _set_class_name(self, cls: MessageClass, name: str) -> None:
        if self.commit_log is not None and cls.name != name:
            self.commit_log.hurries[cls.class_id] = None
        is_news = cls.name != name
        cls.name = name
        self.class_id_by_name[name] = cls.class_id
        self._apply_class_settings(cls)
        if is_news:
            letters = self.class_id_by_name.get(
                dead_letters.class_name(str(cls.class_id)), cls.class_id
            )
            for class_id in {cls.class_id, letters}:
                self.on_renamed(
                    self.classes[class_id], f"class {cls.class_id} has the name {name!r} now"
                )

    def _apply_class_settings(self, cls: MessageClass) -> None:
        """Have a class do what the settings say of it, by the name that it has now."""
        settings, limits = self.settings, self.settings.limits
        own = settings.of_class(cls.class_id, cls.name)
        cls.set_retention(settings.keep if own.keep is None else own.keep)
        cls.full_policy = settings.policy(own)
        if cls.full_policy is FullPolicy.SPILL and cls.name == BRIDGE_RECORDS_CLASS:
            cls.full_policy = FullPolicy.BLOCK
        ring = cls.ring
        ring.messages_max = min(own.messages_max or limits.class_messages, limits.class_messages)
        ring.bytes_max = min(own.bytes_max or limits.class_bytes, limits.class_bytes)
        if cls.full_policy is FullPolicy.SPILL and not dead_letters.are_kept_in(cls.name):
            assert self.spill_manager is not None
            cls.spill = cls.spill or ClassSpill(cls, self.spill_manager)
            cls.spill.bytes_max = own.disk_bytes_max or 0
        elif cls.spill is not None and not cls.spill.message_count and not cls.spill.readers:
            cls.spill = None  # Without its name it did what others do.
        asked = cls.is_last_values_requested if own.last_values is None else own.last_values
        cls.has_last_values = (
            bool(asked) and cls.spill is None and not dead_letters.are_kept_in(cls.name)
        )
        if dead_letters.are_kept_in(cls.name):
            if own.full_policy is not FullPolicy.BLOCK:
                cls.full_policy = FullPolicy.DROP_OLDEST
            ring.bytes_max = min(limits.dead_letter_bytes, ring.bytes_max)

    def select_new_ids(self, class_ids: Iterable[int]) -> list[int]:
        """Those of these classes that do not exist yet. Raises as `open_classes` does."""
        new = [class_id for class_id in dict.fromkeys(class_ids) if class_id not in self.classes]
        most = self.settings.limits.classes
        if len(self.classes) + len(new) - len(self.internal_class_ids) > most:
            raise _too_many_classes_error(len(new), len(self.classes), most)
        return new

    def deduplicate(self, references: Sequence[ClassKeyT]) -> list[ClassKeyT]:
        """Each id and each name once. Raises RemoteProtocolError (too_many_classes) for more that
        are new, by either, than there may be by both: nothing else is looked at then."""
        found = deduplicate_references(references)
        known = (
            one in self.classes or one in self.class_id_by_name
            for one in found
            if is_id_or_name(one)
        )
        new, most = len(found) - sum(known), self.settings.limits.classes
        if new > 2 * most:
            raise _too_many_classes_error(new, len(self.classes), most)
        return found

    def _resolve_known(
        self, references: Sequence[int | str | NamedClass]
    ) -> list[tuple[int, str]] | None:
        """What `find_ids` finds where all are known; None where one is not."""
        found = []
        for one in references:
            if isinstance(one, str) and one in self.class_id_by_name:
                found.append((self.class_id_by_name[one], one))
            elif isinstance(one, int) and one in self.classes:
                found.append((one, ""))
            else:
                return None
        return found

    def resolve_ids(self, references: Sequence[int | str | NamedClass]) -> list[tuple[int, str]]:
        """The id of each class that is asked for, and its name, if it is asked for by name. Who has
        a new name and no id is given one. Changes nothing.

        Raises RemoteProtocolError (bad_connect, class_name_conflict, too_many_classes).
        """
        if (all_known := self._resolve_known(references)) is not None:
            return all_known
        named = [to_named_class(one) for one in references]
        ids = {one.id for one in named}
        id_of: dict[str, int] = {}
        name_of: dict[int, str] = {}

        def is_free(class_id: int) -> bool:
            return class_id not in self.classes and class_id not in ids and class_id not in name_of

        others = filter(is_free, range(CLASS_ID_MAX, -1, -1))
        found: list[tuple[int, str]] = []
        for one in named:
            name = one.name or ""
            known = self.class_id_by_name.get(name, id_of.get(name)) if name else None
            class_id = one.id if one.id is not None else known
            if class_id is None:
                class_id = next(filter(is_free, candidate_ids(name)), None)
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

    def bind_subject(self, subject: str, class_: int | str) -> int:
        """Have what NATS clients publish on a subject stored in a class, too; the class, given by
        id or name, is made if it is not there. Returns its id.

        Raises RemoteProtocolError as `name_classes` does.
        """
        if isinstance(class_, int):
            asked = NamedClass(id=class_, subjects=[subject])
        else:
            asked = NamedClass(name=class_, subjects=[subject])
        [(class_id, _)] = self.declare_classes([asked])
        return class_id

    def declare_classes(
        self, references: Sequence[int | str | NamedClass], *, creator: str = ""
    ) -> list[tuple[int, str]]:
        """Have these classes, bound to these subjects. `maker` is the user whose new ones are.
        Returns what `find_ids` does.

        Raises RemoteProtocolError as `find_ids`, `new_classes` and `Bound.check` do, and has none
        of them then.
        """
        found, bound = self.check_declaration(references)
        self.create_classes(found, creator=creator)
        for (class_id, _), one in zip(found, references, strict=True):
            if isinstance(one, NamedClass) and one.last_values:
                self.enable_last_values(class_id)
        for class_id, subject in bound:
            self.subject_bindings.bind(class_id, subject)
        return found

    @property
    def is_remote(self) -> bool:
        """Whether classes are such that keep their messages elsewhere."""
        return self.dedup_window_seconds > 0

    def enable_last_values(self, class_id: int) -> None:
        """Have a class keep its last values, unless the settings say that it does not."""
        cls = self.classes[class_id]
        if not cls.is_last_values_requested:
            cls.is_last_values_requested = True
            self._apply_class_settings(cls)
            for first, last in cls.purged_sequences:
                cls.last_values.discard_range(first, last)
            if self.commit_log is not None:
                self.commit_log.hurries[class_id] = None

    def check_declaration(
        self, references: Sequence[int | str | NamedClass]
    ) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """Raise what `name_classes` would. Returns what `find_ids` does, and which subjects are
        bound then to which ids."""
        found = self.resolve_ids(references)
        self.select_new_ids(class_id for class_id, _ in found)
        if self.is_remote and any(isinstance(o, NamedClass) and o.last_values for o in references):
            raise RemoteProtocolError(
                Reason.BAD_REQUEST, "a door before a JetStream cluster keeps no last values"
            )
        for (class_id, name), one in zip(found, references, strict=True):
            if isinstance(one, NamedClass) and one.last_values:
                self._check_last_values(class_id, name)
        bound = [
            (class_id, subject)
            for (class_id, _), one in zip(found, references, strict=True)
            if isinstance(one, NamedClass)
            for subject in one.subjects
        ]
        self.subject_bindings.check_bindings(bound)
        return found, bound

    def _check_last_values(self, class_id: int, name: str) -> None:
        """Raise RemoteProtocolError (bad_request) for a class that keeps no last values, unless
        the settings say just that."""
        if not name and class_id in self.classes:
            name = self.classes[class_id].name
        own = self.settings.of_class(class_id, name)
        spills = self.settings.policy(own) is FullPolicy.SPILL and name != BRIDGE_RECORDS_CLASS
        if spills and own.last_values is None:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"class {name or class_id} spills, and such a class keeps no last values",
            )

    def open_dead_letter_class(self, source_class: str) -> MessageClass:
        """The class of this one's dead letters, made if it is not there. Raises
        RemoteProtocolError as `find_ids` does."""
        name = dead_letters.class_name(source_class)
        class_id = self.class_id_by_name.get(name)
        if class_id is None:
            found = self.resolve_ids([name])
            self.create_classes(found, are_internal=True)
            [(class_id, _)] = found
        return self.classes[class_id]
