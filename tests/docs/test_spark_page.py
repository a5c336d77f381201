"""What the page on clusters says: its tests are there, and its figures are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from simplebus.core.limits import FETCH_BYTES_MAX, PUBLISHER_SECONDS, PUBLISHERS_MAX, Limits
from simplebus.spark.options import PARTITION_MESSAGES, TIMEOUT_SECONDS

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "protocol" / "spark.md").read_text()


def test_every_test_that_it_names_is_there() -> None:
    code = "\n".join(path.read_text() for path in sorted(TESTS.glob("spark/**/test_*.py")))
    tests = re.findall(r"^def (test_\w+)", code, re.MULTILINE)
    named = re.findall(r"\*…?(\w*_\w+_\w+)…?\*", PAGE)
    assert len(named) > 10
    for name in named:
        assert any(name in test for test in tests), f"no test is called {name}"


def test_its_figures_are_those_of_the_code() -> None:
    for figure, said in (
        (f"{PARTITION_MESSAGES:,}", "`maxRecordsPerPartition` ({})"),
        (f"{TIMEOUT_SECONDS:g}", "`timeout` ({} s)"),
        (f"{FETCH_BYTES_MAX // 2**20}", "about {} MiB at a time"),
        (f"{PUBLISHERS_MAX:,}", "{} of them"),
        (f"{Limits().total_bytes // 2**30}", "`--max-memory` ({} GiB)"),
        (f"{Limits().class_bytes // 2**20}", "`--max-class-memory` ({} MiB)"),
    ):
        assert said.format(figure) in PAGE
    assert PUBLISHER_SECONDS == 3600
    assert "for an hour" in PAGE
