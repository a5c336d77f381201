"""Sieves by example, and against patterns that are asked one by one."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.channel import pattern_index as module
from simplebus.core.channel.pattern import split_segments
from simplebus.core.channel.pattern_index import PatternIndex, PatternPage, matched_values
from simplebus.core.limits import PATTERN_PAGE_SIZE, PATTERN_SEGMENTS_MAX
from tests.core.channel.channel_oracle import (
    all_names,
    all_patterns,
    is_match,
    names,
    patterns,
)


def sieve_of(*listed: str) -> PatternIndex[str]:
    """A sieve with these patterns, each its own value."""
    sieve = PatternIndex[str]()
    for pattern in listed:
        sieve[pattern] = pattern
    sieve.check()
    return sieve


def found(sieve: PatternIndex[str], name: str) -> set[str]:
    """What a name finds, each once."""
    values = matched_values(sieve.find_matches(split_segments(name)))
    assert len(values) == len(set(values))
    return set(values)


def sheets_asked(sieve: PatternIndex[str], name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many sheets a name is compared with."""
    asked = []
    matching = PatternPage.find_matches

    def counted(self: PatternPage[str], segments: list[str]) -> int:
        asked.append(self)
        return matching(self, segments)

    with monkeypatch.context() as patch:
        patch.setattr(PatternPage, "find_matches", counted)
        sieve.find_matches(split_segments(name))
    return len(asked)


def test_every_short_pattern_finds_the_names_that_it_matches() -> None:
    listed = [pattern for pattern in all_patterns(["a", "b"], 5) if set("*#>") & set(pattern)]
    sieve = sieve_of(*listed)
    assert len(sieve) == len(listed) > 500
    for name in all_names(["a", "b", "z"], 6):
        assert found(sieve, name) == {p for p in listed if is_match(p, name)}


@pytest.mark.parametrize("wildcard", ["*", "#", ">"])
@pytest.mark.parametrize("count", range(5))
def test_what_looks_like_a_wildcard_in_a_name_is_letters(wildcard: str, count: int) -> None:
    listed = all_patterns(["a"], 5)
    sieve = sieve_of(*listed)
    for behind in ([], ["a"], ["a", "a"]):
        name = ".".join(["a"] * count + [wildcard, *behind])
        assert found(sieve, name) == {p for p in listed if is_match(p, name)}


def test_the_last_value_of_a_pattern_counts() -> None:
    sieve = sieve_of("a.b.*.d")
    sieve["a.b.*.d"] = "new"
    sieve.check()
    assert (sieve.get("a.b.*.d"), sieve.get("a.b.*"), len(sieve)) == ("new", None, 1)
    assert matched_values(sieve.find_matches(["a", "b", "c", "d"])) == ["new"]
    assert sieve.values() == ["new"]


def test_deleting_what_is_not_there_is_an_error() -> None:
    sieve = sieve_of("a.>")
    for pattern in ("a.#", "b.>", "a.*"):
        with pytest.raises(KeyError):
            del sieve[pattern]
    assert found(sieve, "a.b") == {"a.>"}


def test_patterns_that_match_a_names_beginning_are_asked_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads = [".".join(steps) for steps in product("a*", repeat=10)]
    sieve = sieve_of(*[f"{head}.{'*.' * 100}z" for head in heads])
    name = "a." * 110
    assert found(sieve, f"{name}z") == set(sieve.values())
    assert found(sieve, f"{name}y") == set()
    assert sheets_asked(sieve, f"{name}y", monkeypatch) == 8


def test_patterns_that_begin_otherwise_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sieve = sieve_of(*[f"site.{n}.*.{n}" for n in range(3000)], *[f"*.{n}.#" for n in range(3000)])
    assert found(sieve, "site.7.x.7") == {"site.7.*.7", "*.7.#"}
    assert sheets_asked(sieve, "site.7.x.7", monkeypatch) == 2


@given(st.lists(patterns(), unique=True, max_size=30), st.lists(names, max_size=20), st.randoms())
def test_patterns_come_and_go_in_any_order(
    listed: list[str], asked: list[str], random: Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PATTERN_PAGE_SIZE", 3)
        sieve = sieve_of(*listed)
        random.shuffle(listed)
        while listed:
            del sieve[listed.pop()]
            sieve.check()
            for name in asked:
                assert found(sieve, name) == {p for p in listed if is_match(p, name)}
    assert not sieve._tables


def test_no_sheet_but_a_boxs_last_one_has_space() -> None:
    count = 2 * PATTERN_PAGE_SIZE + 10
    listed = [f"a.*.b.{n}" for n in range(count)]
    sieve = sieve_of(*listed)
    for pattern in listed[: PATTERN_PAGE_SIZE + 20]:
        del sieve[pattern]
    sieve.check()
    ((sheet,),) = [box for head in sieve._tables.values() for box in head.buckets.values()]
    assert sheet.used_bits.bit_count() == len(sieve) == count - PATTERN_PAGE_SIZE - 20
    assert found(sieve, f"a.x.b.{count - 1}") == {listed[-1]}


def test_the_longest_patterns_come_and_go() -> None:
    steps = [str(n % 7) for n in range(PATTERN_SEGMENTS_MAX - 1)]
    listed = [".".join([*steps[:count], end]) for count in range(len(steps)) for end in ("#", "*")]
    sieve = sieve_of(*listed)
    name = ".".join(steps)
    assert found(sieve, name) == {*listed[::2], listed[-1]}
    for pattern in listed[::2]:
        del sieve[pattern]
    sieve.check()
    assert found(sieve, name) == {listed[-1]}


def test_a_sieve_that_was_tampered_with_is_noticed() -> None:
    for name, value in (("used_bits", 0), ("values", [None]), ("patterns", ["a.#"])):
        sieve = sieve_of("a.*.b.c")
        setattr(sieve._slots["a.*.b.c"].page, name, value)
        with pytest.raises(AssertionError):
            sieve.check()
