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

ClassName = int | str | NamedClass
"""How a class is named to the bus: by id, by name, or by both."""


class ClassNames:
    """Every class that was named."""

    def __init__(self) -> None:
        self._known: dict[int | str, NamedClass] = {}
        """By name if it has one."""

    def add(self, named: NamedClass) -> None:
        self._known[_key(named)] = named

    def remove(self, named: NamedClass) -> None:
        self._known.pop(_key(named), None)

    def id_of(self, name: str) -> int | None:
        """The id of a class that was named by name; None before the bus has said it."""
        named = self._known.get(name)
        return None if named is None else named.id

    def all(self) -> list[ClassName]:
        """As a Connect names them."""
        return on_the_wire(self._known.values())


def on_the_wire(classes: Iterable[NamedClass]) -> list[ClassName]:
    """The shortest way to name these."""
    return [
        cast(int, one.id) if one.name is None and not one.last_values else one for one in classes
    ]


def named_class(one: ClassName) -> NamedClass:
    """Raises ValueError for what is neither a class id nor a class name."""
    if isinstance(one, str):
        one = NamedClass(name=one)
    elif not isinstance(one, NamedClass):
        one = NamedClass(id=one)
    if one.id is not None or one.name is None:
        check_class_id(one.id)
    if one.name is not None and not 0 < len(one.name) <= NAME_CHARACTERS_MAX:
        raise ValueError(
            f"a class name has 1 to {NAME_CHARACTERS_MAX} characters, got {one.name!r}"
        )
    return one


def check_class_id(class_id: object) -> None:
    """Raise ValueError unless this is a class id."""
    if (
        isinstance(class_id, bool)
        or not isinstance(class_id, int)
        or not 0 <= class_id <= CLASS_ID_MAX
    ):
        raise ValueError(f"a class id is a number from 0 to {CLASS_ID_MAX}, got {class_id!r}")


def _key(named: NamedClass) -> int | str:
    return cast(int, named.id) if named.name is None else named.name
