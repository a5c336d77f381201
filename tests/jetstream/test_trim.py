"""Removal of acknowledged messages, with retries."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from simplebus.jetstream.trim import StreamTrimmer
from simplebus.nats.client.jetstream_codec import JetStreamError


class ConsumerManager:
    """Consumer manager whose `trim` can be made to fail."""

    error: JetStreamError | None = None

    async def trim(self, class_id: int) -> dict[str, int]:
        if self.error is not None:
            raise self.error
        return {}

    def feeds_of_class(self, class_id: int) -> list[Any]:
        return []


async def test_logs_failed_trim_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    manager: Any = ConsumerManager()
    unused: Any = None
    trimming = StreamTrimmer(unused, {}, manager, unused, manager)
    for turn in range(2):
        manager.error = JetStreamError(10008, "temporarily unavailable")
        for _ in range(20):
            trimming.classes_to_trim.add(7)
            await trimming.trim_now(7)
        assert caplog.text.count("cannot remove acknowledged messages of class 7") == turn + 1
        assert trimming.classes_to_trim == {7}
        manager.error = None
        await trimming.trim_now(7)
