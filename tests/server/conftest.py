"""Fixtures: certificates shared by the tests of a file."""

from __future__ import annotations

import pytest

from tests.support.certificates import Authority, Pair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def own(authority: Authority) -> Pair:
    return authority.issue("localhost")
