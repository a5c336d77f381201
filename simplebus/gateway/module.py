"""Base classes of gateway modules, and the ports through which they publish.

A module's methods are called one at a time; only `run` and `health` run beside the others. A module
publishes through its port, under its own name.

    create(bus, settings)  the entry point: a class, or a function that returns a module
    start()                all modules are created, and earlier ones have started
    run()                  long-running part; it is cancelled, or in a thread sees `bus.stopping`
    receive(message)       a message that the module receives
    modules_changed(names) modules were added or removed
    destroy()              the end, also before a restart after a failure
    health()               plain values by name, requested at any time beside other calls; in a
                           separate thread if methods may block, else in the event loop, where it
                           returns at once or is async
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

import msgspec
import trio

from simplebus.gateway.blocking import StopSignal
from simplebus.gateway.bus import ModuleBus
from simplebus.gateway.errors import ModuleBusError
from simplebus.gateway.messages import ModuleMessage


class NoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a module without settings."""


class ModuleLogAdapter(logging.LoggerAdapter[logging.Logger]):
    """Logger that prefixes lines with the name of the module, and adds it as `module_name`."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(f"simplebus.gateway.{name}"), {})
        self._name = name

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        extra = kwargs.get("extra") or {}
        return f"{self._name}: {msg}", {**kwargs, "extra": {"module_name": self._name, **extra}}


class Port:
    """Connection of a module to the bus."""

    def __init__(self, bus: ModuleBus, source: object, name: str) -> None:
        self._bus = bus
        self._source = source
        self.name = name
        """Name of the module in the gateway."""
        self.log = ModuleLogAdapter(name)
        """Logger whose lines begin with the name."""
        self.published = 0
        """Messages that the module has published."""
        self.stopping = threading.Event()
        """Set when the module is to end."""
        self._end_signal = StopSignal()

    def stop(self) -> None:
        """Ask the module to end. Called by the gateway in its event loop."""
        self.stopping.set()

    @property
    def has_ended(self) -> bool:
        """True if the module has ended, so that it cannot publish even if its code still runs."""
        return self._end_signal.is_set

    def end(self) -> None:
        """Stop the module from publishing. Called by the gateway in its event loop.

        Code of the module that has not returned publishes nothing any more, even if it waits for
        room.
        """
        self.stop()
        self._end_signal.set()

    def _ended_error(self) -> ModuleBusError:
        return ModuleBusError(f"module {self.name!r} has ended and cannot publish any more")

    def publish_nowait(
        self, content: bytes | ModuleMessage, properties: Mapping[str, str] | None = None
    ) -> None:
        """Publish from any thread, without waiting.

        Args:
            content: Content, or a message.
            properties: Properties; for a message they replace its own.

        Raises:
            ModuleBusFullError: A queue is full.
            ModuleBusError: The module has ended, or the arguments are invalid.
        """
        if self.has_ended:
            raise self._ended_error()
        self._bus.publish_nowait(_to_message(content, properties), source=self._source)
        self.published += 1


class AsyncPort(Port):
    """Port of a module with a task."""

    def __init__(self, bus: ModuleBus, source: object, name: str) -> None:
        super().__init__(bus, source, name)
        self._stop_signal = trio.Event()

    def stop(self) -> None:
        super().stop()
        self._stop_signal.set()

    async def wait_stopping(self) -> None:
        """Wait until the module is to end."""
        await self._stop_signal.wait()

    async def publish(
        self, content: bytes | ModuleMessage, properties: Mapping[str, str] | None = None
    ) -> None:
        """Publish a message, and wait for room.

        Args:
            content: Content, or a message.
            properties: Properties; for a message they replace its own.

        Raises:
            ModuleBusFullError: Inside `receive`, if waiting would not end.
            ModuleBusError: The module has ended, or the arguments are invalid.
        """
        if self.has_ended:
            raise self._ended_error()
        message = _to_message(content, properties)
        with trio.CancelScope() as scope, self._end_signal.notify(scope.cancel):
            await self._bus.publish_async(message, source=self._source)
        if scope.cancelled_caught:
            raise self._ended_error()
        self.published += 1


class BlockingPort(Port):
    """Port of a module with a thread."""

    def __init__(self, bus: ModuleBus, source: object, name: str) -> None:
        super().__init__(bus, source, name)
        self._stop_signal = StopSignal()

    def stop(self) -> None:
        super().stop()
        self._stop_signal.set()

    def publish(
        self, content: bytes | ModuleMessage, properties: Mapping[str, str] | None = None
    ) -> None:
        """Publish a message, and wait for room.

        Args:
            content: Content, or a message.
            properties: Properties; for a message they replace its own.

        Raises:
            ModuleBusFullError: Inside `receive`, if waiting would not end.
            ModuleBusError: The module has ended, for example because it did not stop in time.
        """
        if not self._publish_until(self._end_signal, content, properties):
            raise self._ended_error()

    def publish_until_stopping(
        self, content: bytes | ModuleMessage, properties: Mapping[str, str] | None = None
    ) -> bool:
        """Publish like `publish`, but give up when the module is to end. For `run` of a module.

        Returns:
            False if the module is to end; then nothing was published.
        """
        return self._publish_until(self._stop_signal, content, properties)

    def _publish_until(
        self,
        end: StopSignal,
        content: bytes | ModuleMessage,
        properties: Mapping[str, str] | None,
    ) -> bool:
        message = _to_message(content, properties)
        is_published = self._bus.publish_until(message, end, source=self._source)
        self.published += is_published
        return is_published

    def wait(self, seconds: float) -> bool:
        """Wait for some time. Returns True, at once, if the module is to end.

        Args:
            seconds: Time to wait.
        """
        return self.stopping.wait(seconds)


def _to_message(
    content: bytes | ModuleMessage, properties: Mapping[str, str] | None
) -> ModuleMessage:
    if isinstance(content, ModuleMessage):
        return content if properties is None else content.replace(properties=properties)
    return ModuleMessage(content, properties)


class Module:
    """Base class of a module that never blocks. Its methods are awaited. Deriving from it is
    optional.

        class Shout(Module):
            async def receive(self, message):
                await self.bus.publish(message.content.upper(), message.properties)

    Args:
        bus: Port of the module.
        settings: Its settings, as an instance of `Settings`.
    """

    Settings: ClassVar[Any] = NoSettings
    """Type of `settings` in the file: a msgspec.Struct or a dataclass."""
    keeps_running: ClassVar[bool] = False
    """True if `run` is needed to process received messages.

    Then it is not cancelled when the module is to end; `bus.wait_stopping` returns after the last
    message.
    """

    def __init__(self, bus: AsyncPort, settings: Any) -> None:
        self.bus = bus
        self.settings = settings

    async def receive(self, message: ModuleMessage) -> None:
        """Process a message."""


class BlockingModule:
    """Base class of a module that may block. Its methods run in one thread, `run` in another.

    Args:
        bus: Port of the module.
        settings: Its settings, as an instance of `Settings`.
    """

    Settings: ClassVar[Any] = NoSettings

    def __init__(self, bus: BlockingPort, settings: Any) -> None:
        self.bus = bus
        self.settings = settings

    def receive(self, message: ModuleMessage) -> None:
        """Process a message."""
