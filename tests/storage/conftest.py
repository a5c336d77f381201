"""Closes the buses that tests leave open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.storage.journaled_broker import end_all


@pytest.fixture(autouse=True)
def _what_is_left_ends() -> Iterator[None]:
    yield
    end_all()
