"""`LineWriter`: order, bounds and unread logs."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from simplebus.console import line_writer
from simplebus.console.line_writer import LineWriter
from simplebus.logs.configure import LineHandler
from simplebus.logs.event_logger import EventLogger
from simplebus.logs.formatters import JsonFormatter
from tests.support.programs import ROOT, environment

PIPE_BYTES = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Yield the ends of a small pipe: to read from, to write to."""
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield read_end, write_end
    for end in (read_end, write_end):
        os.close(end)


def read_to(read_end: int, last: bytes) -> list[str]:
    received = b""
    while not received.endswith(last):
        received += os.read(read_end, 65536)
    return received.decode().splitlines()


def test_writes_lines_in_order(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1])
    for number in range(1000):
        writer.write_line(f"line {number} \udc80")
    assert read_to(pipe[0], b"line 999 \\udc80\n") == [f"line {n} \\udc80" for n in range(1000)]
    writer.flush()


def test_retries_to_start_its_thread_with_the_next_line(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer = LineWriter(pipe[1])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        writer.start()
        writer.write_line("first")
    writer.write_line("second")
    assert read_to(pipe[0], b"second\n") == ["first", "second"]
    writer.flush()


def test_drops_and_counts_lines_above_the_buffer_limit(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "BUFFER_BYTES_MAX", 10_000)
    handler = LineHandler(LineWriter(pipe[1]))
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    log = EventLogger(logger)
    for number in range(1000):
        log.info("number.counted", "event {number}", number=number)
    received, poll = b"", select.poll()
    poll.register(pipe[0], select.POLLIN)
    while handler.writer._buffered_bytes:  # The thread may not have updated the count yet.
        if poll.poll(10):
            received += os.read(pipe[0], 65536)
    log.info("last.counted", "last")
    while b'"last"' not in received or not received.endswith(b"\n"):
        received += os.read(pipe[0], 65536)
    *lines, last = map(json.loads, received.splitlines())
    numbers = [line["number"] for line in lines if line["event"] == "number.counted"]
    dropped_counts = [line["count"] for line in lines if line["event"] == "lines.dropped"]
    assert numbers == sorted(numbers)
    assert len(numbers) < 1000
    assert len(numbers) + sum(dropped_counts) == 1000
    assert last["message"] == "last"


def test_unread_log_does_not_block_the_server(pipe: tuple[int, int]) -> None:
    os.set_inheritable(pipe[1], True)
    os.write(pipe[1], b"x" * PIPE_BYTES)  # It is full before it begins.
    with subprocess.Popen(
        [sys.executable, "-m", "simplebus", "serve", "--port", "0", "--verbose"],
        stdout=subprocess.PIPE,
        stderr=pipe[1],
        cwd=ROOT,
        env=environment(SIMPLEBUS_NOTHING="1"),  # The server would log the unknown variable.
    ) as process:
        assert process.stdout is not None
        assert re.match(rb"simplebus ready tcp=", process.stdout.readline())
        process.terminate()
        assert process.wait(60) == 0


def test_server_runs_without_standard_error() -> None:
    with subprocess.Popen(
        ["sh", "-c", 'exec "$0" -m simplebus serve --port 0 2>&-', sys.executable],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert re.match(rb"simplebus ready tcp=", process.stdout.readline())
        process.terminate()
        assert process.wait(60) == 0
