"""Pytest fixtures, under pytest-trio, anyio and plain pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ASYNC = """
import pytest
import simplebus

{mark}

async def test_a_handler_hears_of_it(memory_bus):
    heard = []
    async with memory_bus as bus:
        bus.handle(1, lambda message: heard.append(message.payload))
        await bus.publish(b"hello", class_id=1)
    assert heard == [b"hello"]

async def test_a_server_has_it(bus_server):
    async with simplebus.connect(bus_server.address) as bus:
        await bus.publish(b"hello", class_id=1)
        assert bus_server.statistics().published == 1
"""

BLOCKING = """
import pytest
import simplebus
from simplebus.core.settings import Settings

@pytest.fixture
def bus_settings():
    return Settings(ack_timeout=1, tick_seconds=86_400.0)

def test_tick_redelivers_unacknowledged_messages(bus_server):
    with simplebus.connect_blocking(bus_server.address) as bus:
        with bus.subscribe(1, auto_ack=False) as messages:
            bus.publish(b"hello", class_id=1)
            assert messages.get(60).attempt == 1
            bus_server.tick()
            assert messages.get(60).attempt == 2
            bus_server.hang_up()
            bus_server.tick(2)  # What was sent twice waits as long as it would have.
            assert messages.get(60).redelivered
"""


def outcome(tmp_path: Path, test: str) -> str:
    """Run pytest on a test file outside of the project, and return its output."""
    (tmp_path / "test_it.py").write_text(test)
    process = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-W", "error"),
            *("-p", "no:cacheprovider", "-p", "no:xdist"),
            *("--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path / "test_it.py")),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    return process.stdout + process.stderr


@pytest.mark.parametrize(
    "mark", ["pytestmark = pytest.mark.trio", "pytestmark = pytest.mark.anyio"]
)
def test_fixtures_work_in_async_tests(tmp_path: Path, mark: str) -> None:
    output = outcome(tmp_path, ASYNC.format(mark=mark))
    assert " passed" in output, output
    assert "failed" not in output, output
    assert "error" not in output, output


def test_fixtures_work_in_blocking_tests(tmp_path: Path) -> None:
    output = outcome(tmp_path, BLOCKING)
    assert "1 passed" in output, output
