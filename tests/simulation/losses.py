"""What is not kept, or not delivered, by whose wish it may be: it is counted, and said.

Rule 1: a position passes only what it has acknowledged, what is not for it, what is a dead letter,
what somebody purged, and what there was no room for where the class may drop it.
"""

from __future__ import annotations

from pathlib import Path

from simplebus.core.broker.broker import Broker
from simplebus.core.dead_letters import is_dead_letter_class
from simplebus.core.errors import Reason
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import FullPolicy
from tests.simulation.history import (
    Place,
    Talk,
    is_timed,
    token_of,
)
from tests.simulation.restarts import Outliving
from tests.simulation.world import World


class Losses(Outliving):
    """Of one bus, over all its processes."""

    def __init__(self, world: World, torn: set[Path]) -> None:
        """`torn`: files of which a power cut has left what is no whole record."""
        super().__init__(world)
        self._torn = torn
        self._totals: dict[tuple[int, Reason], int] = {}
        """What was counted by processes that are gone."""
        self._told: dict[int, set[tuple[str, int]]] = {}
        """By class: whose numbers were refused as it was full."""
        self._forbidden: dict[tuple[int, int], float] = {}
        """By class and sequence: purged, and in which lot that is."""
        self._settled: dict[tuple[str, int], float] = {}
        """By publisher and number: refused, and told so, and in which lot that is."""
        self._names: dict[int, str] = {}
        """By class, of which something is confirmed."""

    # Processes -----------------------------------------------------------------------------------

    def _end(self, broker: Broker, how: str) -> None:
        self.account(broker)
        for class_id, cls in broker.classes.items():
            for reason, count in cls.count_undelivered().items():
                key = class_id, reason
                self._totals[key] = self._totals.get(key, 0) + count
        commit_log = broker.commit_log
        if commit_log is not None and how == "stopped":
            reached = float("inf")
        else:
            reached = -1.0 if commit_log is None else commit_log.durable_position
        for known in (self._forbidden, self._settled):
            for key, lot in list(known.items()):
                if lot > reached:
                    del known[key]  # type: ignore[attr-defined]
                else:
                    known[key] = 0  # type: ignore[index]
        super()._end(broker, how)

    def power_cut(self, broker: Broker, level: Durability | None) -> None:
        super().power_cut(broker, level)
        self._forget(level is not Durability.DISK)

    def killed(self, broker: Broker, level: Durability | None) -> None:
        super().killed(broker, level)
        self._forget(level is None or level is Durability.MEMORY)

    def stopped(self, broker: Broker, level: Durability | None) -> None:
        super().stopped(broker, level)
        self._forget(level is None)

    def _forget(self, is_lossy: bool) -> None:
        if is_lossy:
            self._forbidden.clear()
            self._settled.clear()
            self._names.clear()

    def _recovered(self, class_id: int, lossy: bool) -> None:
        before = len(self.log[class_id])
        super()._recovered(class_id, lossy)
        cls = self.broker.classes.get(class_id)
        name = self._names.get(class_id)
        self.demand(
            name is None or (cls is not None and cls.name == name),
            "names outlive the process",
            f"class {class_id}, {name!r}",
        )
        torn = [path for path in self._torn if path.parent.name == f"{class_id:05}"]
        if self._ended == "cut" and torn and len(self.log[class_id]) < before:
            self.demand(
                any(str(torn[0].parent) in sentence for sentence in self.said),
                "what is left out is said",
                f"class {class_id}: {before - len(self.log[class_id])} messages, {torn}",
            )

    # Room ----------------------------------------------------------------------------------------

    def account(self, broker: Broker) -> None:
        """See what positions have passed that they were not sent or have not acknowledged."""
        lost: dict[int, set[int]] = {}
        for (class_id, key), place in self.places.items():
            cls = broker.classes.get(class_id)
            position = (
                cls.named_positions.get(MessageClass.position_key(*key))
                if cls is not None
                else None
            )
            if cls is None or position is None:
                continue
            passed = self._passed(place, position.window.floor)
            self.demand(
                not passed or cls.full_policy is FullPolicy.DROP_OLDEST,
                "nothing is passed over",
                f"{key} of class {class_id}: {sorted(passed)[:5]}",
            )
            place.dropped |= passed
            lost.setdefault(class_id, set()).update(place.dropped)
        for class_id, sequences in lost.items():
            counted = self._counted(broker, class_id, Reason.DROP_OLDEST)
            self.count("dropped", len(sequences))
            self.demand(
                len(sequences) <= counted,
                "what is dropped is counted",
                f"class {class_id}: {len(sequences)}, and {counted} are counted",
            )
        for class_id, told in self._told.items():
            counted = self._counted(broker, class_id, Reason.DROP_NEWEST)
            self.demand(
                len(told) <= counted,
                "what is dropped is counted",
                f"class {class_id}: {len(told)} were refused, and {counted} are counted",
            )

    def _counted(self, broker: Broker, class_id: int, reason: Reason) -> int:
        cls = broker.classes.get(class_id)
        now = cls.count_undelivered()[reason] if cls is not None else 0
        return self._totals.get((class_id, reason), 0) + now

    def _passed(self, place: Place, floor: int) -> set[int]:
        log = self.log[place.class_id]
        dead = self.dead.get((place.class_id, place.durable or place.key[1]), set())
        return {
            sequence
            for sequence in range(place.since, min(floor, len(log)))
            if log[sequence]
            and sequence not in place.ever_acked
            and sequence not in dead
            and not self.is_gone(place, sequence)
            and not is_timed(token := token_of(log[sequence]))
            and self.is_for(place, token)
        }

    # Refused -------------------------------------------------------------------------------------

    def _was_refused(self, talk: Talk, class_id: int, numbers: range, code: str) -> None:
        commit_log = self.broker.commit_log
        for number in numbers:
            self.refused_tokens.add(self.numbers[talk.who, number])
            if code == Reason.DROP_NEWEST:
                self._told.setdefault(class_id, set()).add((talk.who, number))
            if commit_log is not None and talk.is_named:
                self._settled.setdefault((talk.who, number), commit_log.log_position)

    def _goes_on(self, talk: Talk, lost: int) -> None:
        """A publisher is told how many of its messages, which were dealt with, the bus has lost."""
        refused = sum(
            1
            for (who, number), token in self.numbers.items()
            if who == talk.who
            and token in self.refused_tokens
            and (who, number) not in self._settled
        )
        self.demand(
            self.ever_lossy or lost <= refused,
            "what is said to be lost is",
            f"{lost} of {talk.who}",
        )

    def _is_named(self, class_id: int) -> None:
        """Something is confirmed in this class."""
        name = self.broker.classes[class_id].name
        if name and not is_dead_letter_class(name):
            self._names[class_id] = name

    # Purged, unreadable --------------------------------------------------------------------------

    def _purge_asked(self, talk: Talk, class_id: int, first: int, last: int) -> None:
        head = len(self.log.get(class_id, []))
        # What comes in front of it, and is heard together with it, may be meant, too.
        self.purged.setdefault(class_id, set()).update(range(first, min(last, head + 50)))
        talk.purges.append((class_id, range(first, min(last, head))))

    def _purge_told(self, talk: Talk) -> None:
        class_id, sequences = talk.purges.popleft()
        self.count("purged", len(sequences))
        commit_log = self.broker.commit_log
        for sequence in sequences:
            self._forbidden[class_id, sequence] = (
                commit_log.log_position if commit_log is not None else 0
            )
        for other in self.talks.values():
            for place in other.places.values():
                if place.class_id == class_id:
                    place.excused |= self._under_way(place)

    def _is_not_purged(self, place: Place, sequence: int, name: str) -> None:
        self.demand(
            (place.class_id, sequence) not in self._forbidden or sequence in place.excused,
            "what is purged is nobody's",
            name,
        )

    def _under_way(self, place: Place) -> set[int]:
        raise NotImplementedError

    def unreadable(self, class_id: int, sequences: range) -> None:
        """These were to be read back, and are not there."""
        self.count("unreadable", len(sequences))
        self.demand(
            self.ever_lossy, "what is written can be read", f"class {class_id}: {sequences}"
        )
        self.unread.setdefault(class_id, set()).update(sequences)
