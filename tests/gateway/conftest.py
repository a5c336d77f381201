"""A bus that finds out who touches it without its lock, for all that need no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.listening import guarded_bus
from simplebus.gateway import ModuleBus


@pytest.fixture
def bus() -> Iterator[ModuleBus]:
    with guarded_bus() as bus:
        yield bus
