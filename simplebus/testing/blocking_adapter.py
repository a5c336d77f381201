"""Adapter that gives the blocking client the interface of the async client, for the conformance
suite.

A call has its effect when it returns; awaiting adds nothing. The async client runs handlers in the
background; here `until` and `run_handlers` of the host run them.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

from simplebus.client.blocking.bus import BlockingBus
from simplebus.client.blocking.subscription import BlockingBaseSubscription

_BLOCKING_METHODS = {
    "drain",
    "explain",
    "fetch",
    "flush",
    "get",
    "publish",
    "publish_many",
    "keep_last_values",
    "purge",
    "reply",
    "request",
    "take",
}
_POLL_SECONDS = 0.005


class AwaitableBus:
    """Blocking bus whose methods are awaited."""

    def __init__(self, bus: BlockingBus) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return _make_awaitable(name, getattr(self._bus, name))

    def subscribe(self, *arguments: Any, **options: Any) -> AwaitableSubscription:
        return AwaitableSubscription(self._bus.subscribe(*arguments, **options))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Run handlers until the condition holds."""
        while not condition():
            self._bus.run(_POLL_SECONDS)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Run handlers in a thread, to which the bus belongs in this block."""
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                self._bus.run(_POLL_SECONDS)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


class AwaitableSubscription:
    """Blocking subscription that is entered, iterated and called asynchronously."""

    def __init__(self, subscription: BlockingBaseSubscription[Any]) -> None:
        self._subscription = subscription

    def __getattr__(self, name: str) -> Any:
        return _make_awaitable(name, getattr(self._subscription, name))

    async def __aenter__(self) -> Self:
        self._subscription.__enter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._subscription.__exit__(*error)

    def __aiter__(self) -> _AwaitableIterator:
        return _AwaitableIterator(self._subscription)  # type: ignore[arg-type]

    def messages(self) -> _AwaitableIterator:
        return _AwaitableIterator(self._subscription.messages())

    def batches(self) -> _AwaitableIterator:
        return _AwaitableIterator(self._subscription.batches())


class _AwaitableIterator:
    """Asynchronous iterator over a blocking loop."""

    def __init__(self, loop: Iterator[Any]) -> None:
        self._loop = loop

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self._loop)
        except StopIteration:
            raise StopAsyncIteration from None


def _make_awaitable(name: str, attribute: Any) -> Any:
    if name not in _BLOCKING_METHODS:
        return attribute

    async def call(*args: Any, **options: Any) -> Any:
        return attribute(*args, **options)

    return call


@asynccontextmanager
async def connect_awaitable(connecting: Any) -> AsyncIterator[AwaitableBus]:
    """Enter `connect_blocking` as an async context manager."""
    with connecting as bus:
        yield AwaitableBus(bus)
