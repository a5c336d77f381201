"""README is short, names the test command of CI, and quotes the figures of the performance page.

Its programs run in test_guides.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PERFORMANCE = (ROOT / "protocol" / "guide" / "performance.md").read_text()
LINES_MAX = 250


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= LINES_MAX


def test_readme_test_command_is_the_ci_command() -> None:
    section = README.split("## Test it", 1)[1]
    command = re.search(r"^```sh\n(.*?)\n```", section, re.MULTILINE | re.DOTALL)
    assert command is not None
    assert command[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def speed_rows() -> list[str]:
    """Return the figures of the table. Losses are in italics."""
    section = README.split("## How fast it is", 1)[1].split("![", 1)[0]
    return re.findall(r"^\| .* \| \*?([\d.,]+) x\*? \|$", section, re.MULTILINE)


def test_readme_has_at_most_ten_figures() -> None:
    assert 0 < len(speed_rows()) <= 10


@pytest.mark.parametrize("ratio", speed_rows())
def test_readme_figures_are_on_the_performance_page(ratio: str) -> None:
    assert re.search(rf"(?<![\d.]){re.escape(ratio)} x", PERFORMANCE)
