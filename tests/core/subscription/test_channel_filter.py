"""Channel filters with interned channels, against patterns that are matched one by one."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.limits import COMPARED_CHANNELS_MAX, PATTERNS_PER_TURN
from simplebus.core.ring.columns import MessageRows
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring
from simplebus.core.subscription import channel_filter
from simplebus.core.subscription.channel_filter import ChannelFilter, ChannelTable
from simplebus.core.users.permissions import ClassPermissions, PermissionRule, PermissionRules
from tests.behaviour.wire_peer import BrokerHarness, build_batch
from tests.behaviour.wire_peer_v2 import (
    channel_envelope,
    connect_version2,
    publish_envelopes,
    subscribe,
)
from tests.core.channel.channel_oracle import is_match

NAMES = ["", "a", "b", "a.x", "a.y", "c", "d", "e", "f"]
SCOPES: list[tuple[tuple[PermissionRule, ...] | None, tuple[PermissionRule, ...]]] = [
    (None, ()),
    (None, (PermissionRule("1", "a.#"),)),
    ((PermissionRule("1", "#"),), (PermissionRule("1", "c"),)),
    ((PermissionRule("1", "a"), PermissionRule("1", "a.*")), ()),
]
PATTERNS = ["#", "a", "a.*", ">", "c", "*", "x.y"]


def create_ring(memory: int = 1 << 24) -> Ring:
    return Ring(class_id=1, messages_max=1 << 16, bytes_max=1 << 22, budget=MemoryBudget(memory))


def add_filter(
    table: ChannelTable, *patterns: str, scope: ClassPermissions | None = None
) -> ChannelFilter:
    filter_ = table.add_filter(patterns, scope)
    assert filter_ is not None
    return filter_


def store_messages(table: ChannelTable, ring: Ring, names: list[str]) -> None:
    """Append one message on each of these channels, as the store does."""
    found = table.intern_names(names)
    assert found is not None
    numbers = np.array(found, np.uint32)
    frames = [publish_envelopes(1, 0, b"\0")] * len(names)
    assert ring.append(build_batch(*frames), 0, MessageRows(len(names), numbers)) == len(names)
    ring.check()
    table.check_invariants()


steps = st.one_of(
    st.tuples(st.just("store"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=5)),
    st.tuples(st.just("want"), st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3)),
    st.tuples(st.just("see"), st.integers(0, 9)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("look"), st.integers(0, 5)),
    st.tuples(st.just("rest"), st.integers(0, 9)),
    st.tuples(st.just("index"), st.just(0)),
)


@given(
    script=st.lists(steps, max_size=30),
    most=st.sampled_from([3, 5, 1000]),
    indexed_at_once=st.sampled_from([0, 1, 16]),
    per_turn=st.integers(1, 3),
)
def test_filters_match_like_patterns(
    script: list[tuple[str, list[str] | int]], most: int, indexed_at_once: int, per_turn: int
) -> None:
    ring = create_ring()
    stored: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_filter, "CHANNEL_NAMES_MAX", most)
        patch.setattr(channel_filter, "FORGET_CHANNELS_MIN", 1)
        patch.setattr(channel_filter, "PATTERNS_INDEXED_AT_ONCE", indexed_at_once)
        patch.setattr(channel_filter, "PATTERNS_PER_TURN", per_turn)
        table = ChannelTable(ring)
        filters: list[ChannelFilter] = []
        for action, value in script:
            if isinstance(value, list):
                if action == "store":
                    store_messages(table, ring, value)
                    stored += value
                else:
                    filters.append(add_filter(table, *value))
            elif action == "see":
                scope = PermissionRules(*SCOPES[value % len(SCOPES)]).for_class(1, "")
                filters.append(add_filter(table, *["#"] * (value % 2), scope=scope))
            elif action == "drop" and filters:
                table.remove_filter(filters.pop(value % len(filters)))
            elif action == "rest":
                ring.free()
                assert table.shrink_idle(value) <= value
                table.check_invariants()
            elif action == "index":
                table.update_some_patterns()
            elif action == "release":
                ring.release(min(ring.head, ring.floor + value))
            elif filters and len(ring):
                check_filter(filters[value % len(filters)], ring, stored)
            table.check_invariants()
            for name in NAMES:
                found = table.find_filters(name)
                assert set(found) == {filter_ for filter_ in filters if has_match(filter_, name)}
        for filter_ in filters:
            if len(ring):
                check_filter(filter_, ring, stored)


def has_match(filter_: ChannelFilter, name: str) -> bool:
    return any(is_match(pattern, name) for pattern in filter_.watched_patterns)


def check_filter(filter_: ChannelFilter, ring: Ring, stored: list[str]) -> None:
    channels = ring.read_rows(ring.floor, ring.head).channels
    carried = stored[ring.floor : ring.head]
    expected = [
        any(is_match(pattern, name) for pattern in filter_.patterns or ["#"])
        and (filter_.scope is None or filter_.scope.is_allowed(name))
        for name in carried
    ]
    if filter_.is_match_all:
        assert all(expected)
    found = np.broadcast_to(filter_.match_numbers(channels), len(ring))
    assert found.tolist() == expected


def test_unused_channels_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_filter, "CHANNEL_NAMES_MAX", 10)
    monkeypatch.setattr(channel_filter, "FORGET_CHANNELS_MIN", 2)
    ring = create_ring()
    table = ChannelTable(ring)
    for number in range(100):
        store_messages(table, ring, [f"n{number}"])
        ring.release(max(0, ring.head - 3))
    assert len(table) <= 10


def test_filter_is_updated_once_for_many_new_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    updated = []
    add = ChannelFilter.add_channels

    def counted(self: ChannelFilter, numbers: list[int]) -> None:
        updated.append(self)
        add(self, numbers)

    monkeypatch.setattr(ChannelFilter, "add_channels", counted)
    ring = create_ring()
    table = ChannelTable(ring)
    beginnings = [".".join(steps) for steps in product("a*", repeat=8)]
    filters = [add_filter(table, *[f"{begin}.{end}" for begin in beginnings]) for end in "#>*"]
    small_filter = add_filter(table, "a.#", "*.b")
    while table.has_pattern_changes:
        table.update_some_patterns()
    names = [f"{'a.' * 8}{n}" for n in range(500)]
    store_messages(table, ring, [*names, *names, "", "x.b"])
    assert sorted(map(id, updated)) == sorted(map(id, [*filters, small_filter, small_filter]))
    for each in (*filters, small_filter):
        check_filter(each, ring, [*names, *names, "", "x.b"])


def test_reused_channel_number_matches_by_its_new_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_filter, "CHANNEL_NAMES_MAX", 2)
    ring = create_ring()
    table = ChannelTable(ring)
    before = add_filter(table, "a", "c")
    store_messages(table, ring, ["a"])
    later = add_filter(table, "a", "b")
    ring.release(1)
    store_messages(table, ring, ["b", "c"])
    assert table.intern_names(["a", "b", "c"]) is not None
    for filter_ in (before, later):
        check_filter(filter_, ring, ["a", "b", "c"])


def test_intern_fails_without_memory_until_channels_are_released() -> None:
    ring = create_ring(1 << 18)
    table = ChannelTable(ring)
    filter_ = add_filter(table, "n.*.#")
    name_count = 0
    while table.intern_names([f"n.{name_count}"]) is not None:
        store_messages(table, ring, [f"n.{name_count}"])
        name_count += 1
    assert 100 < name_count < 1500
    assert table.intern_names([f"n.{name_count - 1}", "", "n.0"]) is not None
    assert table.intern_names(["n.x"]) is None
    used = ring.budget.used_bytes
    ring.release(name_count - 3)
    assert table.intern_names(["n.x", "n.y"]) is not None
    table.check_invariants()
    assert ring.budget.used_bytes < used
    table.forget_unused(name_count)
    assert len(table) == 3
    names = [f"n.{number}" for number in range(name_count)]
    check_filter(filter_, ring, names)


def test_channel_without_stored_message_is_forgotten() -> None:
    ring = create_ring(1 << 20)
    table = ChannelTable(ring)
    for number in range(10_000):
        assert table.intern_names([f"{number}"]) is not None
    table.check_invariants()
    assert ring.budget.used_bytes == table.memory_bytes <= 1 << 20


def test_forgets_about_as_many_channels_as_new_ones_arrive() -> None:
    ring = create_ring()
    table = ChannelTable(ring)
    names = [f"n{number}" for number in range(40_000)]
    store_messages(table, ring, names[:20_000])
    store_messages(table, ring, names[20_000:])
    ring.release(ring.head)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "_name_count_max", 0)
        before = len(table)
        assert table.intern_names(["new"]) is not None
        assert before - len(table) == channel_filter.FORGET_CHANNELS_MIN - 1
        patch.setattr(table, "_name_count_max", 0)
        before = len(table)
        assert table.intern_names([f"new{number}" for number in range(5000)]) is not None
        assert before - len(table) == 5000
    table.check_invariants()


def test_idle_class_releases_channel_memory() -> None:
    ring = create_ring()
    table = ChannelTable(ring)
    filter_ = add_filter(table, "n.*")
    before = ring.budget.used_bytes
    store_messages(table, ring, [f"n.{number}" for number in range(1000)])
    check_filter(filter_, ring, [f"n.{number}" for number in range(1000)])
    assert not ring.tick()
    ring.release(ring.head)
    while not ring.tick():
        pass
    assert [table.shrink_idle(600) for _ in range(3)] == [600, 400, 0]
    assert table.shrink_idle(1) == 0
    assert ring.budget.used_bytes == before
    assert (len(table._name_by_number), ring.channel_counts.by_number.size) == (1, 1)
    store_messages(table, ring, ["n.1", "x", ""])
    check_filter(filter_, ring, [*[""] * 1000, "n.1", "x", ""])


def test_filter_memory_is_charged_and_returned() -> None:
    ring = create_ring()
    table = ChannelTable(ring)
    wide_filters = [add_filter(table, "#", f"a.{number}.*") for number in range(100)]
    patterns_bytes = ring.budget.used_bytes
    assert patterns_bytes > 100 * 2 * 2500
    assert table.intern_names([f"{number}" for number in range(1000)]) is not None
    table.check_invariants()
    assert sum(filter_._match_states.size for filter_ in wide_filters) <= table._capacity * 100
    assert ring.budget.used_bytes > patterns_bytes + 1000 * (256 + 100)
    for filter_ in wide_filters:
        table.remove_filter(filter_)
        table.check_invariants()
    ring.budget.limit_bytes = ring.budget.used_bytes + 1000
    assert table.add_filter(["a"]) is None
    table.check_invariants()


def test_filter_that_matches_all_channels_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_filter, "CHANNEL_NAMES_MAX", 3)
    monkeypatch.setattr(channel_filter, "FORGET_CHANNELS_MIN", 1)
    ring = create_ring()
    table = ChannelTable(ring)
    wide_filters = add_filter(table, "#")
    scoped = add_filter(
        table, scope=PermissionRules(deny=(PermissionRule("1", "secret.#"),)).for_class(1, "")
    )
    named = add_filter(table, ">")  # Does not match messages without a channel.
    store_messages(table, ring, ["a", "", "b.c"])
    assert not scoped.is_match_all  # Permissions are compared when the messages are delivered.
    check_filter(scoped, ring, ["a", "", "b.c"])
    assert [each.is_match_all for each in (wide_filters, scoped, named)] == [True, True, False]
    store_messages(table, ring, ["secret.x"])
    assert [each.is_match_all for each in (wide_filters, scoped)] == [True, False]
    late = add_filter(table, "#")
    assert not late.is_match_all  # The new filter has not evaluated these channels yet.
    check_filter(late, ring, ["a", "", "b.c", "secret.x"])
    assert late.is_match_all
    ring.release(ring.head)
    store_messages(table, ring, ["d", "e", "f"])  # The other channels are forgotten.
    check_filter(scoped, ring, ["a", "", "b.c", "secret.x", "d", "e", "f"])
    assert table.count_stored("secret.x") == 0
    assert [each.is_match_all for each in (wide_filters, scoped, late)] == [True, True, True]


@pytest.mark.parametrize("patterns", [["site.*.power"], ["site.7.*", "other.#"]])
@pytest.mark.parametrize("is_group", [False, True])
def test_one_turn_compares_few_channels_with_patterns(
    patterns: list[str], is_group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared_count, has_pattern = 0, ChannelFilter.has_pattern

    def counted(self: ChannelFilter, name: str) -> bool:
        nonlocal compared_count
        compared_count += 1
        return has_pattern(self, name)

    bus = BrokerHarness()
    bus.skips_checks = True
    contents = [channel_envelope(f"site.{n}.power", b"x") for n in range(5000)]
    connect_version2(bus, publish_envelopes(1, 0, *contents), classes=[1])
    monkeypatch.setattr(ChannelFilter, "has_pattern", counted)
    options: dict[str, object] = {"max_in_flight": 10_000}
    if is_group:
        options["group"] = "g"
    peer = connect_version2(
        bus, subscribe(1, 1, channels=patterns, start="earliest", **options), classes=[1]
    )
    outbox, counts, sent_count = peer.session.outbox, [compared_count], 0
    while not outbox.is_idle or bus.broker.next_wakeup <= bus.broker.clock.now:
        bus.broker.run_due_wakeups()
        data = bytes(outbox.peek(0))
        outbox.mark_sent(len(data), 0)
        sent_count += data.count(b"power")
        counts.append(compared_count)
    assert max(after - before for before, after in pairwise(counts)) <= 2 * COMPARED_CHANNELS_MAX
    assert compared_count >= 5000
    assert sent_count == (5000 if patterns == ["site.*.power"] else 1)
    bus.broker.check_invariants()


def test_permissions_of_new_channels_are_compared_in_turns() -> None:
    rules = tuple(PermissionRule("1", f"secret.{n}") for n in range(60))
    ring = create_ring()
    table = ChannelTable(ring)
    scoped = add_filter(table, scope=PermissionRules(deny=rules).for_class(1, ""))
    store_messages(table, ring, [f"secret.{n}" for n in range(100)])
    channels = ring.read_channels(0, 100)
    assert isinstance(channels, np.ndarray)
    channel_cost = 1 + 60 // 6  # The patterns, and 60 rules of which six cost as much.
    limit = COMPARED_CHANNELS_MAX // channel_cost
    assert scoped.find_known_end(channels) == (limit, COMPARED_CHANNELS_MAX)
    scoped.match_numbers(channels[:limit])
    assert scoped.find_known_end(channels[: limit + 1]) == (limit + 1, channel_cost)
    check_filter(scoped, ring, [f"secret.{n}" for n in range(100)])


@given(st.lists(st.integers(0, 5), min_size=1), st.sets(st.integers(0, 5)))
def test_known_end_is_before_the_first_channel_too_many(
    channels: list[int], compared: set[int]
) -> None:
    table = ChannelTable(create_ring())
    numbers = table.intern_names([f"c{n}" for n in range(6)])
    assert numbers is not None
    filter_ = add_filter(table, "c1")
    for n in compared:
        filter_.is_match(numbers[n])
    new_indexes = [index for index, n in enumerate(channels) if n not in compared]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_filter, "COMPARED_CHANNELS_MAX", 2)
        found = filter_.find_known_end(np.array([numbers[n] for n in channels], np.uint32))
    if len(new_indexes) > 2:
        assert found == (new_indexes[2], 2)
    else:
        assert found == (len(channels), len(new_indexes))


def test_indexed_patterns_count_as_compared_channels() -> None:
    table = ChannelTable(create_ring())
    numbers = table.intern_names([f"c{n}" for n in range(COMPARED_CHANNELS_MAX)])
    assert numbers is not None
    filter_ = add_filter(table, *(f"*.{n}" for n in range(PATTERNS_PER_TURN + 40)))
    channels = np.array(numbers, np.uint32)
    assert filter_.find_known_end(channels) == (1, COMPARED_CHANNELS_MAX)
    expected = COMPARED_CHANNELS_MAX - 80
    assert filter_.find_known_end(channels) == (expected, COMPARED_CHANNELS_MAX)
    assert filter_.find_known_end(channels) == (len(numbers), len(numbers))


@given(
    st.lists(st.sampled_from(["a.b", "a.*", "*.b", "b.#", "a.>", "c"]), max_size=6, unique=True),
    st.lists(st.sampled_from(["a", "b", "a.b", "b.b", "a.c", "c", "c.c"]), min_size=1, max_size=8),
)
def test_pattern_matches_while_some_patterns_are_not_indexed(
    patterns: list[str], names: list[str]
) -> None:
    filter_ = add_filter(ChannelTable(create_ring()), *patterns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_filter, "PATTERNS_PER_TURN", 1)
        for name in names:
            expected = not patterns or any(is_match(pattern, name) for pattern in patterns)
            assert filter_.has_pattern(name) == expected
