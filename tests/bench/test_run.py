"""The benchmark with real processes and few messages."""

from __future__ import annotations

import re

import pytest

from tests.support.programs import run_program, run_server


@pytest.mark.early
def test_bench_starts_server_and_reports() -> None:
    status, stdout, stderr = run_program("bench", "--messages", "2000", "--size", "32")
    assert status == 0, stderr
    assert "verified    2,000 messages of 32 bytes to 1 subscriber" in stdout
    assert re.search(r"^throughput  [\d,]+ messages a second published", stdout, re.MULTILINE)
    assert re.search(r"^latency .* median [\d,]+ µs, .* worst [\d,]+ µs$", stdout, re.MULTILINE)


def test_bench_uses_running_server() -> None:
    with run_server() as (bus, url):
        run_program("pub", "65000", "something", "else", "--url", url)
        status, stdout, stderr = run_program(
            "bench", "--messages", "300", "--size", "16", "--subscribers", "2", "--url", url
        )
        assert status == 0, stderr
        assert "300 messages of 16 bytes to 2 subscribers" in stdout
        # Earlier messages of other publishers are not counted.
        assert "class 65000 contained 2 earlier messages" in stdout
        assert bus.process.poll() is None


def test_bench_reports_no_rate_if_messages_are_lost() -> None:
    with run_server("--full", "drop_newest", "--max-class-messages", "100") as (_, url):
        status, stdout, stderr = run_program("bench", "--messages", "50000", "--url", url)
    assert (status, stdout) == (1, "")
    assert "no rate, because subscriber 1 found a fault: message" in stderr
