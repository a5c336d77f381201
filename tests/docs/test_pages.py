"""Tests of the references from README and the protocol pages to tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PAGES = sorted(path.relative_to(ROOT) for path in (ROOT / "protocol").glob("*.md"))


def defined_tests() -> set[str]:
    code = "\n".join(path.read_text() for path in TESTS.glob("**/*.py"))
    return set(re.findall(r"^ *(?:async )?def (test_\w+)", code, re.MULTILINE))


def named_tests(page: str) -> list[str]:
    """Return the names in italics. "…" at an end stands for the rest of a name."""
    return re.findall(r"(?<!\*)\*(test_\w+…?|…\w+_\w+…?)\*(?!\*)", page)


@pytest.mark.parametrize("page", [Path("README.md"), *PAGES], ids=str)
def test_pages_name_existing_tests(page: Path) -> None:
    tests = defined_tests()
    for name in named_tests((ROOT / page).read_text()):
        pattern = re.compile(re.escape(name).replace("…", r"\w*"))
        assert any(map(pattern.fullmatch, tests)), f"{page} names {name}, which does not exist"


def test_names_in_italics_are_found() -> None:
    text = "Kept (*test_one*, *…of_two_words…*), *very*, **test_bold**, `test_code`."
    assert named_tests(text) == ["test_one", "…of_two_words…"]
