"""By what classes are asked for.

Rule 1: which ids a name may be given follows from the name, never from who asks or when.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import CLASS_ID_MAX, GIVEN_ID_MIN, GIVEN_IDS_TRIED
from simplebus.core.protocol.requests import NamedClass

ClassKeyT = TypeVar("ClassKeyT")
"""How a class is asked for."""


def candidate_ids(name: str) -> Iterator[int]:
    """Ids for a class that has this name and no id, the best one first. They follow from the name,
    so that buses that know nothing of one another mostly give it the same one."""
    span = CLASS_ID_MAX + 1 - GIVEN_ID_MIN
    first = zlib.crc32(name.encode())
    return (GIVEN_ID_MIN + (first - n) % span for n in range(GIVEN_IDS_TRIED))


def is_id_or_name(reference: object) -> bool:
    """Whether a class is asked for by an id or a name, and by nothing else."""
    return isinstance(reference, int | str)


def deduplicate_references(references: Sequence[ClassKeyT]) -> list[ClassKeyT]:
    """Ids and names, each once, in their order. What says more of a class is not compared."""
    seen: set[int | str] = set()
    found = []
    for one in references:
        if isinstance(one, int | str):
            if one in seen:
                continue
            seen.add(one)
        found.append(one)
    return found


def to_named_class(reference: int | str | NamedClass) -> NamedClass:
    """A class as it is asked for: by its id, by its name, or by both. Raises RemoteProtocolError
    (bad_connect) for neither."""
    if isinstance(reference, int):
        return NamedClass(id=reference)
    if isinstance(reference, str):
        return NamedClass(name=reference)
    if reference.id is None and reference.name is None:
        raise RemoteProtocolError(
            Reason.BAD_CONNECT, "a class is named by its id, by its name or by both"
        )
    return reference
