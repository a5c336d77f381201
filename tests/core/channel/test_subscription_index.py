"""Sublists by example, and against a list that is assumed to be perfect."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from simplebus.core.channel import subscription_index as module
from simplebus.core.channel.pattern import matches
from simplebus.core.channel.pattern_index import PatternIndex, PatternPage
from simplebus.core.channel.subscription_index import SubscriptionIndex
from simplebus.core.limits import CACHE_NAMES_MAX, CACHE_VALUES_MAX
from tests.core.channel.channel_oracle import SublistOracle, names, patterns


def sublist_of(*listed: str) -> SubscriptionIndex[str]:
    """A sublist with these patterns, each its own value."""
    sublist = SubscriptionIndex[str]()
    for pattern in listed:
        assert sublist.insert(pattern, pattern)
        sublist.check()
    return sublist


def test_an_empty_sublist_matches_nothing() -> None:
    sublist = sublist_of()
    assert (sublist.match("a"), sublist.match(""), len(sublist)) == ((), (), 0)


def test_what_was_inserted_is_found() -> None:
    sublist = sublist_of("a.b", "a.c")
    assert sublist.match("a.b") == ("a.b",)
    assert sublist.match("a") == ()
    assert sublist.match("a.b.c") == ()
    assert len(sublist) == 2


def test_what_was_removed_is_not_found() -> None:
    sublist = sublist_of("a.b", "a.*", "a.c")
    sublist.remove("a.b", "a.b")
    assert sublist.match("a.b") == ("a.*",)
    sublist.remove("a.*", "a.*")
    assert sublist.match("a.b") == ()
    assert sublist.match("a.c") == ("a.c",)
    assert len(sublist) == 1


def test_a_star_stands_for_one_segment_in_any_place() -> None:
    sublist = sublist_of("*.b.c", "a.*.c", "a.b.*", "*.*.*", "*.*")
    assert sublist.match("a.b.c") == ("*.b.c", "a.*.c", "a.b.*", "*.*.*")
    assert sublist.match("a.x.c") == ("a.*.c", "*.*.*")
    assert sublist.match("x.y") == ("*.*",)


def test_open_ends_match_the_rest() -> None:
    sublist = sublist_of("#", ">", "a.#", "a.>", "a.*.#", "a.*.>")
    assert sublist.match("") == ("#",)
    assert sublist.match("a") == ("#", ">", "a.#")
    assert sublist.match("a.b") == ("#", ">", "a.#", "a.>", "a.*.#")
    assert sublist.match("a.b.c") == ("#", ">", "a.#", "a.>", "a.*.#", "a.*.>")
    assert sublist.match("b.b.c") == ("#", ">")


def test_values_come_in_the_order_in_which_they_were_inserted() -> None:
    sublist = sublist_of("a.>", "a.b", "#", "*.b", "a.#")
    assert sublist.match("a.b") == ("a.>", "a.b", "#", "*.b", "a.#")
    sublist.remove("a.>", "a.>")
    sublist.insert("a.>", "again")
    assert sublist.match("a.b") == ("a.b", "#", "*.b", "a.#", "again")


def test_many_values_of_one_pattern_keep_their_order() -> None:
    sublist = SubscriptionIndex[int]()
    for value in (3, 1, 2):
        sublist.insert("a.*", value)
        sublist.insert("a.b", value + 10)
    assert sublist.match("a.b") == (3, 13, 1, 11, 2, 12)
    sublist.remove("a.*", 3)
    sublist.remove("a.*", 2)
    sublist.insert("a.*", 4)
    sublist.check()
    assert sublist.match("a.b") == (13, 1, 11, 12, 4)


def test_a_value_comes_once_for_each_of_its_patterns() -> None:
    sublist = SubscriptionIndex[str]()
    for pattern in ("a.b", "a.*", "x"):
        sublist.insert(pattern, "me")
    assert sublist.match("a.b") == ("me", "me")


def test_the_same_pair_again_changes_nothing() -> None:
    sublist = sublist_of("a.b", "a.*")
    generation = sublist.generation
    assert not sublist.insert("a.b", "a.b")
    assert not sublist.insert("a.*", "a.*")
    assert (sublist.match("a.b"), len(sublist)) == (("a.b", "a.*"), 2)
    assert sublist.generation == generation


@pytest.mark.parametrize(
    "pattern", ["a", "a.b", "a.b.c.d", "a.*", "a.*.c", "*", "a.#", "a.>", "#", "a.*.c.d.e", "", "x"]
)
def test_removing_what_is_not_there_is_an_error(pattern: str) -> None:
    sublist = sublist_of("a.b.c", "a.*.c.d", "a.x.*")
    sublist.insert("a.*.c", "another")
    generation = sublist.generation
    with pytest.raises(KeyError, match="was not inserted with the pattern"):
        sublist.remove(pattern, pattern)
    sublist.check()
    assert (len(sublist), sublist.generation) == (4, generation)


def test_a_value_is_removed_from_its_own_pattern_only() -> None:
    sublist = SubscriptionIndex[int]()
    for pattern, value in (("a", 1), ("a", 2), ("*", 1), ("*", 3)):
        sublist.insert(pattern, value)
    sublist.remove("a", 1)
    with pytest.raises(KeyError):
        sublist.remove("a", 3)
    with pytest.raises(KeyError):
        sublist.remove("*", 2)
    assert sublist.match("a") == (2, 1, 3)


def test_an_illegal_pattern_is_refused_and_leaves_nothing() -> None:
    sublist = sublist_of()
    for pattern in ("", "a.", "a.#.b", "a b"):
        with pytest.raises(ValueError, match="pattern"):
            sublist.insert(pattern, "value")
    assert (len(sublist), sublist.statistics().wild_patterns) == (0, 0)


def test_wildcards_in_a_name_are_letters() -> None:
    sublist = sublist_of("a.*", "a.b", "a.#", "a.>", "*.*.c")
    assert sublist.match("a.*") == ("a.*", "a.#", "a.>")
    assert sublist.match("a.#") == ("a.*", "a.#", "a.>")
    assert sublist.match("*.*.c") == ("*.*.c",)
    assert sublist.match("*.b") == ()


@pytest.mark.parametrize("name", [".", "a.", ".a", "a..b"])
def test_what_has_an_empty_segment_is_found_by_nothing(name: str) -> None:
    assert sublist_of("#", ">", "*.*", "a.>", "*.*.*").match(name) == ()


# The cache.


def searches(sublist: SubscriptionIndex[str], *asked: str) -> int:
    """How many searches these names take, one after the other."""
    before = sublist.statistics().searches
    for name in asked:
        sublist.match(name)
    return sublist.statistics().searches - before


def test_what_was_found_is_remembered_and_nothing_is_a_result_too() -> None:
    sublist = sublist_of("a.*")
    assert searches(sublist, "a.b", "a.b", "x", "x", "a.b") == 2
    assert sublist.match("a.b") is sublist.match("a.b")


def test_a_literal_pattern_makes_one_name_forgotten() -> None:
    sublist = sublist_of("a.*")
    assert searches(sublist, "a.b", "a.c", "x") == 3
    sublist.insert("a.b", "new")
    assert searches(sublist, "a.c", "x") == 0
    assert sublist.match("a.b") == ("a.*", "new")
    sublist.remove("a.b", "new")
    assert searches(sublist, "a.c", "x") == 0
    assert sublist.match("a.b") == ("a.*",)


def test_a_pattern_with_a_wildcard_makes_all_names_forgotten() -> None:
    sublist = sublist_of("a.*")
    assert searches(sublist, "a.b", "x") == 2
    sublist.insert("x.#", "new")
    assert searches(sublist, "a.b") == 1
    assert sublist.match("x") == ("new",)
    sublist.remove("x.#", "new")
    assert sublist.match("x") == ()


def test_every_change_grows_the_generation() -> None:
    sublist = sublist_of()
    seen = [sublist.generation]
    for change in (sublist.insert, sublist.remove):
        for pattern in ("a", "a.*"):
            change(pattern, "value")
            seen.append(sublist.generation)
            sublist.match("a")
    assert seen == sorted(set(seen))


def test_names_in_use_stay_however_many_are_asked_once() -> None:
    sublist = SubscriptionIndex[str](cache_names=8)
    sublist.insert("#", "all")
    sublist.match("in.use")
    for number in range(100):
        sublist.match(f"once.{number}")
        assert searches(sublist, "in.use") == 0
        sublist.check()
    assert sublist.statistics().cached_names <= 8


def test_the_cache_has_a_ceiling_in_values_too() -> None:
    sublist = SubscriptionIndex[int](cache_values=20)
    for value in range(5):
        sublist.insert("a.#", value)
    for value in range(11):
        sublist.insert("b.#", value)
    for number in range(100):
        assert len(sublist.match(f"a.{number}")) == 5
        sublist.check()
    assert sublist.statistics().cached_values == 20
    assert len(sublist.match("b")) == 11  # More than half of what may be remembered.
    assert sublist.statistics().cached_names == 4
    before = sublist.statistics().searches
    sublist.match("b")
    assert sublist.statistics().searches == before + 1


@pytest.mark.parametrize("cache_names", [0, 1])
def test_a_sublist_without_a_cache_searches_each_time(cache_names: int) -> None:
    sublist = SubscriptionIndex[str](cache_names=cache_names)
    sublist.insert("a", "a")
    assert searches(sublist, "a", "a", "b", "b") == 4
    assert sublist.statistics().cached_names == 0


def test_names_that_the_same_patterns_match_share_a_result() -> None:
    sublist = sublist_of("a.*", "*.b.>", "a.#", "a.x")
    assert sublist.match("a.c") is sublist.match("a.d")
    assert sublist.match("a.x") == ("a.*", "a.#", "a.x")
    assert sublist.match("c") is sublist.match("d") == ()
    before = sublist.match("a.c")
    sublist.insert("a.*", "another")
    assert sublist.match("a.c") == (*before, "another")
    assert sublist.match("a.d") == (*before, "another")


def test_the_ceilings_are_stated() -> None:
    sublist = sublist_of("#")
    for number in range(3 * CACHE_NAMES_MAX):
        sublist.match(str(number))
    sublist.check()
    assert CACHE_NAMES_MAX // 2 < sublist.statistics().cached_names <= CACHE_NAMES_MAX
    assert CACHE_VALUES_MAX > CACHE_NAMES_MAX


# Against the list.

pairs = st.tuples(patterns(), st.integers(0, 3))


@given(st.lists(pairs, max_size=30), st.lists(names, max_size=20))
def test_a_sublist_finds_what_the_list_finds(
    inserted: list[tuple[str, int]], asked: list[str]
) -> None:
    sublist, oracle = SubscriptionIndex[int](), SublistOracle()
    for pattern, value in inserted:
        assert sublist.insert(pattern, value) == oracle.insert(pattern, value)
    sublist.check()
    for name in asked:
        assert sublist.match(name) == oracle.match(name)
        assert len(sublist.match(name)) == sum(matches(p, name) for p, _ in set(inserted))
        assert sublist.has_match(name) == bool(oracle.match(name))


@given(st.lists(pairs, unique=True, max_size=30), st.randoms())
def test_removed_in_any_order_nothing_is_left(
    inserted: list[tuple[str, int]], random: Random
) -> None:
    sublist = SubscriptionIndex[int]()
    for pattern, value in inserted:
        sublist.insert(pattern, value)
    random.shuffle(inserted)
    for pattern, value in inserted:
        sublist.remove(pattern, value)
        sublist.check()
    statistics = sublist.statistics()
    assert (statistics.subscriptions, statistics.literal_patterns, statistics.wild_patterns) == (
        0,
        0,
        0,
    )


def test_a_pair_that_comes_twice_leaves_nothing_when_it_is_removed() -> None:
    for pattern in ("a.b", "a.*"):
        sublist = SubscriptionIndex[int]()
        assert sublist.insert(pattern, 1)
        assert not sublist.insert(pattern, 1)
        sublist.remove(pattern, 1)
        assert not sublist.has_match("a.b")
        assert sublist.statistics().literal_patterns == sublist.statistics().wild_patterns == 0


class SublistMachine(RuleBasedStateMachine):
    """A sublist with a cache of a few names against the list."""

    @initialize(cache_names=st.sampled_from([0, 2, 6, 100]), cache_values=st.sampled_from([4, 100]))
    def start(self, cache_names: int, cache_values: int) -> None:
        self.sublist = SubscriptionIndex[int](cache_names=cache_names, cache_values=cache_values)
        self.oracle = SublistOracle()
        self.asked: dict[str, None] = {}

    @rule(pair=pairs)
    def insert(self, pair: tuple[str, int]) -> None:
        assert self.sublist.insert(*pair) == self.oracle.insert(*pair)

    @rule(at=st.integers(0, 1000), value=st.integers(0, 3))
    def insert_a_name_that_was_asked(self, at: int, value: int) -> None:
        if name := self.asked_name(at):
            assert self.sublist.insert(name, value) == self.oracle.insert(name, value)
            assert self.sublist.match(name) == self.oracle.match(name)

    @rule(at=st.integers(0, 1000))
    def remove(self, at: int) -> None:
        if self.oracle.pairs:
            pattern, value = self.oracle.pairs[at % len(self.oracle.pairs)]
            self.sublist.remove(pattern, value)
            self.oracle.remove(pattern, value)

    @rule(pair=pairs)
    def remove_what_may_not_be_there(self, pair: tuple[str, int]) -> None:
        if pair in self.oracle.pairs:
            self.sublist.remove(*pair)
            self.oracle.remove(*pair)
        else:
            with pytest.raises(KeyError):
                self.sublist.remove(*pair)

    @rule(some=st.lists(names, min_size=1, max_size=8))
    def match(self, some: list[str]) -> None:
        self.asked.update(dict.fromkeys(some))
        for name in some:
            assert self.sublist.has_match(name) == bool(self.oracle.match(name))
            assert self.sublist.match(name) == self.oracle.match(name)

    @rule()
    def match_again_what_was_asked_lately(self) -> None:
        for name in list(self.asked)[-5:]:
            assert self.sublist.match(name) == self.oracle.match(name)

    def asked_name(self, at: int) -> str:
        return list(self.asked)[-1 - at % len(self.asked)] if self.asked else ""

    @invariant()
    def the_sublist_is_the_list(self) -> None:
        self.sublist.check()
        assert len(self.sublist) == len(self.oracle.pairs)


SublistMachine.TestCase.settings = settings(stateful_step_count=30)
TestTheSublistIsAList = SublistMachine.TestCase


# The machine must be able to fail: the sublist is broken on purpose, and it has to notice.

Patch = pytest.MonkeyPatch


def remembers_too_long_after_a_literal(patch: Patch) -> None:
    patch.setattr(module._MatchCache, "forget", lambda self, name: None)


def remembers_too_long_after_a_wildcard(patch: Patch) -> None:
    patch.setattr(module._MatchCache, "clear", lambda self: None)


def takes_the_rest_for_one_or_more(patch: Patch) -> None:
    matching = PatternIndex.find_matches
    patch.setattr(
        PatternIndex,
        "find_matches",
        lambda self, segments: matching(self, segments) if segments else (),
    )


def asks_for_the_head_alone(patch: Patch) -> None:
    patch.setattr(PatternPage, "find_matches", lambda self, segments: self.used_bits)


def leaves_bits_behind(patch: Patch) -> None:
    patch.setattr(PatternPage, "remove", lambda self, key, number: None)


@pytest.mark.parametrize(
    "broken",
    [
        remembers_too_long_after_a_literal,
        remembers_too_long_after_a_wildcard,
        takes_the_rest_for_one_or_more,
        asks_for_the_head_alone,
        leaves_bits_behind,
    ],
)
def test_the_machine_notices_a_sublist_that(
    broken: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    broken(monkeypatch)
    thorough = settings(
        max_examples=500,
        stateful_step_count=30,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    with pytest.raises(AssertionError):
        run_machine(SublistMachine, settings=thorough)
