"""Garbage collection excludes old objects, so that each collection is short."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from simplebus.server.runtime import garbage_collection


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


@pytest.mark.long
def test_old_objects_are_examined_in_rare_full_collections_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(garbage_collection.run)
            block_count = sys.getallocatedblocks()
            await trio.sleep(0.5)
            young = Node()
            young_reference = weakref.ref(young)
            del young
            old = Node()
            old_reference = weakref.ref(old)
            await trio.sleep(1)
            assert young_reference() is None
            del old
            await trio.sleep(2 * 3600)
            assert old_reference() is not None  # There are not many more objects than before.
            assert gc.get_freeze_count() > 0
            monkeypatch.setattr(sys, "getallocatedblocks", lambda: 9 * block_count)
            await trio.sleep(3600)
            assert old_reference() is None
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_collection_of_young_objects_examines_few() -> None:
    """The default of the middle generation is 10, so that a collection examines 7,700 objects."""

    async def main() -> tuple[int, int, int]:
        async with trio.open_nursery() as nursery:
            await nursery.start(garbage_collection.run)
            nursery.cancel_scope.cancel()
            return gc.get_threshold()

    young, middle, _ = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert young * (middle + 1) <= 3000


def test_container_that_took_long_to_examine_is_old_after_the_next_collection() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(garbage_collection.run)
            nodes = [Node() for _ in range(100_000)]
            gc.freeze()
            container = list(nodes)
            middle = Node()
            middle_reference = weakref.ref(middle)
            gc.collect(0)
            del middle
            young, *_ = gc.get_threshold()
            new_nodes = [Node() for _ in range(young + 1)]
            assert any(each is container for each in gc.get_objects(generation=2))
            assert middle_reference() is None
            assert gc.get_threshold()[1] > 0
            del new_nodes
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_young_objects_are_excluded_after_many_steps() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(garbage_collection.run)
            young, garbage = Node(), weakref.ref(Node())
            for _ in range(200):
                await trio.lowlevel.checkpoint()  # Takes no time.
            assert not any(each is young for each in gc.get_objects())
            assert garbage() is None
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock())
