"""Health values of a module, requested without blocking the caller.

A blocking `health` runs in a separate thread, an async `health` in a task. The caller gets the last
values and triggers a new request. A `health` that does not return within ANSWER_TIMEOUT_S is
reported as not answering. Values are plain and bounded, for any result of `health`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import trio

from simplebus.gateway.blocking import CallbackWaiter
from simplebus.gateway.errors import describe_error, split_failure
from simplebus.gateway.workers import ModuleThread

HealthValue = str | int | float | bool

ANSWER_TIMEOUT_S = 10.0
"""Time after which `health` counts as not answering."""
VALUES_MAX = 32
CHARACTERS_MAX = 1000
"""Length of each value and name."""
_INTEGER_BITS_MAX = 63
"""Longer integers are reported as text, because not every reader has such numbers."""

HealthMethod = Callable[[], Any]


class HealthProbe:
    """Calls `health` of a created module. `run` is a task of its nursery."""

    def __init__(self, module: Any, *, name: str, is_blocking: bool) -> None:
        self._health: HealthMethod | None = getattr(module, "health", None)
        is_async = inspect.iscoroutinefunction(self._health)
        self._is_immediate = not is_blocking and not is_async
        self._thread: ModuleThread | None = None
        if self._health is not None and is_blocking and not is_async:
            self._thread = ModuleThread(f"{name} of itself", CallbackWaiter())
        self._latest: dict[str, HealthValue] = {}
        self._requested_at: float | None = None
        """Time of the request that has no answer yet."""
        self._requested = trio.Event()
        self._scope = trio.CancelScope()

    def latest(self) -> dict[str, HealthValue]:
        """Return the current values, or the last ones if `health` may take long; empty before the
        first.
        """
        if self._health is None:
            return {}
        if self._is_immediate:
            return _call_health(self._health)
        if self._requested_at is None:
            self._requested.set()
        elif trio.current_time() - self._requested_at > ANSWER_TIMEOUT_S:
            return {"health": "it does not answer"}
        return self._latest

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Call `health` once, and again after each use of the values."""
        if self._health is None or self._is_immediate:
            return
        with self._scope:
            while True:
                self._requested_at = trio.current_time()
                try:
                    self._latest = await self._request(self._health)
                finally:
                    self._requested_at = None
                await self._requested.wait()
                self._requested = trio.Event()

    async def _request(self, health: HealthMethod) -> dict[str, HealthValue]:
        try:
            if self._thread is not None:
                return await self._thread.run(_call_health, health)
            return _to_plain(await health())
        except BaseException as error:
            return _describe_failure(error, can_raise_ctrl_c=False)

    def end(self) -> None:
        """Stop calling `health`."""
        self._scope.cancel()
        if self._thread is not None:
            self._thread.end()


def _call_health(health: HealthMethod) -> dict[str, HealthValue]:
    try:
        return _to_plain(health())
    except BaseException as error:
        return _describe_failure(error)


def _describe_failure(
    error: BaseException, *, can_raise_ctrl_c: bool = True
) -> dict[str, HealthValue]:
    """Return the values for a `health` that raised. Re-raises cancellation and Ctrl-C."""
    failure, remaining_error = split_failure(error, can_raise_ctrl_c=can_raise_ctrl_c)
    if remaining_error is not None:
        raise remaining_error
    assert failure is not None
    return {"health": plain_text(describe_error(failure))}


def _to_plain(values: Mapping[Any, Any]) -> dict[str, HealthValue]:
    return {
        plain_text(str(name)): _value(value) for name, value in islice(values.items(), VALUES_MAX)
    }


def _value(value: Any) -> HealthValue:
    if isinstance(value, float) or (
        isinstance(value, int) and value.bit_length() <= _INTEGER_BITS_MAX
    ):
        return value
    return plain_text(str(value))


def plain_text(text: str) -> str:
    """Return the start of a text, without characters that UTF-8 cannot encode, such as in file
    names.
    """
    return text[:CHARACTERS_MAX].encode(errors="backslashreplace").decode()
