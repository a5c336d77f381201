"""Modules of gateways for tests. They write down what happens to them in `HAPPENED`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import trio

from simplebus.gateway import ModuleMessage
from simplebus.gateway.module import BlockingModule, Module

HAPPENED: list[tuple[str, ...]] = []


class PanicError(BaseException):
    """As what is written in other languages raises."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "exits": lambda: SystemExit(3),
    "interrupts": KeyboardInterrupt,
    "panics": lambda: PanicError("no"),
    "closes": GeneratorExit,
    "panics in tasks": lambda: BaseExceptionGroup("two", [PanicError("no"), SystemExit(3)]),
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fails: str = ""
    """Where it raises: in which method, or on which message."""
    times: int = 1
    """How often."""
    how: str = ""
    """What it raises; a ValueError if this is empty."""


class Recorder(Module):
    """A module with a task."""

    Settings = Settings
    failed = 0

    def __init__(self, bus: Any, settings: Any) -> None:
        super().__init__(bus, settings)
        self._happened("create")

    def _happened(self, *what: str) -> None:
        HAPPENED.append((self.bus.name, *what))
        if self.settings.fails in what and Recorder.failed < self.settings.times:
            Recorder.failed += 1
            if self.settings.how:
                raise RAISED[self.settings.how]()
            raise ValueError(f"on purpose in {' '.join(what)}")

    async def start(self) -> None:
        self._happened("start")

    async def run(self) -> None:
        self._happened("run")
        await trio.sleep_forever()

    async def receive(self, message: ModuleMessage) -> None:
        self._happened("receive", message.content.decode())

    async def modules_changed(self, names: tuple[str, ...]) -> None:
        self._happened("modules", *names)

    async def destroy(self) -> None:
        self._happened("destroy")


class Unready(Recorder):
    """One that does not get ready."""

    async def start(self) -> None:
        await trio.sleep_forever()


class PanicsAtLast(Recorder):
    """When it is given up."""

    async def receive(self, message: ModuleMessage) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise PanicError("at last")


class BlockingRecorder(BlockingModule):
    """The same with a thread."""

    Settings = Settings
    threads: set[int] = set()  # noqa: RUF012

    def __init__(self, bus: Any, settings: Any) -> None:
        super().__init__(bus, settings)
        self._happened("create")

    def _happened(self, *what: str) -> None:
        BlockingRecorder.threads.add(threading.get_ident())
        Recorder._happened(self, *what)  # type: ignore[arg-type]

    def start(self) -> None:
        self._happened("start")

    def receive(self, message: ModuleMessage) -> None:
        self._happened("receive", message.content.decode())

    def modules_changed(self, names: tuple[str, ...]) -> None:
        self._happened("modules", *names)

    def destroy(self) -> None:
        self._happened("destroy")


class BlockingRunner(BlockingRecorder):
    """With something that it does beside, in another thread."""

    def run(self) -> None:
        self._happened("run")
        self.bus.stopping.wait(30)


class Shout(Module):
    """Says again what it hears, louder."""

    async def receive(self, message: ModuleMessage) -> None:
        await self.bus.publish(message.content.upper(), message.properties)


class Parsed(Module):
    """Parses its settings itself."""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> int:
        if "n" not in raw:
            raise ValueError("n is missing")
        return int(raw["n"])


class Stuck(BlockingModule):
    """Its `receive` does not return before it is let go."""

    go = threading.Event()
    entered = threading.Event()

    def receive(self, message: ModuleMessage) -> None:
        Stuck.entered.set()
        Stuck.go.wait(30)


class StuckLater(BlockingRecorder):
    """One that fails as it is told to, and then is stuck."""

    def receive(self, message: ModuleMessage) -> None:
        Stuck.entered.set()
        Stuck.go.wait(30)


def broken(bus: Any, settings: Any) -> Any:
    """An entry point that gives no module."""
    return 7


def twice(message: ModuleMessage) -> list[ModuleMessage]:
    return [message, message.replace(message.content + b"!")]


def text_of(message: ModuleMessage) -> str:
    return message.content.decode()


def panics(message: ModuleMessage) -> ModuleMessage:
    raise PanicError("no")
