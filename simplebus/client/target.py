"""What a subscription is to: a type, a class's id, or its name.

Rule 1: a type stands for the class of its binding, and its messages' values are of that type. A
class by id or name has messages, whose payloads are what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simplebus.client.codecs import DecodeError
from simplebus.client.registry import Binding, Registry
from simplebus.core.client.core import check_class_id


@dataclass(frozen=True, slots=True)
class Target:
    """One class, and how its payloads are read."""

    what: Binding[Any] | int | str
    decode: Callable[[bytes], Any] | None
    """None where payloads are what is wanted."""

    @classmethod
    def of(cls, what: object, registry: Registry) -> Target:
        """Raises UnboundTypeError for a type without a class, ValueError for no class id."""
        if isinstance(what, int) and not isinstance(what, bool):
            check_class_id(what)
            return cls(what, None)
        if isinstance(what, str):
            if not what:
                raise ValueError("a class's name is empty, expected a word for it")
            return cls(what, None)
        binding = registry.bindings[what]
        return cls(binding, binding.decode)

    def __str__(self) -> str:
        what = self.what
        if isinstance(what, int):
            return f"class {what}"
        if isinstance(what, str):
            return f"class {what!r}"
        return f"class {what.class_id}" if what.name is None else f"class {what.name!r}"


def nothing_came(target: Target, seconds: float) -> TimeoutError:
    """A `get` has waited long enough."""
    return TimeoutError(f"no message of {target} came within {seconds:g} s")


def undecodable(error: DecodeError, message: Any) -> DecodeError:
    """What a loop over values raises: the error, which has the message that it is about."""
    error.message = message
    return error
