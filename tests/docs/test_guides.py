"""Every code block of README, guides and the HTTP API runs, and shows the output that it has."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.docs.page_runner import (
    MissingProgramError,
    PageError,
    PageRunner,
    matches_output,
    parse_blocks,
)

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "protocol" / "guide").glob("*.md")),
    ROOT / "protocol" / "reference" / "http-api.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs_as_written(page: Path, tmp_path: Path) -> None:
    try:
        PageRunner(page.read_text(), tmp_path).run()
    except MissingProgramError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs {error}")


def test_first_pages_run_one_after_the_other_on_one_server(tmp_path: Path) -> None:
    """A reader starts the server of README, and repeats a page."""
    guide = ROOT / "protocol" / "guide"
    first, *later_pages = (
        page.read_text()
        for page in (
            ROOT / "README.md",
            guide / "concepts.md",
            guide / "request-reply.md",
            guide / "concepts.md",
            ROOT / "README.md",
        )
    )
    start = re.compile(r"^```(?:sh|console)\n(?:\$ )?simplebus serve\n.*?^```$", re.M | re.S)
    pages = [first]
    for page in later_pages:
        without_start, count = start.subn("", page)
        assert count == 1
        pages.append(without_start)
    PageRunner("\n".join(pages), tmp_path).run()


def test_runner_reports_other_output(tmp_path: Path) -> None:
    page = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
    with pytest.raises(PageError, match="line 2: expected output"):
        PageRunner(page, tmp_path).run()


def test_runner_reports_failing_commands(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="fails with status 3"):
        PageRunner("```sh\ntrue\nexit 3\n```\n", tmp_path).run()


def test_runner_rejects_unnamed_files(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="needs a file name"):
        PageRunner('```toml\nname = "x"\n```\n', tmp_path).run()


def test_runner_shares_files_between_blocks(tmp_path: Path) -> None:
    page = "```python\n# a.py\nprint(7)\n```\n\n```console\n$ python a.py\n7\n```\n"
    PageRunner(page, tmp_path).run()


def test_excluded_blocks_have_a_reason() -> None:
    (block,) = parse_blocks("Text.\n\n<!-- not run: needs root -->\n```sh\nfalse\n```\n")
    assert block.not_run == "needs root"


@pytest.mark.parametrize(
    ("shown", "output", "matches"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a…c\n", "abbc\n", True),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("a\n…\nd\n", "a\nd\n", True),
        ("a\n", "a\nb\n", False),
        ("a…\n", "ba\n", False),
    ],
)
def test_output_is_compared_line_by_line(shown: str, output: str, matches: bool) -> None:
    assert matches_output(shown, output) is matches
