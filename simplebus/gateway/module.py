"""What a module of a gateway is, and what it is given.

Rule 1: a module's methods are called one at a time: create, start, then receive and
modules_changed, at last destroy. Only `run` and `health` go on beside them.
Rule 2: a module knows its port, not the bus: what it publishes bears its name.

    create(bus, settings)  the entry point is called: a class, or a function that returns a module
    start()                all modules are there, and those before it have started
    run()                  as long as it likes: it is cancelled; in a thread, `bus.wait` says when
    receive(message)       one message that it hears
    modules_changed(names) modules have come or gone
    destroy()              the end; also before it is made again after a failure
    health()               what it says of itself, plain values by name: asked at any time, beside
                           all else; where methods may block in a thread of its own, else in the
                           event loop, where it returns at once or is async
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

import msgspec
import trio

from simplebus.gateway.blocking import End
from simplebus.gateway.bus import ModuleBus
from simplebus.gateway.errors import ModuleBusError
from simplebus.gateway.messages import ModuleMessage


class NoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a module that has none."""


class _Named(logging.LoggerAdapter[logging.Logger]):
    """What a module writes to the log."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(f"simplebus.gateway.{name}"), {})
        self._name = name

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{self._name}: {msg}", kwargs


class Port:
    """A module's way to the bus."""

    def __init__(self, bus: ModuleBus, source: object, name: str) -> None:
        self._bus = bus
        self._source = source
        self.name = name
        """What the module is called in this gateway."""
        self.log = _Named(name)
        """Its lines begin with its name."""
        self.published = 0
        """Messages that the module has published."""
        self.stopping = threading.Event()
        """Set when the module is to end."""
        self._ended = End()

    def stop(self) -> None:
        """Tell the module to end. For the gateway, in its event loop."""
        self.stopping.set()

    @property
    def has_ended(self) -> bool:
        """Whether this module is no more, whatever of it still runs: it cannot publish."""
        return self._ended.is_there

    def end(self) -> None:
        """The module is no more. For the gateway, in its event loop: from now on, what of it does
        not return publishes nothing, also if it waits for room."""
        self.stop()
        self._ended.come()

    def _over(self) -> ModuleBusError:
        return ModuleBusError(f"module {self.name!r} has ended: it publishes nothing any more")

    def publish_nowait(
        self, content: bytes | ModuleMessage, properties: Mapping[str, str] | None = None
    ) -> None:
        """Publish, from any thread. Raises ModuleBusFullError if there is no room, ModuleBusError
        if the module has ended."""
        if self.has_ended:
            raise self._over()
        self._bus.publish_nowait(_message(content, properties), source=self._source)
        self.published += 1


class AsyncPort(Port):
    """That of a module with a task."""

    def __init__(self, bus: ModuleBus, source: object, name: str) -> None:
        super().__init__(bus, source, name)
        self._stops = trio.Event()

    def stop(self) -> None:
        super().stop()
        self._stops.set()

    async def wait_stopping(self) -> None:
        """Return when the module is to end."""
        await self._stops.wait()

    async def publish(
        self, content: bytes | ModuleMessage, properties: Mapping[str, str] | None = None
    ) -> None:
        """Publish a message, or its content and properties. Waits for room. Raises ModuleBusError;
        inside `receive` ModuleBusFullError, where waiting would never end."""
        if self.has_ended:
            raise self._over()
        message = _message(content, properties)
        with trio.CancelScope() as scope, self._ended.told(scope.cancel):
            await self._bus.publish_async(message, source=self._source)
        if scope.cancelled_caught:
            raise self._over()
        self.published += 1


class BlockingPort(Port):
    """That of a module with a thread."""

    def __init__(self, bus: ModuleBus, source: object, name: str) -> None:
        super().__init__(bus, source, name)
        self._stops = End()

    def stop(self) -> None:
        super().stop()
        self._stops.come()

    def publish(
        self, content: bytes | ModuleMessage, properties: Mapping[str, str] | None = None
    ) -> None:
        """As that of an AsyncPort. Raises ModuleBusError, too, when the module has ended: it was to
        end, and did not for so long that it was given up."""
        if not self._publish_until(self._ended, content, properties):
            raise self._over()

    def publish_until_stopping(
        self, content: bytes | ModuleMessage, properties: Mapping[str, str] | None = None
    ) -> bool:
        """As `publish`, for `run` of a module that can say it another time: returns False, having
        published nothing, when the module is to end, also while it waits for room."""
        return self._publish_until(self._stops, content, properties)

    def _publish_until(
        self,
        end: End,
        content: bytes | ModuleMessage,
        properties: Mapping[str, str] | None,
    ) -> bool:
        message = _message(content, properties)
        is_published = self._bus.publish_until(message, end, source=self._source)
        self.published += is_published
        return is_published

    def wait(self, seconds: float) -> bool:
        """Pause for so long. Returns at once, and True, when the module is to end."""
        return self.stopping.wait(seconds)


def _message(content: bytes | ModuleMessage, properties: Mapping[str, str] | None) -> ModuleMessage:
    if isinstance(content, ModuleMessage):
        return content if properties is None else content.replace(properties=properties)
    return ModuleMessage(content, properties)


class Module:
    """A module that never blocks: its methods are awaited. To be inherited from, or imitated.

    class Shout(Module):
        async def receive(self, message):
            await self.bus.publish(message.content.upper(), message.properties)
    """

    Settings: ClassVar[Any] = NoSettings
    """What `settings` in the file must be like: a msgspec.Struct, or a dataclass."""
    keeps_running: ClassVar[bool] = False
    """Whether `run` is needed for what it hears: then it is not cancelled when the module is to
    end, but told by `bus.wait_stopping`, once there are no more messages."""

    def __init__(self, bus: AsyncPort, settings: Any) -> None:
        self.bus = bus
        self.settings = settings

    async def receive(self, message: ModuleMessage) -> None:
        """Called with each message that it hears."""


class BlockingModule:
    """A module that may block: its methods are called in a thread of its own, `run` in another."""

    Settings: ClassVar[Any] = NoSettings

    def __init__(self, bus: BlockingPort, settings: Any) -> None:
        self.bus = bus
        self.settings = settings

    def receive(self, message: ModuleMessage) -> None:
        """Called with each message that it hears."""
