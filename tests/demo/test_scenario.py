"""The demo with real processes."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from simplebus.demo import scenario
from simplebus.demo.display import PlainDisplay
from tests.support.programs import running_program


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")  # Of every thread that started some.
    return [int(child) for task in tasks for child in task.read_text().split()]


def counts(pattern: str, text: str) -> list[int]:
    """Return the numbers that a pattern finds."""
    return [int(digits.replace(",", "")) for digits in re.findall(pattern, text, re.MULTILINE)]


@pytest.mark.early
def test_demo_passes_with_report() -> None:
    with running_program("demo") as program:
        status, stdout, stderr = program.wait()
    assert (status, stderr) == (0, ""), stdout
    lines = stdout.splitlines()
    assert lines[-1].startswith("PASSED"), stdout
    assert re.search(r"^lost +0$", stdout, re.MULTILINE)

    sent = re.search(
        r"^published +([\d,]+) messages: ([\d,]+) to class 1, ([\d,]+) to class 2$", stdout, re.M
    )
    assert sent
    each = f"{scenario.PER_SECOND * scenario.PUBLISH_SECONDS:,.0f}"
    assert sent.groups()[1:] == (each, each)
    assert f"class 2: received {each} of {each}" in stdout
    duplicates = counts(r"^duplicates +([\d,]+), all of them redeliveries$", stdout)
    redelivered = counts(r"([\d,]+) redelivered after the ack timeout", stdout)
    inherited = counts(r"([\d,]+) redelivered after the kill", stdout)
    assert redelivered, "nothing was redelivered after the ack timeout"
    assert inherited, "nothing was redelivered after the kill"
    assert duplicates == [sum(redelivered) + sum(inherited)]


def test_ctrl_c_ends_demo_and_its_processes() -> None:
    with running_program("demo") as program:
        while "subscribers are connected" not in program.read_line():
            pass
        started = children(program.process.pid)
        assert len(started) == 3
        program.signal(signal.SIGINT)
        status, stdout, stderr = program.wait()
    assert (status, stderr) == (130, "")
    assert "PASSED" not in stdout
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_processes_end_after_demo_is_killed(tmp_path: Path) -> None:
    with running_program("demo", TMPDIR=str(tmp_path)) as program:
        while "subscribers are connected" not in program.read_line():
            pass
        started = children(program.process.pid)
        assert len(started) == 3
        program.process.kill()
        program.process.wait()
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in started):
            assert time.monotonic() < deadline, "a process still runs"
            time.sleep(0.05)


async def test_hanging_demo_fails_and_names_its_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scenario, "DEADLINE_SECONDS", 0.05)
    verdict = await scenario.demo(PlainDisplay())
    assert not verdict.has_passed
    (fault,) = verdict.faults
    assert fault.startswith("the demo did not end within 0.05 seconds: it waited for ")


async def test_failure_of_a_process_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "PUBLISH_SECONDS", "as long as you like")
    verdict = await scenario.demo(PlainDisplay())
    assert not verdict.has_passed
    assert verdict.faults[0].startswith("the publisher ended with status 1: ValueError: ")
