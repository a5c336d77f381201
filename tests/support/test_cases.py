"""Tests of `for_each`."""

from __future__ import annotations

import pytest

from tests.support.cases import for_each


@for_each("number", {"one": 1, "two": 2})
def test_every_case_is_tested_with_fixtures(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert monkeypatch.setenv("NUMBER", str(number)) is None


def test_failure_names_its_case() -> None:
    @for_each("number", {"one": 1, "two": 2, "three": 3})
    def is_odd(number: int) -> None:
        assert number % 2

    with pytest.raises(AssertionError) as caught:
        is_odd()
    assert caught.value.__notes__ == ["number: two"]
