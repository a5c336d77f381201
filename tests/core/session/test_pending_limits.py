"""Selection of the sessions to close because too many bytes are held for all together."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.session import pending_limits
from simplebus.core.session.pending_limits import select_sessions_to_close
from simplebus.core.session.session import Session


def create_session(session_id: int, pending_bytes: int) -> Session:
    session = Session(session_id, frame_bytes_max=1000, known_classes={}, peer="test")
    session.unprocessed.put_back([memoryview(bytes(pending_bytes))])
    return session


def select_by_sorting(sizes: list[int], total_bytes_max: int) -> list[int]:
    """Return the indexes of the largest sizes without which the others do not exceed the total."""
    selected: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda each: (-sizes[each], each)):
        if sum(sizes) - sum(sizes[each] for each in selected) <= total_bytes_max:
            break
        selected.append(index)
    return selected


@given(sizes=st.lists(st.integers(0, 20), max_size=20), total_bytes_max=st.integers(0, 200))
def test_the_largest_sessions_are_selected_in_parts(sizes: list[int], total_bytes_max: int) -> None:
    sessions = [create_session(number, size) for number, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending_limits, "COUNTED_SESSIONS_PER_TURN", 4)
        patch.setattr(pending_limits, "CLOSED_SESSIONS_PER_TURN", 3)
        parts = list(select_sessions_to_close(sessions, total_bytes_max))
    assert all(len(part) <= 3 for part in parts)
    selected = [session.session_id for session, _ in chain.from_iterable(parts)]
    assert selected == select_by_sorting(sizes, total_bytes_max)


def test_sessions_that_were_closed_between_the_parts_are_not_selected() -> None:
    sessions = [create_session(number, 10) for number in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending_limits, "CLOSED_SESSIONS_PER_TURN", 1)
        parts = select_sessions_to_close(sessions, 0)
        ((first, _),) = next(parts)
        sessions[1].close()
        rest = [session for session, _ in chain.from_iterable(parts)]
    assert [first, *rest] == [sessions[0], sessions[2]]
