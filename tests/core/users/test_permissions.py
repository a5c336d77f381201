"""What users may do: rules, and a table by channel number that says the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.users.permissions import (
    Grants,
    Permissions,
    Right,
    Rule,
    Rules,
    Verdict,
    is_of_class,
)
from tests.core.channel.channel_oracle import is_match

SEGMENTS = st.sampled_from(["a", "b", "*"])
PATTERNS = st.builds(
    lambda segments, end: ".".join([*segments, *end]) or "#",
    st.lists(SEGMENTS, max_size=3),
    st.sampled_from([[], ["#"], [">"]]),
)
NAMES = st.lists(st.sampled_from("ab"), max_size=3).map(".".join)
RULES = st.lists(
    st.builds(Rule, st.sampled_from(["orders", "ord*", "*", "7", "8"]), PATTERNS | st.just("")),
    max_size=3,
).map(tuple)


def is_allowed(rules: Rules, class_id: int, name: str, channel: str) -> bool:
    """The obvious way."""

    def says(rule: Rule) -> bool:
        of = (
            rule.class_ == "*"
            or rule.class_ in (str(class_id), name)
            or (rule.class_.endswith("*") and name.startswith(rule.class_[:-1]))
        )
        return of and (not rule.channel or is_match(rule.channel, channel))

    if any(map(says, rules.deny)):
        return False
    return rules.allow is None or any(map(says, rules.allow))


@given(st.none() | RULES, RULES, st.sampled_from([(7, "orders"), (8, ""), (9, "other")]), st.data())
def test_a_scope_says_what_the_rules_say(
    allow: tuple[Rule, ...] | None,
    deny: tuple[Rule, ...],
    cls: tuple[int, str],
    data: st.DataObject,
) -> None:
    rules = Rules(allow, deny)
    scope = rules.scope(*cls)
    names = ["", *dict.fromkeys(data.draw(st.lists(NAMES.filter(bool), max_size=6)))]
    expected = [is_allowed(rules, *cls, name) for name in names]
    assert [scope.allows(name) for name in names] == expected
    numbers = np.array(data.draw(st.lists(st.integers(0, len(names) - 1), min_size=1)), np.uint32)
    for generation in (0, 1):
        found = scope.of(names, generation, numbers)
        assert found.tolist() == [expected[n] for n in numbers.tolist()]
    assert scope.of(names, 1, int(numbers[0])).tolist() == [expected[int(numbers[0])]]
    for generation in (1, 2):
        found = scope.allows_all(names, generation, numbers.tolist())
        assert found is all(expected[n] for n in numbers.tolist())
    if scope.verdict is not Verdict.SOME:
        assert set(expected) <= {scope.verdict is Verdict.ALL}
    for pattern in ("a.b", "#", "*.a"):
        if not scope.may_allow(pattern):
            assert not any(e and is_match(pattern, n) for e, n in zip(expected, names, strict=True))


def test_numbers_that_stand_for_other_channels_are_judged_anew() -> None:
    scope = Rules((Rule("*", "a"),)).scope(1, "")
    names = ["", "a", "b"]
    assert scope.of(names, 0, np.array([1, 2])).tolist() == [True, False]
    names[1], names[2] = "b", "a"
    assert scope.of(names, 1, np.array([1, 2])).tolist() == [False, True]
    assert not scope.allows_all(names, 1, [2, 1])
    names[1] = "a"
    assert scope.allows_all(names, 2, [2, 1])
    names[1] = "b"
    names += ["a"] * 100
    assert scope.allows_all(names, 3, [2, 102])
    assert scope.of(names, 1, np.array([1, 102])).tolist() == [False, True]


def test_a_class_is_meant_by_its_id_its_name_or_how_it_begins() -> None:
    assert is_of_class("7", 7, "")
    assert is_of_class("orders", 7, "orders")
    assert is_of_class("dead.*", 9, "dead.orders")
    assert not is_of_class("dead.*", 9, "deadly")
    assert not is_of_class("orders", 7, "orders2")
    assert not is_of_class("", 7, "")
    assert is_of_class("*", 0, "")
    assert not is_of_class("a.c", 0, "abc")


def test_rights_are_of_classes() -> None:
    grants = Grants(Permissions(admin=((Right.PURGE, "dead.*"), (Right.INQUIRE, "*"))))
    assert grants.has(Right.PURGE, 3, "dead.orders")
    assert not grants.has(Right.PURGE, 3, "orders")
    assert not grants.has(Right.PURGE)
    assert grants.has(Right.INQUIRE)
    assert not grants.has(Right.MONITOR)
    watching = Grants(Permissions(admin=((Right.MONITOR, "*"),)))
    assert watching.has(Right.INQUIRE)  # The pages show that, too.
    assert not watching.has(Right.PURGE)
    assert not grants.has(Right.FETCH, 3, "dead.orders")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("orders", Rule("orders")),
        (" orders  eu.# ", Rule("orders", "eu.#")),
        ("7 >", Rule("7", ">")),
    ],
)
def test_rules_are_written_as_a_class_and_a_pattern(text: str, rule: Rule) -> None:
    assert Rule.parse(text) == rule


@pytest.mark.parametrize("text", ["", " ", "orders a..b", "orders #.a", "a\nb", "orders a b"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"class|segment"):
        Rule.parse(text)


@pytest.mark.parametrize("text", ["#", ">", "eu.#", "eu.> eu.a"])
def test_channels_without_a_class_are_told_from_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"is a pattern of channels, expected a class: \* for all"):
        Rule.parse(text)
    with pytest.raises(ValueError, match="pattern of channels"):
        Permissions.parse_right(f"purge {text.split()[0]}")
    assert Rule.parse(f"* {text.split()[0]}").class_ == "*"
    for name in ("a#", "#.a", ">>"):
        assert Rule.parse(name) == Rule(name)


def test_what_is_no_right_is_refused() -> None:
    assert Permissions.parse_right("purge dead.*") == (Right.PURGE, "dead.*")
    assert Permissions.parse_right("inquire") == (Right.INQUIRE, "*")
    with pytest.raises(ValueError, match="'delete' is no right, expected one of inquire, purge"):
        Permissions.parse_right("delete orders")


def test_rules_are_bounded() -> None:
    with pytest.raises(ValueError, match="at most 1024"):
        Rules(tuple(Rule("a", f"b{n}") for n in range(1025)))
