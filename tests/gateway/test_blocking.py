"""Detection of deadlocks: no two waiters wait for each other, directly or through others."""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import copy_context

from hypothesis import given
from hypothesis import strategies as st

from simplebus.gateway.blocking import CallbackWaiter, can_wait_for, current_callback

WAITERS = st.integers(0, 4)


def wait(stack: ExitStack, waiter: CallbackWaiter | None, awaited: list[CallbackWaiter]) -> bool:
    """Begin to wait as `me` until the stack is left. Returns True if waiting is allowed."""

    def enter() -> bool:
        current_callback.set(waiter)
        return stack.enter_context(can_wait_for(awaited))

    return copy_context().run(enter)


def test_no_waiting_cycles() -> None:
    a, b, c = CallbackWaiter(), CallbackWaiter(), CallbackWaiter()
    with ExitStack() as stack:
        assert wait(stack, a, [b])
        assert wait(stack, b, [c])
        assert not wait(stack, c, [a])
        assert not wait(stack, b, [b])
        assert wait(stack, None, [a, b, c])
    with ExitStack() as stack:
        assert wait(stack, c, [a]), "waiters are left"


@given(st.lists(st.tuples(WAITERS, st.lists(WAITERS, min_size=1, max_size=3)), max_size=12))
def test_some_waiter_can_always_proceed(steps: list[tuple[int, list[int]]]) -> None:
    """Remove waiters that wait for no other, one by one, until none is left."""
    waiters = [CallbackWaiter() for _ in range(5)]
    granted: dict[int, set[int]] = {}
    with ExitStack() as stack:
        for waiter, awaited in steps:
            if wait(stack, waiters[waiter], [waiters[name] for name in awaited]):
                granted.setdefault(waiter, set()).update(awaited)
            else:
                seen, pending = set(), set(awaited)
                while pending:
                    seen |= pending
                    pending = set().union(*(granted.get(each, set()) for each in pending)) - seen
                assert waiter in seen, "waiting would not have deadlocked"
        remaining = set(granted)
        while free := {each for each in remaining if not granted[each] & remaining}:
            remaining -= free
        assert not remaining
