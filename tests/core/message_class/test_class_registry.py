"""Class registry: settings per class, resolution of ids and names, limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import Limits
from simplebus.core.message_class import class_registry
from simplebus.core.message_class.class_registry import ClassRegistry
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import ClassSettings, FullPolicy, Retention, Settings
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import connect_version2

LIMITS = Limits(
    frame_bytes=1000, class_messages=100, class_bytes=1 << 20, dead_letter_bytes=1 << 19
)


def create_registry(**own: ClassSettings) -> ClassRegistry:
    return ClassRegistry(Settings(limits=LIMITS, keep=Retention(messages=5), classes=own))


def test_applies_named_settings_once_class_is_named() -> None:
    classes = create_registry(
        logs=ClassSettings(Retention(seconds=9.0), FullPolicy.DROP_OLDEST, 7, 1 << 19)
    )
    classes.create_classes([(3, "")])
    cls = classes.classes[3]
    assert (cls.retention, cls.full_policy) == (Retention(messages=5), FullPolicy.BLOCK)
    assert (cls.ring.messages_max, cls.ring.bytes_max) == (100, 1 << 20)
    classes.create_classes([(3, "logs")])
    assert (cls.retention, cls.full_policy) == (Retention(seconds=9.0), FullPolicy.DROP_OLDEST)
    assert (cls.ring.messages_max, cls.ring.bytes_max) == (7, 1 << 19)


def test_settings_by_name_override_settings_by_id() -> None:
    classes = ClassRegistry(
        Settings(
            classes={
                3: ClassSettings(full_policy=FullPolicy.DROP_NEWEST),
                "logs": ClassSettings(full_policy=FullPolicy.DROP_OLDEST),
            }
        )
    )
    classes.create_classes([(3, ""), (4, "logs")])
    assert [classes.classes[n].full_policy for n in (3, 4)] == [
        FullPolicy.DROP_NEWEST,
        FullPolicy.DROP_OLDEST,
    ]
    second = create_registry(logs=ClassSettings(keep=Retention()))
    second.create_classes([(1, "logs"), (2, "news")])
    assert [bool(second.classes[n].retention) for n in (1, 2)] == [False, True]


def test_class_settings_cannot_exceed_global_limits() -> None:
    large_settings = ClassSettings(
        full_policy=FullPolicy.BLOCK, messages_max=1000, bytes_max=1 << 30
    )
    classes = create_registry(orders=large_settings, **{"dead.orders": large_settings})
    classes.create_classes([(1, "orders"), (2, "dead.orders")])
    orders, dead = classes.classes[1], classes.classes[2]
    assert (orders.ring.messages_max, orders.ring.bytes_max) == (100, 1 << 20)
    assert (dead.full_policy, dead.ring.bytes_max) == (FullPolicy.BLOCK, 1 << 19)


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, "one", "two", "three", NamedClass(id=4, name="one")])),
    st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from(["", "one", "two"]))),
)
def test_fast_resolve_of_known_classes_matches_full_resolve(
    references: list[int | str | NamedClass], existing_classes: list[tuple[int, str]]
) -> None:
    classes = create_registry()
    for class_id, name in existing_classes:
        if (
            classes.class_id_by_name.get(name, class_id) == class_id
            and class_id not in classes.classes
        ):
            classes.create_classes([(class_id, name)])
    found = classes._resolve_known(references)
    if found is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(classes, "_resolve_known", lambda references: None)
            assert classes.resolve_ids(references) == found
            resolved = classes.resolve_ids(classes.deduplicate(references))
        assert resolved == list(dict.fromkeys(found))


def test_deduplicate_rejects_more_references_than_possible_classes() -> None:
    classes = ClassRegistry(Settings(Limits(classes=3)))
    assert classes.deduplicate([1, "a", 1, "a", 2]) == [1, "a", 2]
    with pytest.raises(RemoteProtocolError) as caught:
        classes.deduplicate([*range(4), *"abc"])
    assert caught.value.reason is Reason.TOO_MANY_CLASSES
    classes.create_classes([(1, "a")])
    assert len(classes.deduplicate([*range(4), *"abc"])) == 7


def test_connect_that_repeats_a_class_names_it_once_and_reduces_read_size() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus)
    often = b'{"version":2,"classes":[' + b",".join([b"1"] * 32_000) + b"]}"
    peer.send(frames.encode(frames.CONNECT, message_id=6, content=b"{}"))
    peer.receive_replies()
    read_bytes_before = peer.session.next_read_bytes
    peer.send(frames.encode(frames.CONNECT, message_id=7, content=often))
    (answer,) = peer.receive_replies()
    assert (answer.kind, answer.message_id) == ("connect", 7)
    assert list(bus.broker.classes) == [1]
    assert peer.session.next_read_bytes < read_bytes_before


OWN_SETTINGS = st.dictionaries(
    st.sampled_from([1, 2, "orders", "dead.orders"]),
    st.sampled_from(
        [
            ClassSettings(),
            ClassSettings(keep=Retention(messages=3)),
            ClassSettings(full_policy=FullPolicy.DROP_OLDEST, messages_max=7),
            ClassSettings(full_policy=FullPolicy.BLOCK, bytes_max=1 << 19),
            ClassSettings(last_values=True),
            ClassSettings(last_values=False),
        ]
    ),
)
SETTINGS = st.builds(
    lambda own, keep, policy, limits: Settings(
        limits=limits, keep=keep, full_policy=policy, classes=own
    ),
    OWN_SETTINGS,
    st.sampled_from([Retention(), Retention(messages=5)]),
    st.sampled_from([FullPolicy.BLOCK, FullPolicy.DROP_NEWEST]),
    st.sampled_from([LIMITS, replace(LIMITS, class_messages=50), replace(LIMITS, connections=9)]),
)


@given(st.lists(SETTINGS, min_size=2, max_size=5))
def test_changed_settings_have_the_effect_of_new_ones(history: list[Settings]) -> None:
    references = [1, 2, 3, "orders", "dead.orders", NamedClass(name="values", last_values=True)]
    changed = ClassRegistry(history[0])
    changed.declare_classes(references)
    for settings in history[1:]:
        for _ in changed.apply_settings(settings):
            pass
    new = ClassRegistry(history[-1])
    new.declare_classes(references)
    effects = [
        {
            class_id: (
                cls.retention,
                cls.full_policy,
                cls.ring.messages_max,
                cls.ring.bytes_max,
                cls.has_last_values,
            )
            for class_id, cls in registry.classes.items()
        }
        for registry in (changed, new)
    ]
    assert effects[0] == effects[1]


class CountedSettings(dict[int | str, ClassSettings]):
    """Settings of classes that count how often they are looked up."""

    lookup_count = 0

    def get(self, key: int | str, default: Any = None) -> Any:
        self.lookup_count += 1
        return super().get(key, default)


def test_settings_of_one_class_are_applied_without_those_of_all_others() -> None:
    classes = ClassRegistry(Settings())
    classes.declare_classes(list(range(1000)))
    class_settings = CountedSettings({7: ClassSettings(messages_max=7)})
    for _ in classes.apply_settings(Settings(limits=Limits(connections=9), classes=class_settings)):
        pass
    assert classes.classes[7].ring.messages_max == 7
    assert class_settings.lookup_count <= 3


@pytest.mark.parametrize("has_own", [False, True])
def test_settings_of_many_classes_are_applied_in_portions(
    monkeypatch: pytest.MonkeyPatch, has_own: bool
) -> None:
    monkeypatch.setattr(class_registry, "EXAMINED_CLASSES_PER_TURN", 10)
    classes = ClassRegistry(Settings())
    classes.declare_classes(list(range(35)))
    settings = Settings(limits=Limits(class_messages=7))
    if has_own:
        settings = Settings(classes=dict.fromkeys(range(35), ClassSettings(messages_max=7)))
    changed_counts = []
    for _ in classes.apply_settings(settings):
        limits = [cls.ring.messages_max for cls in classes.classes.values()]
        changed_counts.append(limits.count(7))
    assert changed_counts == [10, 20, 30]
    assert {cls.ring.messages_max for cls in classes.classes.values()} == {7}
