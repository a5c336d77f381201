"""What one class does in its own way."""

from __future__ import annotations

from simplebus.core.class_table import ClassTable
from simplebus.core.limits import Limits
from simplebus.core.settings import ClassSettings, FullPolicy, Keep, Settings

LIMITS = Limits(
    frame_bytes=1000, class_messages=100, class_bytes=1 << 20, dead_letter_bytes=1 << 19
)


def table(**own: ClassSettings) -> ClassTable:
    return ClassTable(Settings(limits=LIMITS, keep=Keep(messages=5), classes=own))


def test_a_class_obeys_what_is_said_of_its_name_from_when_it_has_it() -> None:
    classes = table(logs=ClassSettings(Keep(seconds=9.0), FullPolicy.DROP_OLDEST, 7, 1 << 19))
    classes.open_classes([(3, "")])
    cls = classes.classes[3]
    assert (cls.keep, cls.policy) == (Keep(messages=5), FullPolicy.BLOCK)
    assert (cls.ring.messages_max, cls.ring.bytes_max) == (100, 1 << 20)
    classes.open_classes([(3, "logs")])
    assert (cls.keep, cls.policy) == (Keep(seconds=9.0), FullPolicy.DROP_OLDEST)
    assert (cls.ring.messages_max, cls.ring.bytes_max) == (7, 1 << 19)


def test_what_is_said_of_a_name_wins_over_what_is_said_of_an_id() -> None:
    classes = ClassTable(
        Settings(
            classes={
                3: ClassSettings(full_policy=FullPolicy.DROP_NEWEST),
                "logs": ClassSettings(full_policy=FullPolicy.DROP_OLDEST),
            }
        )
    )
    classes.open_classes([(3, ""), (4, "logs")])
    assert [classes.classes[n].policy for n in (3, 4)] == [
        FullPolicy.DROP_NEWEST,
        FullPolicy.DROP_OLDEST,
    ]
    other = table(logs=ClassSettings(keep=Keep()))
    other.open_classes([(1, "logs"), (2, "news")])
    assert [bool(other.classes[n].keep) for n in (1, 2)] == [False, True]


def test_no_class_holds_more_than_any_may_and_dead_letters_less() -> None:
    much = ClassSettings(full_policy=FullPolicy.BLOCK, messages_max=1000, bytes_max=1 << 30)
    classes = table(orders=much, **{"dead.orders": much})
    classes.open_classes([(1, "orders"), (2, "dead.orders")])
    orders, dead = classes.classes[1], classes.classes[2]
    assert (orders.ring.messages_max, orders.ring.bytes_max) == (100, 1 << 20)
    assert (dead.policy, dead.ring.bytes_max) == (FullPolicy.BLOCK, 1 << 19)
