"""Garbage collection excludes old objects, so that it never takes long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from simplebus.server import garbage_collection


class Node:
    """Object that may refer to itself."""

    def __init__(self) -> None:
        self.myself = self


@pytest.fixture(autouse=True)
def _restored_collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_old_objects_are_examined_in_rare_full_collections_only() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(garbage_collection.run)
            await trio.sleep(0.5)
            young = Node()
            young_reference = weakref.ref(young)
            del young
            old = Node()
            old_reference = weakref.ref(old)
            await trio.sleep(1)
            assert young_reference() is None
            del old
            await trio.sleep(10)
            assert old_reference() is not None
            assert gc.get_freeze_count() > 0
            await trio.sleep(3600)
            assert old_reference() is None
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
