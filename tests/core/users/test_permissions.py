"""Permission rules, and their cached results by channel number."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.users.permissions import (
    AdminRight,
    ClassAccess,
    Grants,
    PermissionRule,
    PermissionRules,
    Permissions,
    is_class_match,
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
    st.builds(
        PermissionRule, st.sampled_from(["orders", "ord*", "*", "7", "8"]), PATTERNS | st.just("")
    ),
    max_size=3,
).map(tuple)


def is_allowed(rules: PermissionRules, class_id: int, name: str, channel: str) -> bool:
    """Evaluate the rules directly."""

    def says(rule: PermissionRule) -> bool:
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
def test_class_permissions_equal_the_rules(
    allow: tuple[PermissionRule, ...] | None,
    deny: tuple[PermissionRule, ...],
    cls: tuple[int, str],
    data: st.DataObject,
) -> None:
    rules = PermissionRules(allow, deny)
    scope = rules.for_class(*cls)
    names = ["", *dict.fromkeys(data.draw(st.lists(NAMES.filter(bool), max_size=6)))]
    expected = [is_allowed(rules, *cls, name) for name in names]
    assert [scope.is_allowed(name) for name in names] == expected
    numbers = np.array(data.draw(st.lists(st.integers(0, len(names) - 1), min_size=1)), np.uint32)
    for generation in (0, 1):
        found = scope.allowed_flags(names, generation, numbers)
        assert found.tolist() == [expected[n] for n in numbers.tolist()]
    assert scope.allowed_flags(names, 1, int(numbers[0])).tolist() == [expected[int(numbers[0])]]
    for generation in (1, 2):
        found = scope.is_all_allowed(names, generation, numbers.tolist())
        assert found is all(expected[n] for n in numbers.tolist())
    if scope.access is not ClassAccess.SOME:
        assert set(expected) <= {scope.access is ClassAccess.ALL}
    for pattern in ("a.b", "#", "*.a"):
        if not scope.can_overlap(pattern):
            assert not any(e and is_match(pattern, n) for e, n in zip(expected, names, strict=True))


def test_reused_channel_numbers_are_evaluated_again() -> None:
    scope = PermissionRules((PermissionRule("*", "a"),)).for_class(1, "")
    names = ["", "a", "b"]
    assert scope.allowed_flags(names, 0, np.array([1, 2])).tolist() == [True, False]
    names[1], names[2] = "b", "a"
    assert scope.allowed_flags(names, 1, np.array([1, 2])).tolist() == [False, True]
    assert not scope.is_all_allowed(names, 1, [2, 1])
    names[1] = "a"
    assert scope.is_all_allowed(names, 2, [2, 1])
    names[1] = "b"
    names += ["a"] * 100
    assert scope.is_all_allowed(names, 3, [2, 102])
    assert scope.allowed_flags(names, 1, np.array([1, 102])).tolist() == [False, True]


def test_class_rules_match_id_name_or_prefix() -> None:
    assert is_class_match("7", 7, "")
    assert is_class_match("orders", 7, "orders")
    assert is_class_match("dead.*", 9, "dead.orders")
    assert not is_class_match("dead.*", 9, "deadly")
    assert not is_class_match("orders", 7, "orders2")
    assert not is_class_match("", 7, "")
    assert is_class_match("*", 0, "")
    assert not is_class_match("a.c", 0, "abc")


def test_rights_apply_to_classes() -> None:
    grants = Grants(Permissions(admin=((AdminRight.PURGE, "dead.*"), (AdminRight.INQUIRE, "*"))))
    assert grants.has_right(AdminRight.PURGE, 3, "dead.orders")
    assert not grants.has_right(AdminRight.PURGE, 3, "orders")
    assert not grants.has_right(AdminRight.PURGE)
    assert grants.has_right(AdminRight.INQUIRE)
    assert not grants.has_right(AdminRight.MONITOR)
    watching = Grants(Permissions(admin=((AdminRight.MONITOR, "*"),)))
    assert watching.has_right(AdminRight.INQUIRE)  # The pages show that, too.
    assert not watching.has_right(AdminRight.PURGE)
    assert not grants.has_right(AdminRight.FETCH, 3, "dead.orders")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("orders", PermissionRule("orders")),
        (" orders  eu.# ", PermissionRule("orders", "eu.#")),
        ("7 >", PermissionRule("7", ">")),
    ],
)
def test_rules_are_parsed(text: str, rule: PermissionRule) -> None:
    assert PermissionRule.parse(text) == rule


@pytest.mark.parametrize("text", ["", " ", "orders a..b", "orders #.a", "a\nb", "orders a b"])
def test_malformed_rules_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"class|segment"):
        PermissionRule.parse(text)


@pytest.mark.parametrize("text", ["#", ">", "eu.#", "eu.> eu.a"])
def test_channel_pattern_without_class_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is a pattern of channels, expected a class: \* for all"):
        PermissionRule.parse(text)
    with pytest.raises(ValueError, match="pattern of channels"):
        Permissions.parse_right(f"purge {text.split()[0]}")
    assert PermissionRule.parse(f"* {text.split()[0]}").class_ == "*"
    for name in ("a#", "#.a", ">>"):
        assert PermissionRule.parse(name) == PermissionRule(name)


def test_unknown_rights_are_refused() -> None:
    assert Permissions.parse_right("purge dead.*") == (AdminRight.PURGE, "dead.*")
    assert Permissions.parse_right("inquire") == (AdminRight.INQUIRE, "*")
    with pytest.raises(ValueError, match="'delete' is not a right, expected one of inquire, purge"):
        Permissions.parse_right("delete orders")


def test_rules_are_limited_in_count() -> None:
    with pytest.raises(ValueError, match="at most 1024"):
        PermissionRules(tuple(PermissionRule("a", f"b{n}") for n in range(1025)))
