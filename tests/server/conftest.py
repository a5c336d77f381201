"""Certificates for the server tests."""

from __future__ import annotations

import pytest

from tests.support.certificates import CertificateAuthority, CertificatePair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server_certificate(authority: CertificateAuthority) -> CertificatePair:
    return authority.issue("localhost")
