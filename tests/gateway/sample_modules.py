"""Gateway modules for tests. They record their calls in `EVENTS`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import trio

from simplebus.gateway import ModuleMessage
from simplebus.gateway.module import BlockingModule, Module

EVENTS: list[tuple[str, ...]] = []


class PanicError(BaseException):
    """Error that is no Exception, as extensions in other languages raise it."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "exits": lambda: SystemExit(3),
    "interrupts": KeyboardInterrupt,
    "panics": lambda: PanicError("no"),
    "closes": GeneratorExit,
    "panics in tasks": lambda: BaseExceptionGroup("two", [PanicError("no"), SystemExit(3)]),
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fails: str = ""
    """Method in which the module raises, or the message on which it does."""
    times: int = 1
    """Number of times that it raises."""
    error_key: str = ""
    """Key of the error in `RAISED`; empty for a ValueError."""


class Recorder(Module):
    """Module with a task, which records its calls."""

    Settings = Settings
    failed = 0

    def __init__(self, bus: Any, settings: Any) -> None:
        super().__init__(bus, settings)
        self._record("create")

    def _record(self, *event: str) -> None:
        EVENTS.append((self.bus.name, *event))
        if self.settings.fails in event and Recorder.failed < self.settings.times:
            Recorder.failed += 1
            if self.settings.error_key:
                raise RAISED[self.settings.error_key]()
            raise ValueError(f"on purpose in {' '.join(event)}")

    async def start(self) -> None:
        self._record("start")

    async def run(self) -> None:
        self._record("run")
        await trio.sleep_forever()

    async def receive(self, message: ModuleMessage) -> None:
        self._record("receive", message.content.decode())

    async def modules_changed(self, names: tuple[str, ...]) -> None:
        self._record("modules", *names)

    async def destroy(self) -> None:
        self._record("destroy")


class NeverStarts(Recorder):
    """Module whose `start` never returns."""

    async def start(self) -> None:
        await trio.sleep_forever()


class PanicsWhenAbandoned(Recorder):
    """Module whose `receive` hangs, and raises PanicError when it is cancelled."""

    async def receive(self, message: ModuleMessage) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise PanicError("at last")


class BlockingRecorder(BlockingModule):
    """Module with a thread, which records its calls."""

    Settings = Settings
    threads: set[int] = set()  # noqa: RUF012

    def __init__(self, bus: Any, settings: Any) -> None:
        super().__init__(bus, settings)
        self._record("create")

    def _record(self, *event: str) -> None:
        BlockingRecorder.threads.add(threading.get_ident())
        Recorder._record(self, *event)  # type: ignore[arg-type]

    def start(self) -> None:
        self._record("start")

    def receive(self, message: ModuleMessage) -> None:
        self._record("receive", message.content.decode())

    def modules_changed(self, names: tuple[str, ...]) -> None:
        self._record("modules", *names)

    def destroy(self) -> None:
        self._record("destroy")


class BlockingRunner(BlockingRecorder):
    """Module with a `run` in another thread."""

    def run(self) -> None:
        self._record("run")
        self.bus.stopping.wait(30)


class Shout(Module):
    """Module that publishes received messages in upper case."""

    async def receive(self, message: ModuleMessage) -> None:
        await self.bus.publish(message.content.upper(), message.properties)


class Parsed(Module):
    """Module that parses its settings itself."""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> int:
        if "n" not in raw:
            raise ValueError("n is missing")
        return int(raw["n"])


class Stuck(BlockingModule):
    """Module whose `receive` returns only when `release_event` is set."""

    release_event = threading.Event()
    entered = threading.Event()

    def receive(self, message: ModuleMessage) -> None:
        Stuck.entered.set()
        Stuck.release_event.wait(30)


class FailsThenSticks(BlockingRecorder):
    """Module that fails as configured, and whose `receive` is stuck after that."""

    def receive(self, message: ModuleMessage) -> None:
        Stuck.entered.set()
        Stuck.release_event.wait(30)


def broken(bus: Any, settings: Any) -> Any:
    """Return an object that is not a module."""
    return 7


def duplicate(message: ModuleMessage) -> list[ModuleMessage]:
    return [message, message.replace(message.content + b"!")]


def text_of(message: ModuleMessage) -> str:
    return message.content.decode()


def panics(message: ModuleMessage) -> ModuleMessage:
    raise PanicError("no")
