"""Fixture `bus`: a module bus that detects access to its state without its lock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simplebus.gateway import ModuleBus
from tests.gateway.recording_modules import lock_checking_bus


@pytest.fixture
def bus() -> Iterator[ModuleBus]:
    with lock_checking_bus() as bus:
        yield bus
