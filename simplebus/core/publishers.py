"""Who publishes under a name, and how far its messages are stored.

Rule 1: a number is stored once. What is known of a name outlives its sessions, for a time and for a
number of names that are bounded.
Rule 2: a name belongs to one running program at a time; the same program may come again before its
former connection is known to be dead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import PUBLISHER_SECONDS, PUBLISHERS_AHEAD_MAX, PUBLISHERS_MAX


@dataclass(slots=True)
class Publisher:
    """One name."""

    name: str = ""
    instance: str = ""
    next: int = 0
    """Every number before it is stored, or was refused."""
    ahead: set[int] = field(default_factory=set)
    """Numbers behind `next` that are stored too."""
    session_id: int | None = None
    """Who uses it now."""
    gone_at: float = 0.0


class Publishers:
    """All names."""

    def __init__(self) -> None:
        self._names: dict[str, Publisher] = {}
        """Those that are gone stand in the order of their going, behind one another."""

    def __len__(self) -> int:
        return len(self._names)

    def claim(self, name: str, instance: str, session_id: int) -> tuple[Publisher, int | None]:
        """A session wants a name. Returns its state, and the session from which it is taken over.

        Raises RemoteProtocolError (name_in_use) when another program has it.
        """
        publisher = self._names.get(name)
        if publisher is None:
            publisher = self._names[name] = Publisher(name)
        former = publisher.session_id
        if former is not None and (not instance or instance != publisher.instance):
            raise RemoteProtocolError(
                Reason.NAME_IN_USE,
                f"the name {name!r} is used by session {former}, which is another program's",
            )
        publisher.instance = instance
        publisher.session_id = session_id
        return publisher, former

    def leave(self, publisher: Publisher, now: float) -> None:
        """Its session is gone."""
        publisher.session_id = None
        publisher.gone_at = now
        del self._names[publisher.name]
        self._names[publisher.name] = publisher
        if publisher.ahead:
            self.forget(now)

    def forget(self, now: float) -> None:
        """Once per tick: drop what is long gone, and what is too much."""
        gone = [p for p in self._names.values() if p.session_id is None]
        ahead = sum(len(p.ahead) for p in gone)
        for publisher in gone:
            if (
                publisher.gone_at + PUBLISHER_SECONDS > now
                and len(self._names) <= PUBLISHERS_MAX
                and ahead <= PUBLISHERS_AHEAD_MAX
            ):
                break
            ahead -= len(publisher.ahead)
            del self._names[publisher.name]
