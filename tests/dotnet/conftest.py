"""Fixtures of the tests of C# programs."""

from __future__ import annotations

import pytest

from tests.dotnet.sdk import DotnetSdk


@pytest.fixture(scope="session")
def dotnet_sdk(tmp_path_factory: pytest.TempPathFactory) -> DotnetSdk:
    """.NET SDK with a build directory for this session."""
    return DotnetSdk(tmp_path_factory.mktemp("dotnet-sdk"))
