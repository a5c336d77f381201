"""Subscription index by example and against a list."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from simplebus.core.channel import matches as matches_module
from simplebus.core.channel import paged_set
from simplebus.core.channel import subscription_index as module
from simplebus.core.channel.matches import PagedMatches
from simplebus.core.channel.pattern import matches
from simplebus.core.channel.pattern_index import PatternIndex, PatternPage, PatternSet
from simplebus.core.channel.subscription_index import SubscriptionIndex
from simplebus.core.limits import CACHE_NAMES_MAX, CACHE_VALUES_MAX
from tests.core.channel.channel_oracle import SubscriptionIndexOracle, names, patterns


def build_index(*listed: str) -> SubscriptionIndex[str]:
    """Build an index of these patterns, each its own value."""
    sublist = SubscriptionIndex[str]()
    for pattern in listed:
        assert sublist.insert(pattern, pattern)
        sublist.check()
    return sublist


def test_empty_index_matches_nothing() -> None:
    sublist = build_index()
    assert (sublist.match("a"), sublist.match(""), len(sublist)) == ((), (), 0)


def test_inserted_values_are_found() -> None:
    sublist = build_index("a.b", "a.c")
    assert sublist.match("a.b") == ("a.b",)
    assert sublist.match("a") == ()
    assert sublist.match("a.b.c") == ()
    assert len(sublist) == 2


def test_removed_values_are_not_found() -> None:
    sublist = build_index("a.b", "a.*", "a.c")
    sublist.remove("a.b", "a.b")
    assert sublist.match("a.b") == ("a.*",)
    sublist.remove("a.*", "a.*")
    assert sublist.match("a.b") == ()
    assert sublist.match("a.c") == ("a.c",)
    assert len(sublist) == 1


def test_star_matches_one_segment_anywhere() -> None:
    sublist = build_index("*.b.c", "a.*.c", "a.b.*", "*.*.*", "*.*")
    assert sorted(sublist.match("a.b.c")) == sorted(("*.b.c", "a.*.c", "a.b.*", "*.*.*"))
    assert sorted(sublist.match("a.x.c")) == sorted(("a.*.c", "*.*.*"))
    assert sublist.match("x.y") == ("*.*",)


def test_tail_wildcards_match_the_rest() -> None:
    sublist = build_index("#", ">", "a.#", "a.>", "a.*.#", "a.*.>")
    assert sublist.match("") == ("#",)
    assert sorted(sublist.match("a")) == sorted(("#", ">", "a.#"))
    assert sorted(sublist.match("a.b")) == sorted(("#", ">", "a.#", "a.>", "a.*.#"))
    assert sorted(sublist.match("a.b.c")) == sorted(("#", ">", "a.#", "a.>", "a.*.#", "a.*.>"))
    assert sorted(sublist.match("b.b.c")) == sorted(("#", ">"))


@pytest.mark.parametrize("pattern", ["a.b", "a.*"])
def test_pattern_can_have_many_values(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_set, "PAGE_SIZE", 16)
    sublist = SubscriptionIndex[int]()
    values = list(range(100))
    for value in values:
        assert sublist.insert(pattern, value)
        assert not sublist.insert(pattern, value)
        sublist.check()
    assert sorted(sublist.match("a.b")) == values
    Random(1).shuffle(values)
    while values:
        sublist.remove(pattern, values.pop())
        sublist.check()
        assert sorted(sublist.match("a.b")) == sorted(values)


def test_many_matches_are_pages_that_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matches_module, "MATCHES_IN_TUPLE_MAX", 20)
    monkeypatch.setattr(matches_module, "PAGE_SIZE", 3)
    monkeypatch.setattr(paged_set, "PAGE_SIZE", 5)
    sublist = SubscriptionIndex[int]()
    for value in range(12):
        sublist.insert("a.b", value)
        sublist.insert("a.*", 100 + value)
    for value, pattern in enumerate(("*.b", "*.*", "a.#", "#")):
        sublist.insert(pattern, 200 + value)
    expected = sorted([*range(12), *range(100, 112), *range(200, 204)])
    found = sublist.match("a.b")
    assert isinstance(found, PagedMatches)
    assert max(map(len, found.pages)) <= 5
    sublist.remove("a.b", 3)
    sublist.remove("a.*", 103)
    assert sorted(found) == expected
    assert len(found) == len(expected)
    assert sorted(sublist.match("a.b")) == [each for each in expected if each not in (3, 103)]
    assert isinstance(sublist.match("a.c"), tuple)


def test_value_is_returned_once_per_matching_pattern() -> None:
    sublist = SubscriptionIndex[str]()
    for pattern in ("a.b", "a.*", "x"):
        sublist.insert(pattern, "me")
    assert sublist.match("a.b") == ("me", "me")


def test_inserting_a_pair_again_changes_nothing() -> None:
    sublist = build_index("a.b", "a.*")
    generation = sublist.generation
    assert not sublist.insert("a.b", "a.b")
    assert not sublist.insert("a.*", "a.*")
    assert (sorted(sublist.match("a.b")), len(sublist)) == (["a.*", "a.b"], 2)
    assert sublist.generation == generation


@pytest.mark.parametrize(
    "pattern", ["a", "a.b", "a.b.c.d", "a.*", "a.*.c", "*", "a.#", "a.>", "#", "a.*.c.d.e", "", "x"]
)
def test_removing_an_unknown_pair_raises_key_error(pattern: str) -> None:
    sublist = build_index("a.b.c", "a.*.c.d", "a.x.*")
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
    assert sorted(sublist.match("a")) == [1, 2, 3]


def test_illegal_pattern_is_refused_without_effect() -> None:
    sublist = build_index()
    for pattern in ("", "a.", "a.#.b", "a b"):
        with pytest.raises(ValueError, match="pattern"):
            sublist.insert(pattern, "value")
    assert (len(sublist), sublist.statistics().wild_patterns) == (0, 0)


def test_wildcards_in_a_name_are_letters() -> None:
    sublist = build_index("a.*", "a.b", "a.#", "a.>", "*.*.c")
    assert sorted(sublist.match("a.*")) == sorted(("a.*", "a.#", "a.>"))
    assert sorted(sublist.match("a.#")) == sorted(("a.*", "a.#", "a.>"))
    assert sublist.match("*.*.c") == ("*.*.c",)
    assert sublist.match("*.b") == ()


@pytest.mark.parametrize("name", [".", "a.", ".a", "a..b"])
def test_name_with_empty_segment_finds_nothing(name: str) -> None:
    assert build_index("#", ">", "*.*", "a.>", "*.*.*").match(name) == ()


# The cache.


def count_searches(sublist: SubscriptionIndex[str], *searched_names: str) -> int:
    """Return the number of searches for these names, one after the other."""
    before = sublist.statistics().searches
    for name in searched_names:
        sublist.match(name)
    return sublist.statistics().searches - before


def test_results_are_cached_even_if_empty() -> None:
    sublist = build_index("a.*")
    assert count_searches(sublist, "a.b", "a.b", "x", "x", "a.b") == 2
    assert sublist.match("a.b") is sublist.match("a.b")


def test_literal_pattern_invalidates_one_name() -> None:
    sublist = build_index("a.*")
    assert count_searches(sublist, "a.b", "a.c", "x") == 3
    sublist.insert("a.b", "new")
    assert count_searches(sublist, "a.c", "x") == 0
    assert sorted(sublist.match("a.b")) == sorted(("a.*", "new"))
    sublist.remove("a.b", "new")
    assert count_searches(sublist, "a.c", "x") == 0
    assert sublist.match("a.b") == ("a.*",)


def test_wildcard_pattern_invalidates_all_names() -> None:
    sublist = build_index("a.*")
    assert count_searches(sublist, "a.b", "x") == 2
    sublist.insert("x.#", "new")
    assert count_searches(sublist, "a.b") == 1
    assert sublist.match("x") == ("new",)
    sublist.remove("x.#", "new")
    assert sublist.match("x") == ()


def test_every_change_increments_the_generation() -> None:
    sublist = build_index()
    seen = [sublist.generation]
    for change in (sublist.insert, sublist.remove):
        for pattern in ("a", "a.*"):
            change(pattern, "value")
            seen.append(sublist.generation)
            sublist.match("a")
    assert seen == sorted(set(seen))


def test_names_in_use_stay_cached() -> None:
    sublist = SubscriptionIndex[str](cache_names=8)
    sublist.insert("#", "all")
    sublist.match("in.use")
    for number in range(100):
        sublist.match(f"once.{number}")
        assert count_searches(sublist, "in.use") == 0
        sublist.check()
    assert sublist.statistics().cached_names <= 8


def test_cache_is_limited_in_values() -> None:
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
def test_without_cache_every_match_is_searched(cache_names: int) -> None:
    sublist = SubscriptionIndex[str](cache_names=cache_names)
    sublist.insert("a", "a")
    assert count_searches(sublist, "a", "a", "b", "b") == 4
    assert sublist.statistics().cached_names == 0


def test_names_that_the_same_patterns_match_share_a_result() -> None:
    sublist = build_index("a.*", "*.b.>", "a.#", "a.x")
    assert sublist.match("a.c") is sublist.match("a.d")
    assert sorted(sublist.match("a.x")) == ["a.#", "a.*", "a.x"]
    assert sublist.match("c") is sublist.match("d") == ()
    before = sublist.match("a.c")
    sublist.insert("a.*", "another")
    assert sorted(sublist.match("a.c")) == sorted((*before, "another"))
    assert sublist.match("a.d") is sublist.match("a.c")


def test_default_cache_limits() -> None:
    sublist = build_index("#")
    for number in range(3 * CACHE_NAMES_MAX):
        sublist.match(str(number))
    sublist.check()
    assert CACHE_NAMES_MAX // 2 < sublist.statistics().cached_names <= CACHE_NAMES_MAX
    assert CACHE_VALUES_MAX > CACHE_NAMES_MAX


# Against the list.

pairs = st.tuples(patterns(), st.integers(0, 3))


@given(st.lists(pairs, max_size=30), st.lists(names, max_size=20))
def test_index_matches_like_a_list(
    inserted: list[tuple[str, int]], searched_names: list[str]
) -> None:
    sublist, oracle = SubscriptionIndex[int](), SubscriptionIndexOracle()
    for pattern, value in inserted:
        assert sublist.insert(pattern, value) == oracle.insert(pattern, value)
    sublist.check()
    for name in searched_names:
        assert sorted(sublist.match(name)) == oracle.match(name)
        assert len(sublist.match(name)) == sum(matches(p, name) for p, _ in set(inserted))
        assert sorted(sublist.iter_matches(name)) == oracle.match(name)
        assert sublist.has_match(name) == bool(oracle.match(name))


@given(
    st.dictionaries(st.integers(0, 3), st.lists(patterns(), unique=True, max_size=10)),
    st.lists(names, max_size=20),
)
def test_many_patterns_are_inserted_like_single_ones(
    inserted: dict[int, list[str]], searched_names: list[str]
) -> None:
    sublist, oracle = SubscriptionIndex[int](), SubscriptionIndexOracle()
    for value, value_patterns in inserted.items():
        before = sublist.generation
        sublist.match("a")
        sublist.insert_all(value_patterns, value)
        assert sublist.generation > before
        for pattern in value_patterns:
            oracle.insert(pattern, value)
        sublist.check()
    pattern_sets = {value: PatternSet(value_patterns) for value, value_patterns in inserted.items()}
    for name in searched_names:
        assert sorted(sublist.match(name)) == oracle.match(name)
        for value, pattern_set in pattern_sets.items():
            assert pattern_set.has_match(name) == (value in oracle.match(name))


@given(st.lists(pairs, unique=True, max_size=30), st.randoms())
def test_removal_in_any_order_leaves_nothing(
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


def test_removing_a_repeated_pair_leaves_nothing() -> None:
    for pattern in ("a.b", "a.*"):
        sublist = SubscriptionIndex[int]()
        assert sublist.insert(pattern, 1)
        assert not sublist.insert(pattern, 1)
        sublist.remove(pattern, 1)
        assert not sublist.has_match("a.b")
        assert sublist.statistics().literal_patterns == sublist.statistics().wild_patterns == 0


class SubscriptionIndexMachine(RuleBasedStateMachine):
    """An index with a cache of a few names against a list."""

    @initialize(cache_names=st.sampled_from([0, 2, 6, 100]), cache_values=st.sampled_from([4, 100]))
    def start(self, cache_names: int, cache_values: int) -> None:
        self.sublist = SubscriptionIndex[int](cache_names=cache_names, cache_values=cache_values)
        self.oracle = SubscriptionIndexOracle()
        self.searched_names: dict[str, None] = {}

    @rule(pair=pairs)
    def insert(self, pair: tuple[str, int]) -> None:
        assert self.sublist.insert(*pair) == self.oracle.insert(*pair)

    @rule(at=st.integers(0, 1000), value=st.integers(0, 3))
    def insert_matched_name(self, at: int, value: int) -> None:
        if name := self.recent_name(at):
            assert self.sublist.insert(name, value) == self.oracle.insert(name, value)
            assert sorted(self.sublist.match(name)) == self.oracle.match(name)

    @rule(at=st.integers(0, 1000))
    def remove(self, at: int) -> None:
        if self.oracle.pairs:
            pattern, value = self.oracle.pairs[at % len(self.oracle.pairs)]
            self.sublist.remove(pattern, value)
            self.oracle.remove(pattern, value)

    @rule(pair=pairs)
    def remove_any_pair(self, pair: tuple[str, int]) -> None:
        if pair in self.oracle.pairs:
            self.sublist.remove(*pair)
            self.oracle.remove(*pair)
        else:
            with pytest.raises(KeyError):
                self.sublist.remove(*pair)

    @rule(searched_names=st.lists(names, min_size=1, max_size=8))
    def match(self, searched_names: list[str]) -> None:
        self.searched_names.update(dict.fromkeys(searched_names))
        for name in searched_names:
            assert self.sublist.has_match(name) == bool(self.oracle.match(name))
            assert sorted(self.sublist.match(name)) == self.oracle.match(name)

    @rule()
    def match_recent_name_again(self) -> None:
        for name in list(self.searched_names)[-5:]:
            assert sorted(self.sublist.match(name)) == self.oracle.match(name)

    def recent_name(self, at: int) -> str:
        return (
            list(self.searched_names)[-1 - at % len(self.searched_names)]
            if self.searched_names
            else ""
        )

    @invariant()
    def index_equals_model(self) -> None:
        self.sublist.check()
        assert len(self.sublist) == len(self.oracle.pairs)


SubscriptionIndexMachine.TestCase.settings = settings(stateful_step_count=30)
TestSubscriptionIndexModel = SubscriptionIndexMachine.TestCase


# The machine must be able to fail: the sublist is broken on purpose, and it has to notice.

Patch = pytest.MonkeyPatch


def keeps_cache_after_literal_change(patch: Patch) -> None:
    patch.setattr(module._MatchCache, "forget", lambda self, name: None)


def keeps_cache_after_wildcard_change(patch: Patch) -> None:
    patch.setattr(module._MatchCache, "clear", lambda self: None)


def matches_hash_like_greater_than(patch: Patch) -> None:
    matching = PatternIndex.find_matches
    patch.setattr(
        PatternIndex,
        "find_matches",
        lambda self, segments: matching(self, segments) if segments else (),
    )


def matches_prefix_only(patch: Patch) -> None:
    patch.setattr(PatternPage, "find_matches", lambda self, segments: self.used_bits)


def leaves_removed_bits(patch: Patch) -> None:
    patch.setattr(PatternPage, "remove", lambda self, key, number: None)


@pytest.mark.parametrize(
    "broken",
    [
        keeps_cache_after_literal_change,
        keeps_cache_after_wildcard_change,
        matches_hash_like_greater_than,
        matches_prefix_only,
        leaves_removed_bits,
    ],
)
def test_model_detects_index_that(broken: Callable[[Patch], None], monkeypatch: Patch) -> None:
    broken(monkeypatch)
    thorough = settings(
        max_examples=3000,  # The run ends with the first failing example.
        stateful_step_count=30,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    with pytest.raises(AssertionError):
        run_machine(SubscriptionIndexMachine, settings=thorough)
