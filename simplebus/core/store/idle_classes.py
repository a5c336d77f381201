"""Removal of classes that were unused for a while.

A class is removed only if nothing refers to it: it stores no message, has no subscription, durable,
bound subject or remembered message id, no open session has declared it, nothing waits for it, and
the operator has not declared it. Some classes are checked at each tick, in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from simplebus.core.limits import IDLE_CLASS_CHECKS_PER_TICK
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.store.store import Store


class IdleClasses:
    """Finds and removes the unused classes of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._unchecked: list[MessageClass] = []
        """Classes that are checked before the others have their turn again."""
        self._removed_labels: deque[str] = deque(maxlen=IDLE_CLASS_CHECKS_PER_TICK)

    def pop_removed(self) -> list[str]:
        """Return the labels of the classes removed since the last call, at most those of a tick."""
        labels = list(self._removed_labels)
        self._removed_labels.clear()
        return labels

    def tick(self) -> None:
        """Remove some classes that have been unused for long enough. Called once per tick."""
        store = self._store
        seconds, registry = store.settings.idle_class_seconds, store.class_registry
        if not seconds or store.settings.declare_only or registry.is_remote:
            return
        if not self._unchecked:
            self._unchecked = list(store.classes.values())
        checked = self._unchecked[-IDLE_CLASS_CHECKS_PER_TICK:]
        del self._unchecked[-IDLE_CLASS_CHECKS_PER_TICK:]
        now = store.clock.now
        idle = [
            cls
            for cls in checked
            if store.classes.get(cls.class_id) is cls and cls.measure_idle_seconds(now) >= seconds
        ]
        if not idle:
            return
        used = {
            class_id
            for session in store.publish_queue.blocked_sessions()
            for class_id, _ in session.parked_messages
        }
        used |= store.subject_bindings.class_ids() | registry.declared_ids
        for cls in idle:
            if not (cls.has_memory or self._is_referenced(cls.class_id, used)):
                registry.remove_class(cls.class_id)
                self._removed_labels.append(cls.label)

    def _is_referenced(self, class_id: int, used: Container[int]) -> bool:
        """Return True if something outside of the class refers to it."""
        store, commit_log = self._store, self._store.commit_log
        return (
            class_id in used
            or class_id in store.position_changes.class_ids
            or store.message_ids.has_ids(class_id)
            or (commit_log is not None and commit_log.has_unwritten(class_id))
        )
