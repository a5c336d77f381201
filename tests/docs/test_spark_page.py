"""Test that the Spark page states the limits of the code."""

from __future__ import annotations

import re
from pathlib import Path

from simplebus.core.limits import (
    FETCH_BYTES_MAX,
    PRODUCER_STATE_SECONDS,
    PRODUCER_STATES_MAX,
    Limits,
)
from simplebus.spark.option_names import OPTIONS
from simplebus.spark.options import MAX_PARTITION_MESSAGES, TIMEOUT_SECONDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "protocol" / "spark.md").read_text()


def test_spark_page_states_the_limits_of_the_code() -> None:
    for figure, text in (
        (f"{MAX_PARTITION_MESSAGES:,}", "`maxRecordsPerPartition` ({})"),
        (f"{TIMEOUT_SECONDS:g}", "`timeout` ({} s)"),
        (f"{FETCH_BYTES_MAX // 2**20}", "about {} MiB at a time"),
        (f"{PRODUCER_STATES_MAX:,}", "{} of them"),
        (f"{Limits().total_bytes // 2**30}", "`--max-memory` ({} GiB)"),
        (f"{Limits().class_bytes // 2**20}", "`--max-class-memory` ({} MiB)"),
    ):
        assert text.format(figure) in PAGE
    assert PRODUCER_STATE_SECONDS == 3600
    assert "for an hour" in PAGE


def test_spark_page_lists_all_options() -> None:
    section = PAGE.partition("\n## Options\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`([a-zA-Z]{4,})`", cell)}
    names = {option.name for option in OPTIONS}
    assert listed - {"earliest", "latest", "error", "false", "true", "bytes"} <= names
    assert [name for name in names - {"checkpointLocation"} if f"`{name}`" not in section] == []
