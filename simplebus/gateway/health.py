"""What a module says of itself, asked so that nobody waits for it.

Rule 1: a `health` that may block is called in a thread of its own, one that is async in a task:
whoever looks is told what it said last, and has it asked again.
Rule 2: it is in one call at a time. One that does not return within ANSWER_S does not answer, and
is told so until it does.
Rule 3: what it says is plain, and bounded, whatever it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import trio

from simplebus.gateway.blocking import Waiter
from simplebus.gateway.errors import described, parted
from simplebus.gateway.workers import OwnThread

Plain = str | int | float | bool

ANSWER_S = 10.0
"""How long it may take."""
VALUES_MAX = 32
CHARACTERS_MAX = 1000
"""Of each value, and of each name."""
_INTEGER_BITS_MAX = 63
"""A longer one is told as text: not everybody who reads them has such numbers."""

Method = Callable[[], Any]


class OfItself:
    """Of one module that is there. `run` is for its nursery."""

    def __init__(self, module: Any, *, name: str, is_blocking: bool) -> None:
        self._health: Method | None = getattr(module, "health", None)
        is_async = inspect.iscoroutinefunction(self._health)
        self._is_quick = not is_blocking and not is_async
        self._thread: OwnThread | None = None
        if self._health is not None and is_blocking and not is_async:
            self._thread = OwnThread(f"{name} of itself", Waiter())
        self._told: dict[str, Plain] = {}
        self._since: float | None = None
        """When it was asked, while it has not answered."""
        self._looked = trio.Event()
        self._scope = trio.CancelScope()

    def told(self) -> dict[str, Plain]:
        """What it says; what it said last where that may take long. Empty for nothing yet."""
        if self._health is None:
            return {}
        if self._is_quick:
            return _asked(self._health)
        if self._since is None:
            self._looked.set()
        elif trio.current_time() - self._since > ANSWER_S:
            return {"health": "it does not answer"}
        return self._told

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Ask: once, and whenever somebody has looked, until it is ended."""
        if self._health is None or self._is_quick:
            return
        with self._scope:
            while True:
                self._since = trio.current_time()
                try:
                    self._told = await self._ask(self._health)
                finally:
                    self._since = None
                await self._looked.wait()
                self._looked = trio.Event()

    async def _ask(self, health: Method) -> dict[str, Plain]:
        try:
            if self._thread is not None:
                return await self._thread.run(_asked, health)
            return _plain(await health())
        except BaseException as error:
            return _failed(error, hears_ctrl_c=False)

    def end(self) -> None:
        """Ask no more."""
        self._scope.cancel()
        if self._thread is not None:
            self._thread.end()


def _asked(health: Method) -> dict[str, Plain]:
    try:
        return _plain(health())
    except BaseException as error:
        return _failed(error)


def _failed(error: BaseException, *, hears_ctrl_c: bool = True) -> dict[str, Plain]:
    """What is told of one that raises. Raises what is not its own doing."""
    failure, rest = parted(error, hears_ctrl_c=hears_ctrl_c)
    if rest is not None:
        raise rest
    assert failure is not None
    return {"health": plain_text(described(failure))}


def _plain(said: Mapping[Any, Any]) -> dict[str, Plain]:
    return {
        plain_text(str(name)): _value(value) for name, value in islice(said.items(), VALUES_MAX)
    }


def _value(value: Any) -> Plain:
    if isinstance(value, float) or (
        isinstance(value, int) and value.bit_length() <= _INTEGER_BITS_MAX
    ):
        return value
    return plain_text(str(value))


def plain_text(text: str) -> str:
    """The beginning of a text, as one that can be written everywhere: a file's name, for example,
    may hold what is no UTF-8."""
    return text[:CHARACTERS_MAX].encode(errors="backslashreplace").decode()
