"""Class references: the ids and names by which clients refer to classes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import ASSIGNED_CLASS_ID_MIN, ASSIGNED_CLASS_ID_PROBES, CLASS_ID_MAX
from simplebus.core.protocol.requests import NamedClass

ClassReferenceT = TypeVar("ClassReferenceT")
"""Type of a reference to a class: an id, a name or a `NamedClass`."""

_PLAIN_TYPES = frozenset({int, str})
_ASSIGNED_COUNT = CLASS_ID_MAX + 1 - ASSIGNED_CLASS_ID_MIN


def preferred_id(name: str) -> int:
    """Return the id for a new class with this name, unless it is used.

    It depends only on the name, so independent buses usually choose the same id.
    """
    return ASSIGNED_CLASS_ID_MIN + zlib.crc32(name.encode()) % _ASSIGNED_COUNT


def candidate_ids(name: str) -> Iterator[int]:
    """Yield ids for a new class with this name, the preferred one first."""
    first = preferred_id(name) - ASSIGNED_CLASS_ID_MIN
    return (
        ASSIGNED_CLASS_ID_MIN + (first - n) % _ASSIGNED_COUNT
        for n in range(ASSIGNED_CLASS_ID_PROBES)
    )


def deduplicate_references(references: Sequence[ClassReferenceT]) -> list[ClassReferenceT]:
    """Return the references in order, each plain id or name once. Others are not compared."""
    if all(map(_PLAIN_TYPES.__contains__, map(type, references))):
        return list(dict.fromkeys(references))
    seen: set[int | str] = set()
    unique = []
    for reference in references:
        if isinstance(reference, int | str):
            if reference in seen:
                continue
            seen.add(reference)
        unique.append(reference)
    return unique


def to_named_class(reference: int | str | NamedClass) -> NamedClass:
    """Return the reference as a `NamedClass`.

    Raises:
        RemoteProtocolError: bad_connect, the reference has neither an id nor a name.
    """
    if isinstance(reference, int):
        return NamedClass(id=reference)
    if isinstance(reference, str):
        return NamedClass(name=reference)
    if reference.id is None and reference.name is None:
        raise RemoteProtocolError(
            Reason.BAD_CONNECT, "a class has neither id nor name; expected one of them or both"
        )
    return reference
