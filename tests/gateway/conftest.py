"""A bus that finds out who touches it without its lock, for all that need no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simplebus.gateway import ModuleBus
from tests.gateway.recording_modules import guarded_bus


@pytest.fixture
def bus() -> Iterator[ModuleBus]:
    with guarded_bus() as bus:
        yield bus
