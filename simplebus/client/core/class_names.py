"""Registry of the classes that a client has named to the server.

A class is named by id, by name or by both. The server's reply adds the missing half, so the next
server receives both. A class that the server refused is removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import msgspec
from msgspec.structs import replace

from simplebus.core.limits import CLASS_ID_MAX, NAME_CHARACTERS_MAX, REQUEST_BYTES_MAX
from simplebus.core.protocol.requests import NamedClass

_GROUP_BYTES = REQUEST_BYTES_MAX // 2
"""Bytes of class references in one Connect; its other fields, such as a token, use the rest."""

ClassReference = int | str | NamedClass
"""Reference to a class in a request: its id, its name, or both."""


class ClassNames:
    """Classes that were named to the server."""

    def __init__(self) -> None:
        self._class_by_key: dict[int | str, NamedClass] = {}
        """By name, or by id for a class without a name."""

    def add(self, named_class: NamedClass) -> None:
        """Add a class. A class that is named again keeps its id, its subjects and last values."""
        key = _class_key(named_class)
        known = self._class_by_key.get(key)
        if known is not None:
            named_class = replace(
                named_class,
                id=known.id if named_class.id is None else named_class.id,
                subjects=list(dict.fromkeys([*known.subjects, *named_class.subjects])),
                last_values=known.last_values or named_class.last_values,
            )
        self._class_by_key[key] = named_class

    def remove(self, named_class: NamedClass) -> None:
        self._class_by_key.pop(_class_key(named_class), None)

    def find_id(self, name: str) -> int | None:
        """Return the id of the class `name`, or None before the server has replied."""
        named_class = self._class_by_key.get(name)
        return None if named_class is None else named_class.id

    def group_references(self) -> list[list[ClassReference]]:
        """Return the references in groups, each of which fits into a Connect request."""
        groups: list[list[ClassReference]] = []
        free_bytes = 0
        for reference in to_wire_references(self._class_by_key.values()):
            size_bytes = len(msgspec.json.encode(reference)) + 1
            if size_bytes > free_bytes:
                groups.append([])
                free_bytes = _GROUP_BYTES
            groups[-1].append(reference)
            free_bytes -= size_bytes
        return groups


def to_wire_references(classes: Iterable[NamedClass]) -> list[ClassReference]:
    """Return the shortest reference to each class."""
    return [
        cast(int, named_class.id)
        if named_class.name is None and not named_class.last_values
        else named_class
        for named_class in classes
    ]


def parse_class_reference(reference: ClassReference) -> NamedClass:
    """Return `reference` as a NamedClass.

    Raises:
        ValueError: If it is not a valid class id or class name.
    """
    if isinstance(reference, str):
        reference = NamedClass(name=reference)
    elif not isinstance(reference, NamedClass):
        reference = NamedClass(id=reference)
    if reference.id is not None or reference.name is None:
        check_class_id(reference.id)
    if reference.name is not None and not 0 < len(reference.name) <= NAME_CHARACTERS_MAX:
        raise ValueError(
            f"a class name has 1 to {NAME_CHARACTERS_MAX} characters, got {reference.name!r}"
        )
    return reference


def check_class_id(class_id: object) -> None:
    """Raise ValueError unless `class_id` is a valid class id."""
    if (
        isinstance(class_id, bool)
        or not isinstance(class_id, int)
        or not 0 <= class_id <= CLASS_ID_MAX
    ):
        raise ValueError(f"a class id is a number from 0 to {CLASS_ID_MAX}, got {class_id!r}")


def _class_key(named_class: NamedClass) -> int | str:
    return cast(int, named_class.id) if named_class.name is None else named_class.name
