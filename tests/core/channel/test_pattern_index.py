"""Pattern index by example and against patterns that are matched one by one."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.channel import pattern_index as module
from simplebus.core.channel.pattern import split_segments
from simplebus.core.channel.pattern_index import PatternIndex, PatternPage, iter_values
from simplebus.core.limits import PATTERN_PAGE_SIZE, PATTERN_SEGMENTS_MAX
from tests.core.channel.channel_oracle import all_names, all_patterns, is_match, names, patterns


def build_index(*listed: str) -> PatternIndex[str]:
    """Build an index of these patterns, each its own value."""
    sieve = PatternIndex[str]()
    for pattern in listed:
        sieve[pattern] = pattern
    sieve.check()
    return sieve


def find_values(sieve: PatternIndex[str], name: str) -> set[str]:
    """Return the values that match a name; asserts that each occurs once."""
    values = list(iter_values(sieve.find_matches(split_segments(name))))
    assert len(values) == len(set(values))
    return set(values)


def count_searched_pages(
    sieve: PatternIndex[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Return the number of pages that a name is compared with."""
    searched_pages = []
    matching = PatternPage.find_matches

    def counted(self: PatternPage[str], segments: list[str]) -> int:
        searched_pages.append(self)
        return matching(self, segments)

    with monkeypatch.context() as patch:
        patch.setattr(PatternPage, "find_matches", counted)
        sieve.find_matches(split_segments(name))
    return len(searched_pages)


def test_short_patterns_are_found_like_matches() -> None:
    listed = [pattern for pattern in all_patterns(["a", "b"], 5) if set("*#>") & set(pattern)]
    sieve = build_index(*listed)
    assert len(sieve) == len(listed) > 500
    for name in all_names(["a", "b", "z"], 6):
        assert find_values(sieve, name) == {p for p in listed if is_match(p, name)}


@pytest.mark.parametrize("wildcard", ["*", "#", ">"])
@pytest.mark.parametrize("count", range(5))
def test_wildcards_in_a_name_are_ordinary_characters(wildcard: str, count: int) -> None:
    listed = all_patterns(["a"], 5)
    sieve = build_index(*listed)
    for suffix in ([], ["a"], ["a", "a"]):
        name = ".".join(["a"] * count + [wildcard, *suffix])
        assert find_values(sieve, name) == {p for p in listed if is_match(p, name)}


def test_setting_a_pattern_again_replaces_its_value() -> None:
    sieve = build_index("a.b.*.d")
    sieve["a.b.*.d"] = "new"
    sieve.check()
    assert (sieve.get("a.b.*.d"), sieve.get("a.b.*"), len(sieve)) == ("new", None, 1)
    assert list(iter_values(sieve.find_matches(["a", "b", "c", "d"]))) == ["new"]
    assert sieve.values() == ["new"]


def test_deleting_an_unknown_pattern_raises_key_error() -> None:
    sieve = build_index("a.>")
    for pattern in ("a.#", "b.>", "a.*"):
        with pytest.raises(KeyError):
            del sieve[pattern]
    assert find_values(sieve, "a.b") == {"a.>"}


def test_patterns_with_a_common_prefix_share_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads = [".".join(steps) for steps in product("a*", repeat=10)]
    sieve = build_index(*[f"{head}.{'*.' * 100}z" for head in heads])
    name = "a." * 110
    assert find_values(sieve, f"{name}z") == set(sieve.values())
    assert find_values(sieve, f"{name}y") == set()
    assert count_searched_pages(sieve, f"{name}y", monkeypatch) == 8


def test_patterns_with_other_prefixes_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    sieve = build_index(
        *[f"site.{n}.*.{n}" for n in range(3000)], *[f"*.{n}.#" for n in range(3000)]
    )
    assert find_values(sieve, "site.7.x.7") == {"site.7.*.7", "*.7.#"}
    assert count_searched_pages(sieve, "site.7.x.7", monkeypatch) == 2


@given(st.lists(patterns(), unique=True, max_size=30), st.lists(names, max_size=20), st.randoms())
def test_insertion_and_deletion_in_any_order(
    listed: list[str], searched_names: list[str], random: Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PATTERN_PAGE_SIZE", 3)
        sieve = build_index(*listed)
        random.shuffle(listed)
        while listed:
            del sieve[listed.pop()]
            sieve.check()
            for name in searched_names:
                assert find_values(sieve, name) == {p for p in listed if is_match(p, name)}
    assert not sieve._tables


def test_only_the_last_page_of_a_bucket_has_free_bits() -> None:
    count = 2 * PATTERN_PAGE_SIZE + 10
    listed = [f"a.*.b.{n}" for n in range(count)]
    sieve = build_index(*listed)
    for pattern in listed[: PATTERN_PAGE_SIZE + 20]:
        del sieve[pattern]
    sieve.check()
    ((sheet,),) = [box for head in sieve._tables.values() for box in head.buckets.values()]
    assert sheet.used_bits.bit_count() == len(sieve) == count - PATTERN_PAGE_SIZE - 20
    assert find_values(sieve, f"a.x.b.{count - 1}") == {listed[-1]}


def test_longest_patterns_are_inserted_and_deleted() -> None:
    steps = [str(n % 7) for n in range(PATTERN_SEGMENTS_MAX - 1)]
    listed = [".".join([*steps[:count], end]) for count in range(len(steps)) for end in ("#", "*")]
    sieve = build_index(*listed)
    name = ".".join(steps)
    assert find_values(sieve, name) == {*listed[::2], listed[-1]}
    for pattern in listed[::2]:
        del sieve[pattern]
    sieve.check()
    assert find_values(sieve, name) == {listed[-1]}


def test_check_detects_a_corrupted_index() -> None:
    for name, value in (("used_bits", 0), ("values", [None]), ("patterns", ["a.#"])):
        sieve = build_index("a.*.b.c")
        setattr(sieve._slots["a.*.b.c"].page, name, value)
        with pytest.raises(AssertionError):
            sieve.check()
