"""The classes that a program has named to the bus.

Rule 1: a class is named by id, by name, or by both; what the bus answers completes it, so that the
next bus is told both.
Rule 2: what the bus refused to make counts as never named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from simplebus.core.limits import CLASS_ID_MAX, NAME_CHARACTERS_MAX
from simplebus.core.protocol.requests import NamedClass

ClassReference = int | str | NamedClass
"""How a class is named to the bus: by id, by name, or by both."""


class ClassNames:
    """Every class that was named."""

    def __init__(self) -> None:
        self._class_by_key: dict[int | str, NamedClass] = {}
        """By name if it has one."""

    def add(self, named: NamedClass) -> None:
        self._class_by_key[_class_key(named)] = named

    def remove(self, named: NamedClass) -> None:
        self._class_by_key.pop(_class_key(named), None)

    def find_id(self, name: str) -> int | None:
        """The id of a class that was named by name; None before the bus has said it."""
        named = self._class_by_key.get(name)
        return None if named is None else named.id

    def list_references(self) -> list[ClassReference]:
        """As a Connect names them."""
        return to_wire_references(self._class_by_key.values())


def to_wire_references(classes: Iterable[NamedClass]) -> list[ClassReference]:
    """The shortest way to name these."""
    return [
        cast(int, one.id) if one.name is None and not one.last_values else one for one in classes
    ]


def parse_class_reference(reference: ClassReference) -> NamedClass:
    """Raises ValueError for what is neither a class id nor a class name."""
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
    """Raise ValueError unless this is a class id."""
    if (
        isinstance(class_id, bool)
        or not isinstance(class_id, int)
        or not 0 <= class_id <= CLASS_ID_MAX
    ):
        raise ValueError(f"a class id is a number from 0 to {CLASS_ID_MAX}, got {class_id!r}")


def _class_key(named: NamedClass) -> int | str:
    return cast(int, named.id) if named.name is None else named.name
