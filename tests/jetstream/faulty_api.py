"""JetStream API whose answers are delayed, refused or lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from simplebus.core.errors import BusConnectionError
from simplebus.net.nats_connection import NatsConnection

RequestHook = Callable[[str], BaseException | None]
"""Called with the subject of each request; may raise an error instead of a reply."""


@contextmanager
def failing_requests(link: NatsConnection, hook: RequestHook) -> Iterator[Counter[str]]:
    """Let `hook` fail requests. Yields the number of failed requests by their first two tokens."""
    api_request, failed = link.api_request, Counter[str]()

    async def api_request_with_faults(subject: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        error = hook(subject)
        if error is not None:
            failed[".".join(subject.split(".")[:2])] += 1
            raise error
        return await api_request(subject, *args, **kwargs)

    link.api_request = api_request_with_faults  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        link.api_request = api_request  # type: ignore[method-assign]


@contextmanager
def lost_replies(link: NatsConnection, prefix: str, count: int = 1) -> Iterator[Counter[str]]:
    """Lose the first `count` replies to requests whose subject has this prefix."""
    api_request, lost = link.api_request, Counter[str]()

    async def api_request_with_faults(subject: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = await api_request(subject, *args, **kwargs)
        if subject.startswith(prefix) and lost[prefix] < count:
            lost[prefix] += 1
            raise BusConnectionError(f"the reply to {subject} was lost")
        return found

    link.api_request = api_request_with_faults  # type: ignore[method-assign]
    try:
        yield lost
    finally:
        link.api_request = api_request  # type: ignore[method-assign]
