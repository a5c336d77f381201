"""Names of the classes of published messages, for spans."""

from __future__ import annotations

from collections.abc import Iterable

from simplebus.client.message_types import Registry


def name_classes(registry: Registry, messages: Iterable[object], class_id: int | str | None) -> str:
    """Return the class of published messages; empty for several. Raises UnboundTypeError."""
    if class_id is not None:
        return str(class_id)
    bindings = {registry.bindings[type_] for type_ in set(map(type, messages))}
    names = {
        str(binding.class_id) if binding.name is None else binding.name for binding in bindings
    }
    return names.pop() if len(names) == 1 else ""
