"""Buses that tests leave behind have ended with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from storage.kept_bus import end_all


@pytest.fixture(autouse=True)
def _what_is_left_ends() -> Iterator[None]:
    yield
    end_all()
