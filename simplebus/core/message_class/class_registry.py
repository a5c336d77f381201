"""All classes of a bus by id and name, their settings, and the subjects bound to them.

A request that names several classes either succeeds for all of them or changes nothing. It is
checked at once, and everything that it creates is reserved: no other request can use these ids,
names and quotas. Creating many classes takes long, so that follows in parts, which cannot fail.

A class that was removed keeps its id for its name, and its next sequence: if it is created again,
its messages cannot be confused with earlier messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

from simplebus.core import dead_letters
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    CHECKED_CLASSES_PER_TURN,
    CLASS_ID_MAX,
    CREATED_CLASSES_PER_TURN,
    DEAD_LETTERS_MEMORY_DIVISOR,
    DEAD_LETTERS_RESERVE_DIVISOR,
    EXAMINED_CLASSES_PER_TURN,
    NAME_CHARACTERS_MAX,
    RING_BYTES_MIN,
    SPILL_MEMORY_DIVISOR,
    SUBJECT_BINDINGS_MAX,
)
from simplebus.core.message_class.class_ids import (
    ClassReferenceT,
    candidate_ids,
    deduplicate_references,
    preferred_id,
    to_named_class,
)
from simplebus.core.message_class.last_values import BRIDGE_RECORDS_CLASS
from simplebus.core.message_class.message_class import MessageClass, ProbeObserver
from simplebus.core.message_class.spill import ClassSpill, SpillManager
from simplebus.core.message_class.subject_bindings import ClassSubjectBindings
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.ring.memory_budget import MemoryBudget, MemoryShare
from simplebus.core.ring.ring import Ring
from simplebus.core.settings import FullPolicy, Retention, Settings
from simplebus.core.snapshot import RemovedClass
from simplebus.core.steps import run_to_end
from simplebus.core.users.permissions import ClassIdentity, unresolved_class

T = TypeVar("T")
_ALL_IDS = range(CLASS_ID_MAX, -1, -1)


class _BudgetSizes(NamedTuple):
    """Sizes of the memory budgets in bytes."""

    rings: int
    """All classes together."""
    spill_reads: int
    """Messages that are read back from disk."""
    dead_letters: int
    """Dead letters; part of `rings`."""
    dead_letters_reserved: int
    """Part of `rings` that only dead letters may use."""


class _Creator(NamedTuple):
    """Client that creates classes."""

    user: str = ""
    """Its user; empty if unknown."""
    address: str = ""
    """Its address, if it has no user."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class _Reservation:
    """Classes that a request will create or name."""

    names: dict[int, str]
    """Names by class id; empty for a class without a name."""
    new_ids: set[int]
    """Ids of the classes that it creates. The others exist and receive a name."""
    creator: _Creator


@dataclass(frozen=True, slots=True)
class Declaration:
    """Declaration of classes that was checked and can be carried out."""

    ids_and_names: list[tuple[int, str]]
    """Id and name of each referenced class; the name is empty if the reference has none."""
    last_value_ids: list[int]
    """Ids of the classes that are to keep last values."""
    bindings: list[tuple[int, str]]
    """Class id and subject of each pair to bind."""
    new_ids: list[int]
    """Ids of the classes that do not exist."""

    @property
    def has_many_steps(self) -> bool:
        """True if it is to be carried out in parts."""
        count = len(self.ids_and_names) + len(self.last_value_ids) + len(self.bindings)
        return count > CREATED_CLASSES_PER_TURN


def _compute_budgets(settings: Settings) -> _BudgetSizes:
    total = settings.limits.total_bytes
    spill_reads = max(total // SPILL_MEMORY_DIVISOR, 4 * settings.limits.frame_bytes)
    rings = max(total - spill_reads, total // 2) if settings.has_spilling_class else total
    largest_message = 2 * (settings.limits.frame_bytes + RING_BYTES_MIN)
    reserved = min(max(rings // DEAD_LETTERS_RESERVE_DIVISOR, largest_message), rings // 8)
    if reserved < 2 * RING_BYTES_MIN:  # Too small for any ring.
        reserved = 0
    return _BudgetSizes(rings, spill_reads, rings // DEAD_LETTERS_MEMORY_DIVISOR, reserved)


def _select_own_settings(before: Settings, after: Settings) -> set[int | str] | None:
    """Return the ids and names of the classes whose settings may differ; None for all classes."""

    def common(settings: Settings) -> object:
        limits = settings.limits
        sizes = limits.class_messages, limits.class_bytes, limits.dead_letter_bytes
        return settings.keep, settings.full_policy, sizes

    if common(before) != common(after):
        return None
    return before.classes.keys() | after.classes.keys()


def _too_many_classes_error(
    new_count: int, existing_count: int, settings: Settings
) -> RemoteProtocolError:
    return RemoteProtocolError(
        Reason.TOO_MANY_CLASSES,
        f"a Connect named {new_count} new classes; {existing_count} of at most "
        f"{settings.limits.classes} classes exist{class_limit_hint(settings, '--max-classes')}",
    )


def class_limit_hint(settings: Settings, setting: str) -> str:
    """Return the last part of an error about too many classes: how to get below the limit."""
    removal = "classes are never removed"
    if settings.idle_class_seconds and not settings.declare_only:
        removal = f"unused ones are removed after {settings.idle_class_seconds:g} s"
    return f"; {removal}; set {setting} to change the limit"


def _split_into_parts(items: list[T]) -> Iterator[list[T]]:
    """Yield the items in lists of at most CREATED_CLASSES_PER_TURN."""
    for first in range(0, len(items), CREATED_CLASSES_PER_TURN):
        yield items[first : first + CREATED_CLASSES_PER_TURN]


class ClassRegistry:
    """All classes of a bus. Creates and configures classes; the store changes their messages."""

    def __init__(self, settings: Settings, commit_log: CommitLog | None = None) -> None:
        self.settings = settings
        self.commit_log = commit_log
        """Receives new classes and names; None without a journal."""
        self.classes: dict[int, MessageClass] = {}
        self.class_id_by_name: dict[str, int] = {}
        self.declared_ids: set[int] = set()
        """Ids of classes that the operator has declared. They are not removed."""
        self.removed_classes: dict[int, RemovedClass] = {}
        """Removed classes whose next sequence is not 0, by id."""
        self._removed_id_by_name: dict[str, int] = {}
        self._reserved: dict[int, _Reservation] = {}
        """Reservations by class id."""
        self._reserved_id_by_name: dict[str, int] = {}
        self._reserved_count = 0
        """Reserved classes that do not exist."""
        self.class_count_by_address: Counter[str] = Counter()
        """Existing and reserved classes by the address of the client that created them without a
        user.
        """
        self.created_count = 0
        """Classes created so far."""
        self.name_change_count = 0
        """Number of changes of class names, including the names of removed classes."""
        self.revision = 0
        """Number of changes so far that the result of `check_declaration` may depend on."""
        self.internal_class_ids: set[int] = set()
        """Ids of dead-letter classes that the bus created. They do not count towards the limit."""
        self.subject_bindings = ClassSubjectBindings()
        sizes = _compute_budgets(settings)
        self.spill_budget = MemoryBudget(sizes.spill_reads)
        """Memory for messages that are read back from disk."""
        self.spill_manager: SpillManager | None = None
        """Set when classes may be larger than memory."""
        self.budget = MemoryBudget(sizes.rings)
        self.dead_letter_budget = MemoryShare(
            sizes.dead_letters, self.budget, reserved=sizes.dead_letters_reserved
        )
        self.class_factory: Callable[[Ring, Retention, FullPolicy], MessageClass] = MessageClass
        self.dedup_window_seconds = 0.0
        """How long remote storage detects duplicates by message number; 0 for local storage."""
        self.choose_first_number: Callable[[float], int] | None = None
        """Returns the first message number for a named publisher, given the time of its connection.

        None with local storage, where the producer states are complete.
        """
        self.on_renamed: Callable[[MessageClass, str], None] = lambda cls, reason: None
        """Called with a class whose permissions may have changed, and the reason.

        The class, or the class whose dead letters it stores, has received a name.
        """
        self.on_class_created: Callable[[int], None] = lambda class_id: None
        """Called with the id of a new class."""
        self._probe_observer: ProbeObserver | None = None

    def set_probe_observer(self, observer: ProbeObserver) -> None:
        """Measure in every class how long messages take until all positions acknowledge them."""
        self._probe_observer = observer
        for cls in self.classes.values():
            cls.probe_observer = observer

    def apply_settings(self, settings: Settings) -> Iterator[None]:
        """Apply new settings: to new classes at once, and to the others while the result is
        iterated.

        Messages beyond a lowered limit are not dropped.
        """
        previous, self.settings = self.settings, settings
        self.revision += 1
        sizes = _compute_budgets(settings)
        self.budget.limit_bytes, self.spill_budget.limit_bytes = sizes.rings, sizes.spill_reads
        self.dead_letter_budget.resize(sizes.dead_letters, reserved=sizes.dead_letters_reserved)
        return self._apply_in_parts(_select_own_settings(previous, settings))

    def _apply_in_parts(self, keys: Collection[int | str] | None) -> Iterator[None]:
        """Apply the settings to the classes with these ids and names, or to all if it is None."""
        for number, cls in enumerate(list(self.classes.values()), 1):
            if (
                keys is None
                or cls.class_id in keys
                or cls.name in keys
                or cls.spill is not None  # It may not spill any more.
            ):
                self._apply_class_settings(cls)
            if number % EXAMINED_CLASSES_PER_TURN == 0:
                yield

    def find_dead_letter_sources(self, text: str) -> list[ClassIdentity]:
        """Return (id, name) of the classes whose dead letters are stored in `dead.<text>`.

        `text` is a class name, the id of a class without a name, or the beginning of a name that is
        too long for the prefix.
        """
        sources = unresolved_class(text)
        ids = {self.class_id_by_name.get(text, -1), *(class_id for class_id, _ in sources)}
        if len(dead_letters.CLASS_PREFIX + text) >= NAME_CHARACTERS_MAX:
            ids |= {
                class_id
                for name, class_id in self.class_id_by_name.items()
                if name.startswith(text)
            }
        sources += [(id_, self.classes[id_].name) for id_ in sorted(ids) if id_ in self.classes]
        return list(dict.fromkeys(sources))

    def create_classes(
        self,
        ids_and_names: Iterable[tuple[int, str]],
        *,
        are_internal: bool = False,
        creator: str = "",
        creator_address: str = "",
        created_by: str = "",
    ) -> list[int]:
        """Create the classes with these ids and names that do not exist, and set new names.

        Args:
            ids_and_names: Result of `resolve_ids`. An empty name leaves the class's name unchanged.
            are_internal: True for classes of the bus itself, which do not count towards the limit.
            creator: Name of the user who creates the classes.
            creator_address: Address of the client, if it has no user.
            created_by: Description of the client that creates them.

        Returns:
            The ids of the new classes.

        Raises:
            RemoteProtocolError: too_many_classes. No class has been created.
        """
        ids_and_names = list(ids_and_names)
        if are_internal:
            self.internal_class_ids.update(n for n, _ in ids_and_names if not self.is_known(n))
        new_ids = self.select_new_ids([class_id for class_id, _ in ids_and_names])
        self._reserve_classes(
            ids_and_names, new_ids, _Creator(creator, creator_address, created_by)
        )
        self._create_reserved(ids_and_names)
        return new_ids

    def _reserve_classes(
        self, ids_and_names: list[tuple[int, str]], new_ids: list[int], creator: _Creator
    ) -> None:
        """Reserve the ids and names that are new, and count the classes for their creator.

        `new_ids` is the result of `select_new_ids`.
        """
        names: dict[int, str] = {}
        for class_id, name in ids_and_names:
            names[class_id] = name or names.get(class_id, "")
        reservation = _Reservation(names, set(new_ids), creator)
        named_ids = []
        for class_id in names.keys() - reservation.new_ids:
            name = names[class_id]
            if not name or self.class_id_by_name.get(name) == class_id:
                continue
            if (earlier_reservation := self._reserved.get(class_id)) is not None:
                if earlier_reservation.names[class_id] != name:
                    self.revision += 1
                earlier_reservation.names[class_id] = name
                self._reserved_id_by_name[name] = class_id
            elif self.classes[class_id].name != name:
                named_ids.append(class_id)
        reserved_ids = [*new_ids, *named_ids]
        self.revision += bool(reserved_ids)
        self._reserved.update(dict.fromkeys(reserved_ids, reservation))
        self._reserved_id_by_name.update(
            {names[reserved_id]: reserved_id for reserved_id in reserved_ids}
        )
        self._reserved_count += len(new_ids)
        if creator.address:
            self.class_count_by_address[creator.address] += len(new_ids)

    def _create_reserved(self, ids_and_names: Iterable[tuple[int, str]]) -> None:
        """Create and name these reserved classes, unless another request has done so."""
        for class_id, name in ids_and_names:
            reservation, is_new = self._reserved.pop(class_id, None), False
            if reservation is not None:
                name, is_new = reservation.names[class_id], class_id in reservation.new_ids
                self._reserved_id_by_name.pop(name, None)
                self._reserved_count -= is_new
            if class_id not in self.classes:
                self._create_class(class_id, name)
                if reservation is not None and is_new:
                    self.classes[class_id].set_creator(*reservation.creator)
            if name and self.classes[class_id].name != name:
                self._set_class_name(self.classes[class_id], name)

    def is_known(self, class_id: int) -> bool:
        """Return True if a class exists or is reserved."""
        return class_id in self.classes or class_id in self._reserved

    @property
    def class_count(self) -> int:
        """Number of classes, including reserved ones."""
        return len(self.classes) + self._reserved_count

    def count_created_by(self, user: str) -> int:
        """Return how many existing and reserved classes a user has created."""
        created_count = sum(cls.creator == user for cls in self.classes.values())
        return created_count + sum(
            class_id in each.new_ids and each.creator.user == user
            for class_id, each in self._reserved.items()
        )

    def count_creator(self, cls: MessageClass) -> None:
        """Count a recovered class for the address of its creator."""
        if cls.creator_address:
            self.class_count_by_address[cls.creator_address] += 1

    def remove_class(self, class_id: int) -> None:
        """Remove an unused class."""
        self.revision += 1
        cls = self.classes.pop(class_id)
        if self.class_id_by_name.get(cls.name) == class_id:
            del self.class_id_by_name[cls.name]
            self.name_change_count += 1
        self.internal_class_ids.discard(class_id)
        if cls.creator_address:
            self.class_count_by_address[cls.creator_address] -= 1
            if not self.class_count_by_address[cls.creator_address]:
                del self.class_count_by_address[cls.creator_address]
        self.add_removed_class(RemovedClass(class_id, cls.name, cls.ring.head))
        if self.commit_log is not None:
            self.commit_log.changed_class_ids[class_id] = None

    def add_removed_class(self, removed: RemovedClass) -> None:
        """Keep the id and the next sequence of a class that does not exist."""
        if removed.head:
            self.removed_classes[removed.class_id] = removed
            if removed.name:
                self._removed_id_by_name[removed.name] = removed.class_id

    def _pop_removed_class(self, class_id: int) -> int:
        """Stop keeping the id of a removed class. Returns its next sequence, 0 for others."""
        removed = self.removed_classes.pop(class_id, None)
        if removed is None:
            return 0
        self._removed_id_by_name.pop(removed.name, None)
        return removed.head

    def _create_class(self, class_id: int, name: str) -> None:
        limits = self.settings.limits
        ring = Ring(
            class_id=class_id,
            messages_max=limits.class_messages,
            bytes_max=limits.class_bytes,
            budget=self.dead_letter_budget
            if dead_letters.is_dead_letter_class(name)
            else self.budget,
        )
        ring.set_next_sequence(self._pop_removed_class(class_id))
        self.created_count += 1
        cls = self.class_factory(ring, self.settings.keep, self.settings.full_policy)
        cls.probe_observer = self._probe_observer
        self.classes[class_id] = cls
        self._apply_class_settings(cls)
        if self.commit_log is not None:
            self.commit_log.changed_class_ids[class_id] = None
        self.on_class_created(class_id)

    def _set_class_name(self, cls: MessageClass, name: str) -> None:
        if self.commit_log is not None and cls.name != name:
            self.commit_log.changed_class_ids[cls.class_id] = None
        is_changed = cls.name != name
        if (removed_id := self._removed_id_by_name.get(name)) is not None:
            self._pop_removed_class(removed_id)
        cls.name = name
        self.class_id_by_name[name] = cls.class_id
        self.name_change_count += is_changed
        self._apply_class_settings(cls)
        if is_changed:
            dead_letter_class_id = self.class_id_by_name.get(
                dead_letters.dead_letter_class_name(str(cls.class_id)), cls.class_id
            )
            for class_id in {cls.class_id, dead_letter_class_id}:
                self.on_renamed(
                    self.classes[class_id], f"class {cls.class_id} has the name {name!r} now"
                )

    def _apply_class_settings(self, cls: MessageClass) -> None:
        """Apply the settings for the class's current name."""
        settings, limits = self.settings, self.settings.limits
        class_settings = settings.settings_for_class(cls.class_id, cls.name)
        keep = class_settings.keep
        cls.set_retention(settings.keep if keep is None else keep)
        cls.full_policy = settings.full_policy_for(class_settings)
        if cls.full_policy is FullPolicy.SPILL and cls.name == BRIDGE_RECORDS_CLASS:
            cls.full_policy = FullPolicy.BLOCK
        ring = cls.ring
        messages_max = class_settings.messages_max or limits.class_messages
        ring.messages_max = min(messages_max, limits.class_messages)
        bytes_max = class_settings.bytes_max or limits.class_bytes
        ring.bytes_max = min(bytes_max, limits.class_bytes)
        if cls.full_policy is FullPolicy.SPILL and not dead_letters.is_dead_letter_class(cls.name):
            assert self.spill_manager is not None
            cls.spill = cls.spill or ClassSpill(cls, self.spill_manager)
            cls.spill.bytes_max = class_settings.disk_bytes_max or 0
        elif cls.spill is not None and not cls.spill.message_count and not cls.spill.readers:
            cls.spill = None  # It spilled by the default settings until it received its name.
        configured = class_settings.last_values
        are_wanted = cls.are_last_values_requested if configured is None else configured
        cls.has_last_values = (
            bool(are_wanted)
            and cls.spill is None
            and not dead_letters.is_dead_letter_class(cls.name)
        )
        if dead_letters.is_dead_letter_class(cls.name):
            if class_settings.full_policy is not FullPolicy.BLOCK:
                cls.full_policy = FullPolicy.DROP_OLDEST
            ring.bytes_max = min(limits.dead_letter_bytes, ring.bytes_max)

    def select_new_ids(self, class_ids: Iterable[int]) -> list[int]:
        """Return the ids of classes that do not exist. Raises like `create_classes`."""
        classes, reserved = self.classes, self._reserved
        new = [n for n in dict.fromkeys(class_ids) if n not in classes and n not in reserved]
        max_count = self.settings.limits.classes
        if self.class_count + len(new) - len(self.internal_class_ids) > max_count:
            raise _too_many_classes_error(len(new), self.class_count, self.settings)
        return new

    def deduplicate(self, references: Sequence[ClassReferenceT]) -> list[ClassReferenceT]:
        """Return each id and each name once, and bound the work for one request.

        Raises:
            RemoteProtocolError: too_many_classes. New ids and names together are more than twice
                the limit, so even if each class is named by both there are too many.
        """
        unique, max_count = deduplicate_references(references), self.settings.limits.classes
        if len(unique) > 2 * max_count:
            new_count = len(unique) - sum(
                reference in self.classes or reference in self.class_id_by_name
                for reference in unique
                if isinstance(reference, int | str)
            )
            if new_count > 2 * max_count:
                raise _too_many_classes_error(new_count, self.class_count, self.settings)
        return unique

    def _resolve_known(
        self, references: Sequence[int | str | NamedClass]
    ) -> list[tuple[int, str]] | None:
        """Return the result of `resolve_ids` if all references are plain and known, else None."""
        ids_and_names = []
        for reference in references:
            if isinstance(reference, str) and reference in self.class_id_by_name:
                ids_and_names.append((self.class_id_by_name[reference], reference))
            elif isinstance(reference, int) and reference in self.classes:
                ids_and_names.append((reference, ""))
            else:
                return None
        return ids_and_names

    def resolve_ids(self, references: Sequence[int | str | NamedClass]) -> list[tuple[int, str]]:
        """Return (id, name) of each referenced class. Changes nothing.

        The name is empty if the reference has none. A new name without an id gets a free id.

        Raises:
            RemoteProtocolError: bad_connect, class_name_conflict or too_many_classes.
        """
        return run_to_end(self._resolve_in_parts(references))

    def _resolve_in_parts(
        self, references: Sequence[int | str | NamedClass]
    ) -> Generator[None, None, list[tuple[int, str]]]:
        """Resolve references in parts, see `check_in_parts`."""
        ids_and_names: list[tuple[int, str]] = []
        for first in range(0, len(references), CHECKED_CLASSES_PER_TURN):
            known = self._resolve_known(references[first : first + CHECKED_CLASSES_PER_TURN])
            if known is None:
                break
            ids_and_names += known
            if len(ids_and_names) == len(references):
                return ids_and_names
            yield
        taken_ids = {
            reference if isinstance(reference, int) else to_named_class(reference).id
            for reference in references
            if not isinstance(reference, str)
        }
        taken_ids.update(self._reserved)
        new_id_by_name: dict[str, int] = {}
        new_name_by_id: dict[int, str] = {}
        classes, removed = self.classes, self.removed_classes
        removed_id_by_name = self._removed_id_by_name

        def is_free(class_id: int) -> bool:
            return class_id not in classes and class_id not in taken_ids

        def find_free_id(name: str) -> int:
            if name in removed_id_by_name and is_free(class_id := removed_id_by_name[name]):
                return class_id
            class_id = preferred_id(name)
            if class_id not in removed and is_free(class_id):
                return class_id
            for class_id in candidate_ids(name):
                if is_free(class_id) and class_id not in removed:
                    return class_id
            if (class_id := next(other_free_ids, -1)) < 0:
                raise RemoteProtocolError(
                    Reason.TOO_MANY_CLASSES, f"no class id is left for the class {name!r}"
                )
            return class_id

        other_free_ids = chain(
            (n for n in _ALL_IDS if n not in removed and is_free(n)),
            (n for n in _ALL_IDS if is_free(n)),
        )
        id_by_name, reserved_id_by_name = self.class_id_by_name, self._reserved_id_by_name
        ids_and_names = []
        for number, reference in enumerate(references, 1):
            if number % CHECKED_CLASSES_PER_TURN == 0:
                yield
            if isinstance(reference, str):
                class_id, name = None, reference
            elif isinstance(reference, int):
                class_id, name = reference, ""
            else:
                class_id, name = reference.id, reference.name or ""
            if name:
                known_id = id_by_name.get(name, new_id_by_name.get(name))
                if known_id is None:
                    known_id = reserved_id_by_name.get(name)
                if class_id is None:
                    class_id = find_free_id(name) if known_id is None else known_id
                else:
                    self._check_name(class_id, name, known_id, new_name_by_id.get(class_id, ""))
                new_id_by_name[name], new_name_by_id[class_id] = class_id, name
                taken_ids.add(class_id)
            assert class_id is not None
            ids_and_names.append((class_id, name))
        return ids_and_names

    def _check_name(
        self, class_id: int, name: str, known_id: int | None, current_name: str
    ) -> None:
        """Check that a class can have this id and this name.

        Args:
            class_id: Id of the class.
            name: Its name.
            known_id: Id of the class that has the name, or receives it; None if the name is unused.
            current_name: Name that the class receives by the same request; empty for none.

        Raises:
            RemoteProtocolError: class_name_conflict.
        """
        if (reservation := self._reserved.get(class_id)) is not None:
            current_name = reservation.names[class_id] or current_name
        elif class_id in self.classes:
            current_name = self.classes[class_id].name or current_name
        if known_id in (None, class_id) and current_name in ("", name):
            return
        raise RemoteProtocolError(
            Reason.CLASS_NAME_CONFLICT,
            f"the class {name!r} was named with id {class_id}; "
            + (
                f"class {class_id} has the name {current_name!r}"
                if current_name
                else f"the class has id {known_id}"
            ),
        )

    def bind_subject(self, subject: str, class_: int | str) -> int:
        """Store what NATS clients publish on a subject in a class, which is created if needed.

        Returns:
            The class id.

        Raises:
            RemoteProtocolError: As `declare_classes` does.
        """
        if isinstance(class_, int):
            reference = NamedClass(id=class_, subjects=[subject])
        else:
            reference = NamedClass(name=class_, subjects=[subject])
        [(class_id, _)] = self.declare_classes([reference])
        return class_id

    def declare_classes(
        self,
        references: Sequence[int | str | NamedClass],
        *,
        creator: str = "",
        creator_address: str = "",
        created_by: str = "",
    ) -> list[tuple[int, str]]:
        """Create the referenced classes if needed, and apply their names, subjects and last values.

        Args:
            references: Classes by id, by name, or as `NamedClass`.
            creator: Name of the user who creates the classes.
            creator_address: Address of the client, if it has no user.
            created_by: Description of the client that creates them.

        Returns:
            (id, name) of each class, as `resolve_ids` returns them.

        Raises:
            RemoteProtocolError: As `check_declaration` does. Nothing has changed then.
        """
        declaration = self.check_declaration(references, creator_address)
        self.reserve(
            declaration,
            creator=creator,
            creator_address=creator_address,
            created_by=created_by,
        )
        for _ in self.apply_in_parts(declaration):
            pass
        return declaration.ids_and_names

    def reserve(
        self,
        declaration: Declaration,
        *,
        creator: str = "",
        creator_address: str = "",
        created_by: str = "",
    ) -> None:
        """Reserve everything that a declaration creates. `apply_in_parts` must follow.

        Args:
            declaration: Result of `check_declaration`; nothing has changed since.
            creator: See `declare_classes`, as the following ones.
            creator_address: Address of the client, if it has no user.
            created_by: Description of the client that creates them.
        """
        self._reserve_classes(
            declaration.ids_and_names,
            declaration.new_ids,
            _Creator(creator, creator_address, created_by),
        )
        binding_count = len(self.subject_bindings)
        self.subject_bindings.reserve(declaration.bindings, creator_address)
        self.revision += len(self.subject_bindings) != binding_count

    def apply_in_parts(self, declaration: Declaration) -> Iterator[list[int]]:
        """Create the classes of a reserved declaration, in parts of bounded work.

        Yields:
            The ids of the classes that exist since this part.
        """
        for pairs in _split_into_parts(declaration.ids_and_names):
            self._create_reserved(pairs)
            yield [class_id for class_id, _ in pairs]
        for class_ids in _split_into_parts(declaration.last_value_ids):
            for class_id in class_ids:
                self.enable_last_values(class_id)
            yield []
        for bindings in _split_into_parts(declaration.bindings):
            for class_id, subject in bindings:
                self.subject_bindings.bind(class_id, subject)
            yield []

    def declare_operator_classes(self, references: Sequence[int | str | NamedClass]) -> None:
        """Declare the classes of the operator, instead of those declared by it before.

        These classes are not removed while they are unused. Raises like `declare_classes`.
        """
        self.declared_ids = {class_id for class_id, _ in self.declare_classes(references)}

    @property
    def is_remote(self) -> bool:
        """True if the messages of all classes are stored by another system."""
        return self.dedup_window_seconds > 0

    def enable_last_values(self, class_id: int) -> None:
        """Keep the last values of a class, unless its settings forbid this."""
        cls = self.classes[class_id]
        if not cls.are_last_values_requested:
            self._request_last_values(cls, True)
            for first, last in cls.purged_sequences:
                cls.last_values.discard_range(first, last)

    def disable_last_values(self, class_id: int) -> None:
        """Keep no last values of a class, unless its settings or a later Connect demand this."""
        self._request_last_values(self.classes[class_id], False)

    def _request_last_values(self, cls: MessageClass, are_requested: bool) -> None:
        cls.are_last_values_requested = are_requested
        self._apply_class_settings(cls)
        if self.commit_log is not None:
            self.commit_log.changed_class_ids[cls.class_id] = None

    def check_declaration(
        self, references: Sequence[int | str | NamedClass], creator_address: str = ""
    ) -> Declaration:
        """Return what `declare_classes` would do, without a change.

        Raises:
            RemoteProtocolError: As `resolve_ids`, `select_new_ids` and
                `ClassSubjectBindings.check_bindings` do; bad_request if a class cannot keep last
                values.
        """
        return run_to_end(self.check_in_parts(references, creator_address))

    def check_in_parts(
        self, references: Sequence[int | str | NamedClass], creator_address: str = ""
    ) -> Generator[None, None, Declaration]:
        """Like `check_declaration`, in parts of bounded work.

        The result, or error, is valid only if `revision` did not change between the parts.
        """
        ids_and_names = yield from self._resolve_in_parts(references)
        new_ids = self.select_new_ids([class_id for class_id, _ in ids_and_names])
        if self.is_remote and any(isinstance(o, NamedClass) and o.last_values for o in references):
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                "a stateless server, with its classes in a JetStream cluster, keeps no last values",
            )
        last_value_ids: list[int] = []
        bindings: dict[tuple[int, str], None] = {}
        turn_count = 0  # Classes and subjects that were checked in this turn.
        for (class_id, name), reference in zip(ids_and_names, references, strict=True):
            turn_count += 1
            if isinstance(reference, NamedClass):
                if reference.last_values:
                    self._check_last_values(class_id, name)
                    last_value_ids.append(class_id)
                bindings.update(((class_id, subject), None) for subject in reference.subjects)
                if len(bindings) > SUBJECT_BINDINGS_MAX:
                    break  # `check_bindings` fails.
                turn_count += len(reference.subjects)
            if turn_count >= CHECKED_CLASSES_PER_TURN:
                turn_count = 0
                yield
        yield from self.subject_bindings.check_in_parts(list(bindings), creator_address)
        return Declaration(ids_and_names, last_value_ids, list(bindings), new_ids)

    def _check_last_values(self, class_id: int, name: str) -> None:
        """Raise RemoteProtocolError (bad_request) if a class cannot keep last values as it spills.

        A request that the class's own settings override is ignored instead.
        """
        if not name and class_id in self.classes:
            name = self.classes[class_id].name
        class_settings = self.settings.settings_for_class(class_id, name)
        policy = self.settings.full_policy_for(class_settings)
        can_spill = policy is FullPolicy.SPILL and name != BRIDGE_RECORDS_CLASS
        if can_spill and class_settings.last_values is None:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"class {name or class_id} spills to disk and therefore keeps no last values",
            )

    def open_dead_letter_class(self, source_class: str) -> MessageClass:
        """Return the class for the dead letters of `source_class`, which is created if needed.

        Raises:
            RemoteProtocolError: As `resolve_ids` does.
        """
        name = dead_letters.dead_letter_class_name(source_class)
        class_id = self.class_id_by_name.get(name)
        if class_id is None:
            ids_and_names = self.resolve_ids([name])
            self.create_classes(ids_and_names, are_internal=True)
            [(class_id, _)] = ids_and_names
        return self.classes[class_id]
