"""`BlockingBus` with distributed tracing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from simplebus.client.blocking.bus import BlockingBus
from simplebus.client.blocking.connection import BlockingClientConnection
from simplebus.client.message_builder import PublishOptions
from simplebus.client.message_types import Registry
from simplebus.client.tracing.class_names import name_classes
from simplebus.client.tracing.handler_errors import TracedHandlerErrors
from simplebus.client.tracing.interface import Tracing


class TracedBlockingBus(BlockingBus):
    """`BlockingBus` that publishes the trace context in the headers of messages."""

    def __init__(
        self, connection: BlockingClientConnection, registry: Registry, tracing: Tracing
    ) -> None:
        super().__init__(connection, registry)
        self._spans = self.tracing = tracing
        self.failures = TracedHandlerErrors(tracing)

    def publish(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        confirm: bool = True,
        **about: Unpack[PublishOptions],
    ) -> None:
        name = name_classes(self._registry, (message,), class_id)
        with self._spans.publish(name, about.get("headers")) as about["headers"]:
            super().publish(message, class_id=class_id, confirm=confirm, **about)

    def publish_nowait(
        self, message: object, *, class_id: int | str | None = None, **about: Unpack[PublishOptions]
    ) -> int:
        name = name_classes(self._registry, (message,), class_id)
        with self._spans.publish(name, about.get("headers")) as about["headers"]:
            return super().publish_nowait(message, class_id=class_id, **about)

    def publish_many(
        self,
        messages: Iterable[object],
        *,
        class_id: int | str | None = None,
        confirm: bool = True,
        **about: Unpack[PublishOptions],
    ) -> None:
        messages = list(messages)
        name = name_classes(self._registry, messages, class_id)
        with self._spans.publish(name, about.get("headers"), message_count=len(messages)) as about[
            "headers"
        ]:
            super().publish_many(messages, class_id=class_id, confirm=confirm, **about)

    def request(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        timeout: float = 5.0,
        as_: Any = None,
        **about: Unpack[PublishOptions],
    ) -> Any:
        name = name_classes(self._registry, (message,), class_id)
        with self._spans.publish(name, about.get("headers"), operation="request") as headers:
            about["headers"] = headers
            return super().request(message, class_id=class_id, timeout=timeout, as_=as_, **about)
