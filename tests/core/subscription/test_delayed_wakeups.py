"""One turn wakes a bounded number of targets, and the others are woken in later turns."""

from __future__ import annotations

import pytest

from simplebus.core.clock import BrokerClock
from simplebus.core.limits import SCAN_MESSAGES_MAX
from simplebus.core.subscription.delayed_wakeups import NEVER, DelayedWakeups


class CountedTarget:
    """Target with work for several wakeups, each of which scans `scanned_per_wakeup` messages."""

    def __init__(self, wakeup_count: int, *, scanned_per_wakeup: int, has_output: bool) -> None:
        self.scanned_count = 0
        self.woken_count = 0
        self._wakeup_count = wakeup_count
        self._scanned_per_wakeup = scanned_per_wakeup
        self._has_output = has_output

    @property
    def next_wakeup(self) -> float:
        return 1.0 if self.woken_count < self._wakeup_count else NEVER

    def handle_wakeup(self) -> bool:
        self.woken_count += 1
        self.scanned_count = self._scanned_per_wakeup
        return self._has_output


@pytest.mark.parametrize("has_output", [True, False])
def test_targets_are_woken_in_turn_until_enough_messages_are_scanned(has_output: bool) -> None:
    clock = BrokerClock()
    wakeups = DelayedWakeups(clock)
    targets = [
        CountedTarget(2, scanned_per_wakeup=SCAN_MESSAGES_MAX // 2, has_output=has_output)
        for _ in range(3)
    ]
    for target in targets:
        wakeups.schedule_wakeup(1.0, target)
    clock.now = 1.0
    woken_counts = []
    while wakeups.next_wakeup <= clock.now:
        yielded = list(wakeups.run_due_wakeups())
        assert len(yielded) == (2 if has_output else 0)
        woken_counts.append([target.woken_count for target in targets])
    assert woken_counts == [[1, 1, 0], [2, 1, 1], [2, 2, 2]]
    assert wakeups.next_wakeup == NEVER
    assert not wakeups
