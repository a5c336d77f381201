"""Tests of the logging of a process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging
from simplebus.logs.configure import configure_logging

configure_logging("info", "json")
for number in range(30):
    logging.warning("repeated")
    configure_logging("info", "console")
configure_logging("error")
logging.warning("hidden")
logging.error("shown")
assert len(logging.getLogger().handlers) == 1
"""


def test_another_configuration_keeps_the_handler_and_its_rate_limit() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    lines = completed.stderr.splitlines()
    assert sum("repeated" in line for line in lines) == 20
    assert lines[0].startswith("{")
    assert lines[1].endswith("WARNING repeated")
    assert lines[-1].endswith("ERROR shown")
    assert "hidden" not in completed.stderr
