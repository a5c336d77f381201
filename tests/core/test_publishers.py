"""Who publishes under a name, and what is remembered of it."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import PUBLISHER_SECONDS, PUBLISHERS_AHEAD_MAX, PUBLISHERS_MAX
from simplebus.core.publishers import Publishers


def test_a_name_is_taken_over_by_the_same_program_alone() -> None:
    publishers = Publishers()
    publisher, former = publishers.claim("a", "i", 1)
    assert former is None
    assert publishers.claim("a", "i", 2) == (publisher, 1)
    for instance in ("j", ""):
        with pytest.raises(RemoteProtocolError) as caught:
            publishers.claim("a", instance, 3)
        assert caught.value.reason is Reason.NAME_IN_USE
    publishers.leave(publisher, 0.0)
    assert publishers.claim("a", "j", 4) == (publisher, None)


def test_who_is_there_is_not_forgotten() -> None:
    publishers = Publishers()
    publishers.claim("there", "", 1)
    gone, _ = publishers.claim("gone", "", 2)
    publishers.leave(gone, 0.0)
    publishers.forget(PUBLISHER_SECONDS - 1)
    assert len(publishers) == 2
    publishers.forget(PUBLISHER_SECONDS)
    assert publishers.claim("gone", "", 2)[0] is not gone
    assert len(publishers) == 2


def test_of_too_many_the_one_that_is_gone_longest_is_forgotten() -> None:
    publishers = Publishers()
    for number in range(PUBLISHERS_MAX + 3):
        publisher, _ = publishers.claim(f"{number}", "", number)
        publisher.next = 7
        publishers.leave(publisher, 0.0)
    publishers.forget(1.0)
    assert len(publishers) == PUBLISHERS_MAX
    assert [publishers.claim(f"{number}", "", 1)[0].next for number in (0, 2, 3)] == [0, 0, 7]


def test_numbers_that_are_ahead_are_not_remembered_without_end() -> None:
    publishers = Publishers()
    for number in range(9):
        publisher, _ = publishers.claim(f"{number}", "", number)
        publisher.ahead = set(range(PUBLISHERS_AHEAD_MAX // 4))
        publishers.leave(publisher, 0.0)
    assert len(publishers) == 4
