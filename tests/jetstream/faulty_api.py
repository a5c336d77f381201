"""JetStream API whose answers are delayed, refused or lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from simplebus.core.errors import BusConnectionError
from simplebus.net.nats_connection import NatsConnection

Meddler = Callable[[str], BaseException | None]
"""Called with the subject of each request; may raise an error instead of a reply."""


@contextmanager
def asked_in_vain(link: NatsConnection, meddle: Meddler) -> Iterator[Counter[str]]:
    """Yields how often something was asked in vain, by its first two words."""
    ask, failed = link.api_request, Counter[str]()

    async def meddled(subject: str, *more: Any, **options: Any) -> dict[str, Any]:
        error = meddle(subject)
        if error is not None:
            failed[".".join(subject.split(".")[:2])] += 1
            raise error
        return await ask(subject, *more, **options)

    link.api_request = meddled  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        link.api_request = ask  # type: ignore[method-assign]


@contextmanager
def answers_lost(link: NatsConnection, begin: str, count: int = 1) -> Iterator[Counter[str]]:
    """Lose the first `count` replies to requests whose subject has this prefix."""
    ask, lost = link.api_request, Counter[str]()

    async def meddled(subject: str, *more: Any, **options: Any) -> dict[str, Any]:
        found = await ask(subject, *more, **options)
        if subject.startswith(begin) and lost[begin] < count:
            lost[begin] += 1
            raise BusConnectionError(f"the answer to {subject} was lost")
        return found

    link.api_request = meddled  # type: ignore[method-assign]
    try:
        yield lost
    finally:
        link.api_request = ask  # type: ignore[method-assign]
