"""Certificates and turns for the server tests."""

from __future__ import annotations

import pytest

from simplebus.nats import nats_server
from simplebus.nats.server import message_delivery
from tests.server.many_receivers import LaterTurns
from tests.support.certificates import CertificateAuthority, CertificatePair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server_certificate(authority: CertificateAuthority) -> CertificatePair:
    return authority.issue("localhost")


@pytest.fixture
def one_receiver_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each turn of a delivery to NATS clients end after the first receiver. PING and CONNECT
    end no turn.
    """
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 0)
    monkeypatch.setattr(nats_server, "PING_COST_BYTES", 0)
    monkeypatch.setattr(nats_server, "CONNECT_COST_BYTES", 0)


@pytest.fixture
def later_turns(monkeypatch: pytest.MonkeyPatch) -> LaterTurns:
    return LaterTurns(monkeypatch)
