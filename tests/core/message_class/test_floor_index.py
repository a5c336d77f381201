"""Floor index against a full scan, and the number of positions that it inspects."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from simplebus.core.limits import FLOOR_CORRECTIONS_MAX
from simplebus.core.message_class.floor_index import FloorIndex
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.subscription.position import Position


class CountingPosition:
    """Stand-in for a position that counts how often its window is inspected."""

    inspection_count = 0

    def __init__(self, floor: int) -> None:
        self._window = AckWindow(floor=floor)

    @property
    def window(self) -> AckWindow:
        CountingPosition.inspection_count += 1
        return self._window


def create_position(floor: int) -> Position:
    return cast(Any, CountingPosition(floor))


class FloorIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.floor_index = FloorIndex()
        self.positions: list[Position] = []

    @rule(floor=st.integers(0, 50))
    def add(self, floor: int) -> None:
        self.positions.append(create_position(floor))
        self.floor_index.add(self.positions[-1])

    @precondition(lambda self: self.positions)
    @rule(position_index=st.integers(0, 1000), by=st.integers(1, 20))
    def move(self, position_index: int, by: int) -> None:
        moved = self.positions[position_index % len(self.positions)]
        moved.window.floor += by

    @precondition(lambda self: self.positions)
    @rule(position_index=st.integers(0, 1000))
    def remove(self, position_index: int) -> None:
        self.floor_index.remove(self.positions.pop(position_index % len(self.positions)))

    @precondition(lambda self: self.positions)
    @invariant()
    def matches_full_scan(self) -> None:
        assert self.floor_index.lowest_floor() == min(p.window.floor for p in self.positions)


TestFloorIndex = FloorIndexMachine.TestCase


def test_lowest_floor_inspects_constant_number_of_positions_per_move() -> None:
    floor_index, positions = FloorIndex(), [create_position(0) for _ in range(1000)]
    for position in positions:
        floor_index.add(position)
    CountingPosition.inspection_count = 0
    for n in range(10):
        for position in positions:
            position.window.floor = n + 1
            floor_index.lowest_floor()
    assert floor_index.lowest_floor() == 10
    moves = 10 * len(positions)
    assert (
        CountingPosition.inspection_count <= moves + 2 * moves + 1
    )  # One access moves it, two correct its entry.


def test_removed_positions_leave_no_heap_entries() -> None:
    floor_index = FloorIndex()
    stays = create_position(0)
    floor_index.add(stays)
    for n in range(1000):
        removed = create_position(n)
        floor_index.add(removed)
        floor_index.remove(removed)
        assert len(floor_index) <= 66
    assert floor_index.lowest_floor() == 0


def test_one_call_corrects_few_of_very_many_floors() -> None:
    count = 3 * FLOOR_CORRECTIONS_MAX
    floor_index, positions = FloorIndex(), [create_position(0) for _ in range(count)]
    for position in positions:
        floor_index.add(position)
    for number, position in enumerate(positions, 1):
        position.window.floor = number
    results = []
    while not (results and floor_index.is_exact):
        CountingPosition.inspection_count = 0
        results.append((floor_index.lowest_floor(), floor_index.is_exact))
        assert CountingPosition.inspection_count <= FLOOR_CORRECTIONS_MAX
    assert results == [(0, False), (0, False), (1, False), (1, True)]
