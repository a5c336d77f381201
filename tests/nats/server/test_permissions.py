"""Subject permissions: publishing, subscribing, delivery filters and responses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.channel.pattern import matches
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.users.permissions import Grants, Permissions
from simplebus.core.users.subject_permissions import ResponsePermission, SubjectPermissions
from simplebus.nats import subjects
from simplebus.nats.class_requests import make_class_request
from simplebus.nats.limits import (
    CACHED_PERMISSIONS_MAX,
    DECISION_STEP_COST_BYTES,
    OPEN_REPLIES_MAX,
    SUBJECTS_MAX,
)
from simplebus.nats.protocol.events import MixedBatch
from simplebus.nats.protocol.subject_table import SubjectTable
from simplebus.nats.server.class_permissions import ClassSubjectGrants, SubjectClasses
from simplebus.nats.server.permissions import OpenReplies, PermissionCache, SubjectGrants
from tests.nats.bus.two_listeners import NatsBrokerHarness
from tests.nats.protocol.numbered_subjects import numbered

WORDS = st.sampled_from(["a", "b", "c", "*", ">"])
SUBJECTS = (
    st.lists(WORDS, min_size=1, max_size=3)
    .map(".".join)
    .filter(lambda text: subjects.is_legal(text.encode()))
)
NAMES = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4).map(".".join)


def grants(**lists: tuple[str, ...] | None) -> SubjectGrants:
    return SubjectGrants(SubjectPermissions(**lists), SubjectTable())  # type: ignore[arg-type]


ALLOWED = st.none() | st.lists(SUBJECTS, max_size=3).map(tuple)


@given(ALLOWED, st.lists(SUBJECTS, max_size=3), NAMES)
def test_publish_requires_allow_and_no_deny(
    allow: tuple[str, ...] | None, deny: list[str], name: str
) -> None:
    may = grants(publish_allow=allow, publish_deny=tuple(deny)).publish_cache
    allowed = allow is None or any(matches(pattern, name) for pattern in allow)
    denied = any(matches(pattern, name) for pattern in deny)
    assert may.get(name.encode()) == (allowed and not denied)


@given(ALLOWED, st.lists(SUBJECTS, max_size=3), SUBJECTS, NAMES)
def test_delivered_subjects_are_allowed_and_not_denied(
    allow: tuple[str, ...] | None, deny: list[str], subject: str, name: str
) -> None:
    granted = grants(subscribe_allow=allow, subscribe_deny=tuple(deny))
    if not granted.can_subscribe(subject.encode(), b"") or not matches(subject, name):
        return
    held_back = granted.delivery_filter(subject.encode(), b"")
    if held_back is None or not held_back.get(name.encode()):
        assert allow is None or any(matches(pattern, name) for pattern in allow)
        assert not any(matches(pattern, name) for pattern in deny)


def test_empty_allow_list_allows_nothing() -> None:
    nothing_allowed = grants(publish_allow=(), subscribe_allow=())
    assert not nothing_allowed.publish_cache.get(b"a")
    assert not nothing_allowed.can_subscribe(b"a", b"")


def test_subscription_wider_than_the_allow_pattern_is_denied() -> None:
    one_word = grants(subscribe_allow=("foo.*",))
    assert one_word.can_subscribe(b"foo.*", b"")
    assert not one_word.can_subscribe(b"foo.>", b"")
    assert not grants(subscribe_allow=("*",)).can_subscribe(b">", b"")
    assert grants(subscribe_allow=("foo.>",)).can_subscribe(b"foo.*.>", b"")


def test_subscription_without_denied_subjects_is_not_filtered() -> None:
    granted = grants(subscribe_deny=("a.x", "b.>"))
    assert granted.delivery_filter(b"a.y", b"") is None
    assert granted.delivery_filter(b"c.>", b"") is None
    held_back = granted.delivery_filter(b"*.x", b"")
    assert held_back is not None
    assert held_back.get(b"a.x")
    assert not held_back.get(b"c.x")
    assert granted.delivery_filter(b"*.x", b"g") is held_back


def test_queue_patterns_apply_to_group_members_only() -> None:
    granted = grants(subscribe_allow=("a.* g.*", "b"), subscribe_deny=("a.x g.1",))
    assert granted.can_subscribe(b"a.y", b"g.1")
    assert not granted.can_subscribe(b"a.x", b"g.1")
    assert granted.can_subscribe(b"a.x", b"g.2")
    assert not granted.can_subscribe(b"a.>", b"g.2")
    assert not granted.can_subscribe(b"a.y", b"h")
    assert not granted.can_subscribe(b"a.y", b"")
    assert granted.can_subscribe(b"b", b"h")
    held_back = granted.delivery_filter(b"a.*", b"g.1")
    assert held_back is not None
    assert held_back.get(b"a.x")
    assert granted.delivery_filter(b"a.*", b"g.2") is None


def test_hash_in_a_permission_is_literal() -> None:
    may = grants(publish_allow=("a.#",)).publish_cache
    assert may.get(b"a.#")
    assert not may.get(b"a.b")
    assert not may.get(b"a")


def test_decisions_by_number_equal_decisions_by_name() -> None:
    table = SubjectTable()
    verdicts = PermissionCache(table, lambda name: name.endswith("1"))
    names = [b"a.%d" % n for n in range(30)]
    numbers = numbered(table, names)
    expected = [name.endswith(b"1") for name in names]
    assert verdicts.get_many(numbers).tolist() == expected
    assert verdicts.get_many(numbers[::-1]).tolist() == expected[::-1]
    assert [verdicts.get(name) for name in names] == expected
    assert [verdicts.decide(name) for name in names] == expected
    assert [verdicts.decide(b"b.%d" % n) for n in range(2)] == [False, True]


def test_messages_whose_permissions_must_be_decided_are_counted() -> None:
    table = SubjectTable()
    numbers = numbered(table, [b"a.%d" % number for number in range(10)])
    cache = PermissionCache(table, lambda subject: True)
    assert cache.count_until_decided(numbers, 3) == 3
    cache.get_many(numbers[:6:2])
    assert cache.count_until_decided(numbers, 3) == 6
    cache.get_many(numbers)
    assert cache.count_until_decided(numbers, 3) == 10


def mixed_batch(table: SubjectTable, names: tuple[bytes, ...]) -> MixedBatch:
    """Return a batch that has these names and their numbers, without messages."""
    numbers = numbered(table, list(names))
    return MixedBatch(
        data=np.zeros(0, np.uint8),
        bounds=np.zeros(1, np.int64),
        subject_ends=np.zeros(0, np.int64),
        body_starts=np.zeros(0, np.int64),
        subject_numbers=numbers,
        subject_names=names,
        table_numbers=numbers,
        table_generation=table.generation,
    )


@pytest.mark.parametrize("is_from_class", [False, True])
def test_estimated_cost_counts_uncached_decisions(is_from_class: bool) -> None:
    table, costs, classes = SubjectTable(), list[int](), SubjectClasses()
    granted = ClassSubjectGrants(None, table, Grants(Permissions()), classes, costs.append)
    cache = granted.delivery_filter(b">", b"")
    assert cache is not None
    batch = mixed_batch(table, tuple(b"a.%d" % n for n in range(20)))
    names = batch.subject_names or ()
    for name in names[:5]:
        cache.get(name)
    if is_from_class:  # Decisions about its messages are cached separately.
        broker = NatsBrokerHarness().broker
        ((class_id, _),) = broker.store.class_registry.declare_classes([NamedClass(name="orders")])
        classes.source_class = broker.classes[class_id]
        cache.get(b"a.0")
    for undecided_count in (19 if is_from_class else 15, 0):
        costs.clear()
        estimated_bytes = cache.estimate_cost(batch)
        cache.get_all(names)
        assert estimated_bytes == sum(costs) == undecided_count * cache.decision_cost_bytes


@pytest.mark.parametrize("is_cleared", [False, True])
def test_decisions_in_steps_equal_other_decisions(is_cleared: bool) -> None:
    table, costs = SubjectTable(), list[int]()
    cache = PermissionCache(table, lambda name: name.endswith("1"), costs.append)
    names = tuple(b"a.%d" % n for n in range(300))
    batch = mixed_batch(table, names)
    numbers = batch.subject_numbers
    cache.get_many(numbers[:50])
    step_costs = []
    costs.clear()
    for _ in cache.decide_in_steps(batch):
        step_costs.append(sum(costs))
        costs.clear()
        if is_cleared and len(step_costs) == 2:
            table.reserve(SUBJECTS_MAX)
            other_numbers = numbered(table, [b"b.%d" % (n + 1) for n in range(300)])
    assert max(step_costs) <= DECISION_STEP_COST_BYTES
    assert sum(step_costs) == 250 * cache.decision_cost_bytes
    expected = [name.endswith(b"1") for name in names]
    assert cache.get_all(names).tolist() == expected
    assert not costs
    if is_cleared:
        assert cache.get_many(other_numbers).tolist() == [*expected[1:], False]
    else:
        assert cache.get_many(numbers).tolist() == expected
        assert not costs


def test_permission_cache_is_bounded() -> None:
    checked = []
    verdicts = PermissionCache(SubjectTable(), lambda name: not checked.append(name))
    for n in range(CACHED_PERMISSIONS_MAX + 1):
        assert verdicts.get(b"%d" % n)
    assert verdicts.get(b"0")
    assert len(checked) == CACHED_PERMISSIONS_MAX + 2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_responses_are_limited_in_count_and_time() -> None:
    clock = Clock()
    replies = OpenReplies(ResponsePermission(max_responses=2, expires_seconds=10), clock)
    assert not replies.use_reply(b"in.1")
    replies.add(b"in.1")
    assert [replies.use_reply(b"in.1") for _ in range(3)] == [True, True, False]
    replies.add(b"in.1")
    clock.now = 10.0
    assert replies.use_reply(b"in.1")
    clock.now = 10.1
    assert not replies.use_reply(b"in.1")
    assert len(replies) == 0


def test_responses_can_be_unlimited() -> None:
    clock = Clock()
    replies = OpenReplies(ResponsePermission(max_responses=-1, expires_seconds=-1), clock)
    replies.add(b"in.1")
    clock.now = 1e9
    assert all(replies.use_reply(b"in.1") for _ in range(100))


def test_open_replies_are_bounded_and_expire() -> None:
    clock = Clock()
    replies = OpenReplies(ResponsePermission(expires_seconds=10), clock)
    for n in range(OPEN_REPLIES_MAX + 5):
        replies.add(b"%d" % n)
    assert len(replies) == OPEN_REPLIES_MAX
    assert not replies.use_reply(b"0")
    assert replies.use_reply(b"%d" % OPEN_REPLIES_MAX)
    clock.now = 11.0
    replies.add(b"x")
    assert len(replies) == 1


def test_repeated_request_renews_the_response_permission() -> None:
    replies = OpenReplies(ResponsePermission(), Clock())
    for n in range(OPEN_REPLIES_MAX - 1):
        replies.add(b"%d" % n)
    for reply in (b"0", b"x", b"y"):
        replies.add(reply)
    assert replies.use_reply(b"0")
    assert not replies.use_reply(b"1")


def test_response_permission_denies_other_subjects() -> None:
    granted = SubjectGrants(SubjectPermissions(responses=ResponsePermission()), SubjectTable())
    assert not granted.publish_cache.get(b"a")
    assert SubjectGrants(SubjectPermissions(), SubjectTable()).publish_cache.get(b"a")


@pytest.mark.parametrize(
    ("lists", "expected_error"),
    [
        (
            {"publish_allow": ("a..b",)},
            "publish_allow: 'a..b' is not a pattern, expected a subject",
        ),
        ({"publish_deny": ("a q",)}, "publish_deny: 'a q' is not a pattern, expected a subject"),
        ({"subscribe_allow": ("a b c",)}, "expected a subject, or a subject and a queue"),
        ({"subscribe_deny": ("",)}, "subscribe_deny: '' is not a pattern"),
        ({"subscribe_deny": ("a.>.b",)}, "subscribe_deny: 'a.>.b' is not a pattern"),
    ],
)
def test_illegal_pattern_is_named_in_the_error(
    lists: dict[str, tuple[str, ...]], expected_error: str
) -> None:
    with pytest.raises(ValueError, match=expected_error.replace(".", r"\.")):
        SubjectPermissions(**lists)  # type: ignore[arg-type]


def test_restricted_user_needs_an_allow_pattern_for_classes() -> None:
    def may_ask(granted: SubjectGrants, name: str, *suffix: str, queue: bytes = b"") -> bool:
        return granted.can_request_class(make_class_request([name], (), suffix), queue)

    assert may_ask(grants(publish_deny=("a",)), "orders")
    assert not may_ask(grants(subscribe_deny=("secret.>",)), "orders")
    assert not may_ask(grants(subscribe_allow=(">",)), "orders")
    granted_classes = grants(subscribe_allow=("a", "$SB.SUB.orders", "$SB.SUB.bills.> g"))
    assert may_ask(granted_classes, "orders")
    assert may_ask(granted_classes, "orders", "-")
    assert not may_ask(granted_classes, "other")
    assert may_ask(granted_classes, "bills", "me", queue=b"g")
    assert not may_ask(granted_classes, "bills", "me", queue=b"h")
