"""What one user may publish and subscribe to.

Rule 1: what is denied is denied, whatever is allowed; a list of what is allowed that is empty
allows everything.
Rule 2: patterns are NATS's. A subscription is allowed when what it asks for is matched by what is
allowed, as if its wildcards were letters; what it would get beside that is filtered at delivery.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Responses:
    """Leave to answer: on the reply subject of a message that was delivered."""

    most: int = 1
    """Answers to one message; below 0 for any number."""
    seconds: float = 120.0
    """How long one may answer; below 0 for ever."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """What one user may do. Patterns of subjects; for subscriptions a blank and a pattern of queue
    names may follow, which then is about members of these queue groups alone.

    Raises ValueError, naming the pattern, when one is not legal.
    """

    publish_allow: tuple[str, ...] = ()
    publish_deny: tuple[str, ...] = ()
    subscribe_allow: tuple[str, ...] = ()
    subscribe_deny: tuple[str, ...] = ()
    responses: Responses | None = None
    """With it, what is not allowed to be published is denied, but for answers."""
