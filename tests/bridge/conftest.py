"""Fixtures: a real nats-server per file (`nats`), and a bus per test (`server`)."""

from __future__ import annotations

import pytest

from tests.bridge.nats_copiers import fresh_bus_server, shared_nats_server

__all__ = ["fresh_bus_server", "shared_nats_server"]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit batches to about four messages, so that many are announced and in flight."""
    monkeypatch.setattr("simplebus.core.broker.fetch.FETCH_BYTES_MAX", 64)
    monkeypatch.setattr("simplebus.bridge.source.bus._PREFETCH_BYTES", 48)
