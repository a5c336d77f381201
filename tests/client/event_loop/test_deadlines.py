"""Tests of deadlines with one timer."""

from __future__ import annotations

import math

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.event_loop.deadlines import Deadline, Deadlines

TIMES = st.sampled_from([0.0, 1.0, 1.5, 2.0, 7.0, math.inf])


@given(st.data())
def test_expired_deadlines_are_called_once_in_order(data: st.DataObject) -> None:
    deadlines = Deadlines()
    called: list[int] = []
    pending: dict[int, tuple[float, Deadline]] = {}
    count, now = 0, 0.0
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from("aarx")):
            case "a":
                for _ in range(data.draw(st.sampled_from([1, 3, 100]))):
                    time = now + data.draw(TIMES)
                    pending[count] = (
                        time,
                        deadlines.add(time, lambda count=count: called.append(count)),
                    )
                    count += 1
            case "r":
                for key in list(pending)[: data.draw(st.integers(0, 200))]:
                    deadlines.remove(pending.pop(key)[1])
            case "x":
                now += data.draw(st.sampled_from([0.0, 0.5, 2.0]))
                next_time = deadlines.call_expired(now)
                expired = {key: time for key, (time, _) in pending.items() if time <= now}
                assert sorted(called) == sorted(expired)
                assert [expired[key] for key in called] == sorted(expired.values())
                for key in called:
                    deadlines.remove(pending.pop(key)[1])  # Does nothing.
                called.clear()
                assert next_time == min((time for time, _ in pending.values()), default=math.inf)
    deadlines.close()
    assert sorted(called) == sorted(pending)


async def test_run_calls_each_deadline_at_its_time(autojump_clock: trio.testing.MockClock) -> None:
    deadlines = Deadlines()
    start = trio.current_time()
    called: list[tuple[str, float]] = []

    def add(name: str, seconds: float) -> Deadline:
        return deadlines.add(
            trio.current_time() + seconds,
            lambda: called.append((name, trio.current_time() - start)),
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(deadlines.run)
        add("late", 5)
        await trio.sleep(1)
        add("earlier", 1)
        removed = add("removed", 0.5)
        deadlines.remove(removed)
        await trio.sleep(10)
        add("after a pause", 3)
        await trio.sleep(4)
        add("at the end", 100)
        deadlines.close()
    assert called == [
        ("earlier", 2.0),
        ("late", 5.0),
        ("after a pause", 14.0),
        ("at the end", 15.0),
    ]
