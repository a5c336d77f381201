"""Test of the guide page on Spark. Its programs run in tests/docs/test_guides.py."""

from __future__ import annotations

import re
from pathlib import Path

from simplebus.spark.commands import MODULES

PAGE = (Path(__file__).resolve().parents[2] / "protocol" / "guide" / "spark.md").read_text()


def test_every_command_is_documented() -> None:
    assert re.findall(r"^\| `simplebus pipeline (\S+) ", PAGE, re.MULTILINE) == list(MODULES)
