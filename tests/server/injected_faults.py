"""Faults that tests cause inside the server."""

from __future__ import annotations

import pytest


def raise_on_received(
    monkeypatch: pytest.MonkeyPatch, protocol: type, trigger: bytes, error: BaseException
) -> None:
    """Make `protocol.receive` raise `error` when the received bytes contain `trigger`."""
    receive = protocol.receive

    def faulty_receive(self, session, buffer, count):  # type: ignore[no-untyped-def]
        if trigger in bytes(buffer.writable[:count]):
            raise error
        receive(self, session, buffer, count)

    monkeypatch.setattr(protocol, "receive", faulty_receive)
