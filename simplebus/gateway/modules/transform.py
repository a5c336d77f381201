"""Publishes received messages with changed properties.

    module = "transform"
    hears = ["thermometer"]
    settings = { only = { unit = "C" }, set = { site = "roof" }, remove = ["raw"] }

Messages without the properties of `only` are dropped. Properties are renamed, then removed, then
set. `function = "package.module:name"` is called last; it returns a message, several messages, or
None.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import msgspec

from simplebus.gateway.config import find_entry_point
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import AsyncPort, Module


class TransformSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the transform."""

    only: dict[str, str] = {}
    set: dict[str, str] = {}
    rename: dict[str, str] = {}
    remove: list[str] = []
    function: str = ""

    def __post_init__(self) -> None:
        for properties in self.set, dict.fromkeys(self.rename.values(), ""):
            ModuleMessage(b"", properties)  # Checks the properties.
        if self.function:
            find_entry_point(self.function)


Function = Callable[[ModuleMessage], ModuleMessage | list[ModuleMessage] | None]


def apply_rules(settings: TransformSettings, message: ModuleMessage) -> ModuleMessage | None:
    """Return the message with changed properties, or None if it is dropped."""
    properties: Mapping[str, str] = message.properties
    if any(properties.get(name) != value for name, value in settings.only.items()):
        return None
    renamed = {settings.rename.get(name, name): value for name, value in properties.items()}
    kept_properties = {
        name: value for name, value in renamed.items() if name not in settings.remove
    }
    return message.replace(properties={**kept_properties, **settings.set})


class Transform(Module):
    """Transform module."""

    Settings = TransformSettings

    def __init__(self, bus: AsyncPort, settings: Any) -> None:
        super().__init__(bus, settings)
        self._function: Function | None = None
        if settings.function:
            self._function = cast(Function, find_entry_point(settings.function))

    async def receive(self, message: ModuleMessage) -> None:
        changed = apply_rules(self.settings, message)
        if changed is None:
            return
        for result in (
            [changed] if self._function is None else self._to_messages(self._function(changed))
        ):
            await self.bus.publish(result)

    def _to_messages(self, result: object) -> list[ModuleMessage]:
        """Return the messages that the function returned. Raises TypeError for anything else."""
        if result is None:
            return []
        if isinstance(result, ModuleMessage):
            return [result]
        if isinstance(result, Iterable):
            messages = list(result)
            if all(isinstance(message, ModuleMessage) for message in messages):
                return messages
        raise TypeError(
            f"expected {self.settings.function} to return a ModuleMessage, several, or None; got "
            f"{reprlib.repr(result)}"
        )
