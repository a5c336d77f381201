"""The blocking client under the verbs of the async one, so that one suite tests both.

Rule 1: nothing is added: what is awaited here has happened when the call returns.
Rule 2: what the async client does by itself in the background, this one does when it is told, by
`serving` and by looking: see `Awaited.until`.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

from simplebus.client.blocking.bus import BlockingBus
from simplebus.client.blocking.subscription import BlockingBaseSubscription

_VERBS = {
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
_LOOK_SECONDS = 0.005


class AwaitedBus:
    """A blocking bus whose verbs are awaited."""

    def __init__(self, bus: BlockingBus) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return _awaited(name, getattr(self._bus, name))

    def subscribe(self, *what: Any, **options: Any) -> AwaitedSubscription:
        return AwaitedSubscription(self._bus.subscribe(*what, **options))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Have handlers called until it holds."""
        while not condition():
            self._bus.run(_LOOK_SECONDS)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Have handlers called in a thread, to which the bus belongs in this block."""
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                self._bus.run(_LOOK_SECONDS)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


class AwaitedSubscription:
    """A blocking subscription that is entered, iterated and asked asynchronously."""

    def __init__(self, subscription: BlockingBaseSubscription[Any]) -> None:
        self._subscription = subscription

    def __getattr__(self, name: str) -> Any:
        return _awaited(name, getattr(self._subscription, name))

    async def __aenter__(self) -> Self:
        self._subscription.__enter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._subscription.__exit__(*error)

    def __aiter__(self) -> _Each:
        return _Each(self._subscription)  # type: ignore[arg-type]

    def messages(self) -> _Each:
        return _Each(self._subscription.messages())

    def batches(self) -> _Each:
        return _Each(self._subscription.batches())


class _Each:
    """A loop, asynchronously: what it was handed is processed when it asks for the next."""

    def __init__(self, loop: Iterator[Any]) -> None:
        self._loop = loop

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self._loop)
        except StopIteration:
            raise StopAsyncIteration from None


def _awaited(name: str, attribute: Any) -> Any:
    if name not in _VERBS:
        return attribute

    async def call(*args: Any, **options: Any) -> Any:
        return attribute(*args, **options)

    return call


@asynccontextmanager
async def awaited(connecting: Any) -> AsyncIterator[AwaitedBus]:
    """What `connect_blocking` gives, as an async block."""
    with connecting as bus:
        yield AwaitedBus(bus)
