"""Parsing of TOML files, and their errors."""

from __future__ import annotations

import tomllib

import pytest

from simplebus.core import toml

FINE = ["", "a = 1", "[a]\nb = [1, [2, {c = []}]]", f"x = {'[' * 32}{']' * 32}"]


@pytest.mark.parametrize("text", FINE)
def test_valid_toml_is_parsed_like_tomllib(text: str) -> None:
    assert toml.loads(text) == tomllib.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        f"x = {'[' * 33}{']' * 33}",
        f"x = {'[' * 100_000}",
        f"x = {'[' * 100_000}{']' * 100_000}",
        f"x = {'{a=' * 500}1{'}' * 500}",
        f"[{'a.' * 40}a]",
    ],
)
def test_deep_nesting_is_an_error(text: str) -> None:
    with pytest.raises(toml.TOMLDecodeError, match="too deeply, expected 32 levels at most"):
        toml.loads(text)


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000])
def test_number_that_python_does_not_print_is_an_error(number: str) -> None:
    with pytest.raises(toml.TOMLDecodeError, match=r"too long \(at line 2, column \d\)"):
        toml.loads(f"a = 1\nb = [{number}]")


def test_other_errors_are_unchanged() -> None:
    with pytest.raises(toml.TOMLDecodeError, match="at end of document"):
        toml.loads("a = 1\nb = ")
