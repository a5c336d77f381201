"""Channel names and patterns by example and against the oracle."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from simplebus.core.channel.pattern import (
    check_name,
    check_pattern,
    is_literal,
    matches,
    overlaps,
    split_segments,
)
from simplebus.core.limits import CHANNEL_BYTES_MAX, PATTERN_SEGMENTS_MAX
from tests.core.channel.channel_oracle import (
    FRESH,
    all_names,
    all_patterns,
    is_match,
    names,
    patterns,
)
from tests.support.cases import for_each

LONG = ".".join(["segment"] * 500 + ["s"] * 30)
THOUSAND = ".".join(str(number % 7) for number in range(1000))
E_WITH_ACCENT = "caf\u00e9"
E_AND_ACCENT = "cafe\u0301"


def overlaps_both_ways(a: str, b: str) -> bool:
    """Return True if two patterns overlap; asserts that the order does not matter."""
    assert overlaps(a, b) == overlaps(b, a)
    return overlaps(a, b)


def error_of(name: str) -> str | None:
    """Return the error message for a name, or None."""
    try:
        check_name(name)
    except ValueError as error:
        return str(error)
    return None


# Legal names.


@pytest.mark.parametrize(
    "name",
    [
        "alpha",
        "alpha.beta.charlie",
        "Alpha.BETA",
        "0.1.2",
        "a*.b#.>c.##.**.>>",
        "-._.$SYS./.\\.,",
        "straße.日本語.🚌",
        E_AND_ACCENT,
        "\u0301",
        "no\u00a0break\u2028",
        THOUSAND,
        LONG,
    ],
)
def test_names_are_segments_joined_by_dots(name: str) -> None:
    assert check_name(name) is name
    assert check_pattern(name) is name
    assert matches(name, name)
    assert is_literal(name)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "is empty"),
        (".", "segment 1 of 2 is empty"),
        (".a", "segment 1 of 2 is empty"),
        ("a.", "segment 2 of 2 is empty"),
        ("g.l..b", "segment 3 of 4 is empty"),
        ("..", "segment 1 of 3 is empty"),
        ("a b", "segment 1 holds the character U+0020"),
        ("a.b\t", "segment 2 holds the character U+0009"),
        ("a.b\r\n", "segment 2 holds the character U+000D"),
        ("a.\0.b", "segment 2 holds the character U+0000"),
        ("a.b.\x7f", "segment 3 holds the character U+007F"),
        ("a.\ud83d", "segment 2 holds the character U+D83D"),
    ],
)
def test_illegal_names_are_refused_with_the_segment(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as name_error:
        check_name(name)
    with pytest.raises(ValueError, match=re.escape(sentence)) as pattern_error:
        check_pattern(name)
    assert str(name_error.value).startswith("channel ")
    assert str(pattern_error.value).startswith("pattern ")


@pytest.mark.parametrize("code", [*range(0x21), 0x7F])
def test_white_space_and_control_characters_of_ascii_are_refused(code: int) -> None:
    with pytest.raises(ValueError, match=f"U\\+{code:04X}"):
        check_name(f"a{chr(code)}")


@pytest.mark.parametrize("name", ["*", "#", ">", "a.*", "#.a", "a.>.b"])
def test_wildcards_cannot_be_published_to(name: str) -> None:
    with pytest.raises(ValueError, match=r"is the wildcard [*#>], which only a pattern may hold"):
        check_name(name)


@pytest.mark.parametrize("pattern", ["*", "#", ">", "*.*", "a.*.b", "*.#", "*.>", "a.#", "*.a.>"])
def test_wildcards_are_legal_in_patterns(pattern: str) -> None:
    assert check_pattern(pattern) is pattern
    assert not is_literal(pattern)


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("#.a", "segment 1 of 2 is the wildcard #"),
        ("a.>.b", "segment 2 of 3 is the wildcard >"),
        ("#.#", "segment 1 of 2 is the wildcard #"),
        ("a.*.>.#", "segment 3 of 4 is the wildcard >"),
    ],
)
def test_tail_wildcard_must_be_last(pattern: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"{sentence}, which may only be the last"):
        check_pattern(pattern)


@pytest.mark.parametrize("letter", ["a", "ä", "日", "🚌"])
def test_the_limit_is_in_bytes(letter: str) -> None:
    size = len(letter.encode())
    longest = letter * (CHANNEL_BYTES_MAX // size)
    assert check_name(longest) is longest
    with pytest.raises(ValueError, match=f"expected at most {CHANNEL_BYTES_MAX} bytes"):
        check_name(longest + letter)


def test_an_error_about_a_long_name_is_short() -> None:
    with pytest.raises(ValueError, match="2000001 characters") as error:
        check_name("." + "a" * 2_000_000)
    assert len(str(error.value)) < 300


@given(st.text(max_size=12))
def test_any_text_is_legal_or_refused_with_a_sentence(text: str) -> None:
    refusal = error_of(text)
    if refusal is None:
        assert all(split_segments(text))
        assert is_literal(check_pattern(text))
    else:
        assert refusal.startswith("channel ")
        assert "\n" not in refusal


@given(names.filter(bool), patterns())
def test_every_random_name_and_pattern_is_legal(name: str, pattern: str) -> None:
    assert check_name(name) == name
    assert check_pattern(pattern) == pattern


def is_legal_pattern(text: str) -> bool:
    """Return True if a text is a legal pattern, by the rules of the protocol (oracle)."""
    segments = text.split(".")
    return (
        all(segments)
        and len(text.encode("utf-8", "surrogatepass")) <= 4096
        and all(each > " " and each != "\x7f" and not "\ud800" <= each <= "\udfff" for each in text)
        and not any(segment in ("#", ">") for segment in segments[:-1])
        and (len(segments) <= 128 or not any(segment in ("*", "#", ">") for segment in segments))
    )


@given(
    st.lists(st.text("aZ*#>.-/~! \n\x7fä\ud800", max_size=3), max_size=20),
    st.sampled_from(["", "a.", "*.", "a*.", "#>."]),
    st.sampled_from([0, 1, 14, 127]),
)
@example(["a"], "a.", 15)
@example(["a", "#"], "*.", 127)
@example(["#.a"], "", 0)
@example(["#a.>"], "", 0)
@example(["a" * 4096], "", 0)
@example(["a" * 4097], "", 0)
def test_legal_patterns_are_those_of_the_oracle(parts: list[str], prefix: str, count: int) -> None:
    pattern = prefix * count + ".".join(parts)
    try:
        is_legal = check_pattern(pattern) == pattern
    except ValueError:
        is_legal = False
    assert is_legal == is_legal_pattern(pattern)


# Matches of patterns.


@pytest.mark.parametrize(
    ("pattern", "matched", "not_matched"),
    [
        ("one.two", ["one.two"], ["one", "one.two.three", "One.two", "two.one", "one.tw", ""]),
        ("*", ["one", "*", "#", ">"], ["", "one.two"]),
        ("*.two", ["one.two"], ["two", "one.two.three", "one.three"]),
        ("one.*.three", ["one.two.three", "one.*.three"], ["one.three", "one.two.two.three"]),
        ("*.*", ["one.two"], ["one", "one.two.three", ""]),
        ("#", ["", "one", "one.two.three", "#", "*"], []),
        (">", ["one", "one.two.three", ">"], [""]),
        ("one.#", ["one", "one.two", "one.two.three"], ["", "two", "two.one", "ones.two"]),
        ("one.>", ["one.two", "one.two.three", "one.>"], ["", "one", "two.one"]),
        ("*.#", ["one", "one.two"], [""]),
        ("*.>", ["one.two", "one.two.three"], ["", "one"]),
        ("one.*.#", ["one.two", "one.two.three"], ["one", "two.two"]),
        ("a*.#b.>c", ["a*.#b.>c"], ["ab.#b.>c", "a*.b.>c", "a*.#b.c"]),
    ],
)
def test_pattern_matches_examples(pattern: str, matched: list[str], not_matched: list[str]) -> None:
    assert [name for name in matched + not_matched if matches(pattern, name)] == matched
    assert [name for name in matched + not_matched if is_match(pattern, name)] == matched


@pytest.mark.parametrize("name", [".", "a.", ".a", "a..a", "..", "*..a"])
@pytest.mark.parametrize("pattern", ["#", ">", "*", "*.*", "a.#", "*.*.*", "a.*.a"])
def test_name_with_empty_segment_matches_nothing(pattern: str, name: str) -> None:
    assert not matches(pattern, name)


@for_each("pattern", {pattern: pattern for pattern in all_patterns(["a", "b"], 3)})
def test_short_patterns_match_like_the_oracle(pattern: str) -> None:
    every = all_names(["a", "b", FRESH], 4)
    found = [name for name in every if matches(pattern, name)]
    assert found == [name for name in every if is_match(pattern, name)]


@given(patterns(), names)
def test_random_patterns_match_like_the_oracle(pattern: str, name: str) -> None:
    assert matches(pattern, name) == is_match(pattern, name)


def test_a_thousand_segments_are_matched() -> None:
    begun = THOUSAND.rpartition(".")[0]
    end = THOUSAND.rpartition(".")[2]
    assert matches(THOUSAND, THOUSAND)
    assert matches(".".join("*" * 1000), THOUSAND)
    assert not matches(".".join("*" * 999), THOUSAND)
    for pattern in (f"{begun}.*", f"{begun}.>", f"{begun}.#", f"*{THOUSAND[1:]}", f"{begun}.{end}"):
        assert matches(pattern, THOUSAND)
        assert not matches(pattern, f"x{THOUSAND[1:-1]}x")
    assert matches(f"{THOUSAND}.#", THOUSAND)
    assert not matches(f"{THOUSAND}.>", THOUSAND)


def test_wildcard_patterns_are_limited_in_segments() -> None:
    most = ".".join("a" * PATTERN_SEGMENTS_MAX)
    for end in ("*", "#", ">"):
        assert check_pattern(f"{most[:-1]}{end}")
        with pytest.raises(ValueError, match="129 segments is too long, expected at most 128 "):
            check_pattern(f"{most}.{end}")
    assert check_pattern(THOUSAND) == check_name(THOUSAND) == THOUSAND


def test_names_are_not_normalized() -> None:
    assert unicodedata.normalize("NFC", E_AND_ACCENT) == E_WITH_ACCENT
    assert not matches(E_AND_ACCENT, E_WITH_ACCENT)
    assert not overlaps_both_ways(E_AND_ACCENT, E_WITH_ACCENT)
    assert not matches("straße", "STRASSE")
    assert not matches("ﬁ", "fi")
    assert matches("*", E_AND_ACCENT)


def test_combining_characters_are_ordinary() -> None:
    assert split_segments("a.\u0301b") == ["a", "\u0301b"]
    assert check_name("a.*\u0301") == "a.*\u0301"
    assert not matches("a.*\u0301", "a.b")
    assert matches("a.*", "a.*\u0301")


def test_only_the_full_stop_of_ascii_joins_segments() -> None:
    for dot in "\u3002\uff0e\u2024\u00b7":
        assert check_name(f"a{dot}b") == f"a{dot}b"
        assert not matches("a.*", f"a{dot}b")
        assert matches("*", f"a{dot}b")


# Overlap of two patterns.


def test_legal_names_are_returned_unchanged() -> None:
    assert split_segments(check_pattern("alpha")) == ["alpha"]
    assert split_segments(check_pattern("alpha.beta.charlie")) == ["alpha", "beta", "charlie"]


def test_names_with_a_wildcard_are_patterns() -> None:
    assert split_segments(check_pattern("alpha.*.charlie")) == ["alpha", "*", "charlie"]
    assert split_segments(check_pattern("a.b*")) == ["a", "b*"]
    assert is_literal("a.b*")


def test_empty_segments_are_illegal() -> None:
    for name in ("", ".a", "a.", "g.l..b", "*..*"):
        with pytest.raises(ValueError, match="empty"):
            check_pattern(name)


def test_name_overlaps_itself() -> None:
    assert overlaps_both_ways("alpha.beta.charlie", "alpha.beta.charlie")


def test_names_of_different_length_do_not_overlap() -> None:
    assert not overlaps_both_ways("alpha.beta", "alpha.beta.charlie")
    assert not overlaps_both_ways("*.*", "alpha.beta.charlie")
    assert not overlaps_both_ways("alpha", "beta")


def test_pattern_overlaps_itself() -> None:
    for pattern in ("alpha.beta.*", "*", "#", ">", "*.#", "alpha.*.>"):
        assert overlaps_both_ways(pattern, pattern)


def test_wildcard_on_either_side_overlaps() -> None:
    assert overlaps_both_ways("alpha.beta.*", "alpha.beta.charlie")
    assert overlaps_both_ways("alpha.*.charlie", "*.beta.charlie")
    assert not overlaps_both_ways("alpha.*", "beta.*")


def test_tail_wildcards_overlap_long_enough_patterns() -> None:
    assert overlaps_both_ways("alpha.#", "alpha")
    assert not overlaps_both_ways("alpha.>", "alpha")
    assert overlaps_both_ways("alpha.#", "alpha.>")
    assert overlaps_both_ways("#", ">")
    assert overlaps_both_ways("alpha.>", "*.beta")
    assert not overlaps_both_ways("alpha.beta.>", "*.*")
    assert not overlaps_both_ways("alpha.#", "beta.#")
    assert overlaps_both_ways("#", "")
    assert not overlaps_both_ways(">", "")
    assert not overlaps_both_ways("alpha", "")


def test_short_patterns_overlap_if_a_name_matches_both() -> None:
    every = all_names(["a", "b", FRESH], 4)
    matched = {
        pattern: {name for name in every if is_match(pattern, name)}
        for pattern in all_patterns(["a", "b"], 4)
    }
    assert len(matched) == 200
    for a, names_of_a in matched.items():
        for b, names_of_b in matched.items():
            assert overlaps(a, b) == bool(names_of_a & names_of_b), (a, b)


@given(patterns(), patterns(), names)
@example("*.b", "a.*", "a.b")
@example("a.#", "a.>", "a.a")
def test_patterns_that_match_the_same_name_overlap(a: str, b: str, name: str) -> None:
    if is_match(a, name) and is_match(b, name):
        assert overlaps_both_ways(a, b)


@given(patterns(), names)
def test_pattern_overlaps_the_names_that_it_matches(pattern: str, name: str) -> None:
    assert overlaps_both_ways(pattern, name) == matches(pattern, name)


def test_thousand_segments_overlap() -> None:
    assert overlaps_both_ways(THOUSAND, THOUSAND)
    assert overlaps_both_ways(".".join("*" * 1000), f"{THOUSAND}.#")
    assert not overlaps_both_ways(".".join("*" * 1000), f"{THOUSAND}.>")
    assert not overlaps_both_ways(THOUSAND, f"{THOUSAND[:-1]}x")


# Where the rules differ from those of the in-memory bus that tests of process managers used.


def test_wildcards_match_one_segment_and_the_tail() -> None:
    assert matches("*.two", "one.two")
    assert matches("one.#", "one.two.three")
    assert not matches("one.*", "one.two.three")


def test_tail_wildcard_in_the_middle_is_refused() -> None:
    with pytest.raises(ValueError, match="segment 2 of 3 is the wildcard #"):
        check_pattern("a.#.c")


def test_tail_wildcard_does_not_match_a_shorter_prefix() -> None:
    assert matches("one.#", "one")
    assert matches("one.two.#", "one.two")
    assert not matches("one.two.#", "one")


def test_without_tail_wildcard_segment_counts_are_equal() -> None:
    assert not matches("one.*", "one")
    assert not matches("one.*", "one.two.three")


def test_empty_name_matches_only_the_hash() -> None:
    assert [p for p in ("#", ">", "*", "*.#", "one.#", "one") if matches(p, "")] == ["#"]


def test_wildcards_in_names_are_ordinary_characters() -> None:
    assert matches("one.*", "one.*")
    assert not matches("one.two", "one.*")
    assert not matches("one.two", "one.#")
    with pytest.raises(ValueError, match="segment 2 is the wildcard"):
        check_name("one.#")
