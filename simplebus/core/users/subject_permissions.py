"""Permissions of a user for NATS subjects, as configured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResponsePermission:
    """Permission to publish on the reply subject of a delivered message."""

    max_responses: int = 1
    """Responses to one message; negative for no limit."""
    expires_seconds: float = 120.0
    """Seconds after delivery in which a response is allowed; negative for no limit."""


@dataclass(frozen=True, slots=True)
class SubjectPermissions:
    """Patterns of allowed and denied subjects.

    In subscribe patterns a blank and a queue pattern may follow; the pattern then applies to
    members of matching queue groups only.

    Raises:
        ValueError: A pattern is not legal.
    """

    publish_allow: tuple[str, ...] | None = None
    """None allows every subject."""
    publish_deny: tuple[str, ...] = ()
    subscribe_allow: tuple[str, ...] | None = None
    """None allows every subject."""
    subscribe_deny: tuple[str, ...] = ()
    responses: ResponsePermission | None = None
    """If set, publishing is denied unless allowed by a pattern or as a response."""

    def __post_init__(self) -> None:
        for name, words in (
            ("publish_allow", 1),
            ("publish_deny", 1),
            ("subscribe_allow", 2),
            ("subscribe_deny", 2),
        ):
            for pattern in getattr(self, name) or ():
                try:
                    check_subject_pattern(pattern, words)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None


def check_subject_pattern(pattern: str, words: int = 1) -> str:
    """Return a legal pattern. Raises ValueError.

    Args:
        pattern: Pattern of subjects.
        words: 2 if a blank and a queue pattern may follow, else 1.
    """
    parts = pattern.split()
    if not (1 <= len(parts) <= words and all(map(_is_legal, parts))):
        expected = "a subject" if words == 1 else "a subject, or a subject and a queue"
        raise ValueError(f"{pattern!r} is not a pattern, expected {expected}")
    return pattern


def _is_legal(pattern: str) -> bool:
    """Return True if no token of a subject pattern is empty, and `>` stands only at the end."""
    tokens = pattern.split(".")
    return "" not in tokens and ">" not in tokens[:-1]
