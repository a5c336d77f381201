"""Says what it hears again, otherwise.

    module = "transform"
    hears = ["thermometer"]
    settings = { only = { unit = "C" }, set = { site = "roof" }, remove = ["raw"] }

Messages that do not have the properties of `only` are not said again. Renamed, then removed, then
set. With `function = "package.module:name"` the message is given to that at last: it returns a
message, several, or None for none.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import msgspec

from simplebus.gateway.config import find
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import AsyncPort, Module


class TransformSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is done to a message."""

    only: dict[str, str] = {}
    set: dict[str, str] = {}
    rename: dict[str, str] = {}
    remove: list[str] = []
    function: str = ""

    def __post_init__(self) -> None:
        for properties in self.set, dict.fromkeys(self.rename.values(), ""):
            ModuleMessage(b"", properties)  # They are checked in there.
        if self.function:
            find(self.function)


Function = Callable[[ModuleMessage], ModuleMessage | list[ModuleMessage] | None]


def changed(settings: TransformSettings, message: ModuleMessage) -> ModuleMessage | None:
    """The message with other properties; None if it is not said again."""
    properties: Mapping[str, str] = message.properties
    if any(properties.get(name) != value for name, value in settings.only.items()):
        return None
    renamed = {settings.rename.get(name, name): value for name, value in properties.items()}
    kept = {name: value for name, value in renamed.items() if name not in settings.remove}
    return message.replace(properties={**kept, **settings.set})


class Transform(Module):
    """The module."""

    Settings = TransformSettings

    def __init__(self, bus: AsyncPort, settings: Any) -> None:
        super().__init__(bus, settings)
        self._function: Function | None = None
        if settings.function:
            self._function = cast(Function, find(settings.function))

    async def receive(self, message: ModuleMessage) -> None:
        said = changed(self.settings, message)
        if said is None:
            return
        for each in [said] if self._function is None else self._made(self._function(said)):
            await self.bus.publish(each)

    def _made(self, made: object) -> list[ModuleMessage]:
        """What its function has returned. Raises TypeError for what are no messages."""
        if made is None:
            return []
        several = [made] if isinstance(made, ModuleMessage) else made
        if isinstance(several, Iterable):
            messages = list(several)
            if all(isinstance(each, ModuleMessage) for each in messages):
                return messages
        raise TypeError(
            f"expected {self.settings.function} to return a ModuleMessage, several, or None; got "
            f"{reprlib.repr(made)}"
        )
