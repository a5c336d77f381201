"""The requirements table is complete: each requirement has a test with its id."""

from __future__ import annotations

from tests.gateway import test_srs_bus, test_srs_modules, test_srs_worker
from tests.gateway.requirements import ITEMS


def test_each_requirement_has_a_test() -> None:
    names = [
        name.removeprefix("test_")[:6]
        for file in (test_srs_bus, test_srs_modules, test_srs_worker)
        for name in vars(file)
        if name.startswith("test_")
    ]
    assert sorted(names) == sorted(ITEMS)
    assert len(ITEMS) == 65
