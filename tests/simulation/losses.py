"""Checks of losses: every message that is not stored or delivered is counted and logged.

A position passes only messages that it acked, that are not for it, that are dead letters, that were
purged, or that its class may drop.
"""

from __future__ import annotations

from pathlib import Path

from simplebus.core.broker.broker import Broker
from simplebus.core.dead_letters import is_dead_letter_class
from simplebus.core.errors import Reason
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import FullPolicy
from tests.simulation.history import PositionHistory, SessionHistory, is_timed, message_token
from tests.simulation.restarts import RestartChecks
from tests.simulation.world import World


class LossChecks(RestartChecks):
    """Loss checks of one bus, over all its processes."""

    def __init__(self, world: World, torn: set[Path]) -> None:
        """`torn` are files with a partial record after a power cut."""
        super().__init__(world)
        self._torn = torn
        self._totals: dict[tuple[int, Reason], int] = {}
        """Counts of earlier processes."""
        self._refused_numbers: dict[int, set[tuple[str, int]]] = {}
        """By class: messages refused because the class was full."""
        self._forbidden: dict[tuple[int, int], float] = {}
        """By class and sequence: log position of the purge."""
        self._settled: dict[tuple[str, int], float] = {}
        """By publisher and number: log position of the refusal."""
        self._names: dict[int, str] = {}
        """Names of classes with confirmed messages."""

    # Processes -----------------------------------------------------------------------------------

    def _end(self, broker: Broker, ending: str) -> None:
        self.account(broker)
        for class_id, cls in broker.classes.items():
            for reason, count in cls.count_undelivered().items():
                key = class_id, reason
                self._totals[key] = self._totals.get(key, 0) + count
        commit_log = broker.commit_log
        if commit_log is not None and ending == "stopped":
            durable_position = float("inf")
        else:
            durable_position = -1.0 if commit_log is None else commit_log.durable_position
        for pending_records in (self._forbidden, self._settled):
            for key, log_position in list(pending_records.items()):
                if log_position > durable_position:
                    del pending_records[key]  # type: ignore[attr-defined]
                else:
                    pending_records[key] = 0  # type: ignore[index]
        super()._end(broker, ending)

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
        recovered_until = len(self.messages[class_id])
        super()._recovered(class_id, lossy)
        cls = self.broker.classes.get(class_id)
        name = self._names.get(class_id)
        self.check(
            name is None or (cls is not None and cls.name == name),
            "class names survive restarts",
            f"class {class_id}, {name!r}",
        )
        head = len(self.messages[class_id])
        torn = [
            path
            for path in self._torn
            if path.parent.name == f"{class_id:05}" and not _is_continued(path, head)
        ]
        if self._ended == "cut" and torn and len(self.messages[class_id]) < recovered_until:
            self.check(
                any(str(torn[0].parent) in warning for warning in self.warnings),
                "skipped records are logged",
                f"class {class_id}: {recovered_until - len(self.messages[class_id])} lost, {torn}",
            )

    # Dropped messages ----------------------------------------------------------------------------

    def account(self, broker: Broker) -> None:
        """Check the messages that positions have passed without delivery or ack."""
        lost: dict[int, set[int]] = {}
        for (class_id, key), position_history in self.position_histories.items():
            cls = broker.classes.get(class_id)
            position = (
                cls.named_positions.get(MessageClass.position_key(*key))
                if cls is not None
                else None
            )
            if cls is None or position is None:
                continue
            passed = self._passed(position_history, position.window.floor)
            self.check(
                not passed or cls.full_policy is FullPolicy.DROP_OLDEST,
                "positions pass no undelivered message",
                f"{key} of class {class_id}: {sorted(passed)[:5]}",
            )
            position_history.dropped |= passed
            lost.setdefault(class_id, set()).update(position_history.dropped)
        for class_id, sequences in lost.items():
            counted = self._counted(broker, class_id, Reason.DROP_OLDEST)
            self.count("dropped", len(sequences))
            self.check(
                len(sequences) <= counted,
                "dropped messages are counted",
                f"class {class_id}: {len(sequences)}, and {counted} are counted",
            )
        for class_id, refused in self._refused_numbers.items():
            counted = self._counted(broker, class_id, Reason.DROP_NEWEST)
            self.check(
                len(refused) <= counted,
                "dropped messages are counted",
                f"class {class_id}: {len(refused)} were refused, and {counted} are counted",
            )

    def _counted(self, broker: Broker, class_id: int, reason: Reason) -> int:
        cls = broker.classes.get(class_id)
        now = cls.count_undelivered()[reason] if cls is not None else 0
        return self._totals.get((class_id, reason), 0) + now

    def _passed(self, position_history: PositionHistory, floor: int) -> set[int]:
        log = self.messages[position_history.class_id]
        dead = self.dead_letters.get(
            (position_history.class_id, position_history.durable or position_history.key[1]), set()
        )
        return {
            sequence
            for sequence in range(position_history.since, min(floor, len(log)))
            if log[sequence]
            and sequence not in position_history.ever_acked
            and sequence not in dead
            and not self.is_gone(position_history, sequence)
            and not is_timed(token := message_token(log[sequence]))
            and self.is_for(position_history, token)
        }

    # Refusals ------------------------------------------------------------------------------------

    def _record_refusals(
        self, session_history: SessionHistory, class_id: int, numbers: range, code: str
    ) -> None:
        commit_log = self.broker.commit_log
        for number in numbers:
            self.refused_tokens.add(self.numbers[session_history.publisher, number])
            if code == Reason.DROP_NEWEST:
                self._refused_numbers.setdefault(class_id, set()).add(
                    (session_history.publisher, number)
                )
            if commit_log is not None and session_history.is_named:
                self._settled.setdefault(
                    (session_history.publisher, number), commit_log.log_position
                )

    def _check_lost_count(self, session_history: SessionHistory, lost: int) -> None:
        """Check the number of lost messages in a Connect reply."""
        refused = sum(
            1
            for (publisher, number), token in self.numbers.items()
            if publisher == session_history.publisher
            and token in self.refused_tokens
            and (publisher, number) not in self._settled
        )
        self.check(
            self.was_ever_lossy or lost <= refused,
            "messages reported as lost are lost",
            f"{lost} of {session_history.publisher}",
        )

    def _record_class_name(self, class_id: int) -> None:
        """Record the name of a class with a confirmed message."""
        name = self.broker.classes[class_id].name
        if name and not is_dead_letter_class(name):
            self._names[class_id] = name

    # Purges and unreadable messages --------------------------------------------------------------

    def _record_purge_request(
        self, session_history: SessionHistory, class_id: int, first: int, last: int
    ) -> None:
        head = len(self.messages.get(class_id, []))
        # The purge may include messages that arrive before it in the same read.
        self.purged.setdefault(class_id, set()).update(range(first, min(last, head + 50)))
        session_history.pending_purges.append((class_id, range(first, min(last, head))))

    def _record_purge_reply(self, session_history: SessionHistory) -> None:
        class_id, sequences = session_history.pending_purges.popleft()
        self.count("purged", len(sequences))
        commit_log = self.broker.commit_log
        for sequence in sequences:
            self._forbidden[class_id, sequence] = (
                commit_log.log_position if commit_log is not None else 0
            )
        for other_session in self.session_histories.values():
            for position_history in other_session.position_histories.values():
                if position_history.class_id == class_id:
                    position_history.excused |= self._unsent_sequences(position_history)

    def _check_not_purged(
        self, position_history: PositionHistory, sequence: int, name: str
    ) -> None:
        self.check(
            (position_history.class_id, sequence) not in self._forbidden
            or sequence in position_history.excused,
            "purged messages are not delivered",
            name,
        )

    def _unsent_sequences(self, position_history: PositionHistory) -> set[int]:
        raise NotImplementedError

    def unreadable(self, class_id: int, sequences: range) -> None:
        """Record messages that could not be read back from disk."""
        self.count("unreadable", len(sequences))
        self.check(
            self.was_ever_lossy, "written messages can be read", f"class {class_id}: {sequences}"
        )
        self.unreadable_sequences.setdefault(class_id, set()).update(sequences)


def _is_continued(path: Path, head: int) -> bool:
    """Return True if another segment continues this one before or at `head`.

    All messages from `head` on, which are lost, were in the other segment then.
    """
    starts = [int(segment.stem) for segment in path.parent.glob("*.log")]
    return any(int(path.stem) < start <= head for start in starts)
