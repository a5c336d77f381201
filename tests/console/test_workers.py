"""Worker processes: start, input, unexpected end and kill."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from simplebus.console.workers import WorkerError, Workers, error_texts, open_workers

ECHO = """
import trio
from simplebus.console.stdin_lines import read_stdin_lines

async def main():
    async for word in read_stdin_lines():
        if word == "fail":
            raise ValueError("as told")
        print("heard", word, flush=True)

trio.run(main)
"""

PATIENCE_SECONDS = 60


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that can be run as a worker."""
    (tmp_path / "echo_worker.py").write_text(ECHO)
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), root]))
    return "echo_worker"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_worker_exchanges_lines_until_its_input_ends(tmp_path: Path, echo: str) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with open_workers(tmp_path) as workers:
            worker = await workers.start("echo", echo)
            await worker.send_line("one")
            await worker.send_line("two")
            lines = worker.lines
            assert [await anext(lines), await anext(lines)] == ["heard one", "heard two"]
            await worker.end_input()
            assert worker.process.returncode == 0


async def test_a_worker_that_fails_ends_the_block_with_its_last_words(
    tmp_path: Path, echo: str
) -> None:
    async def job(workers: Workers) -> None:
        worker = await workers.start("echo", echo)
        await worker.send_line("fail")
        await trio.sleep_forever()

    with trio.fail_after(PATIENCE_SECONDS), pytest.raises(ExceptionGroup) as raised:
        async with open_workers(tmp_path) as workers:
            await job(workers)
    assert raised.group_contains(WorkerError, depth=1)
    assert error_texts(raised.value) == ["the echo ended with status 1: ValueError: as told"]


async def test_no_worker_outlives_the_block(tmp_path: Path, echo: str) -> None:
    pids = []

    async def job() -> None:
        async with open_workers(tmp_path) as workers:
            pids.append((await workers.start("echo", echo)).process.pid)
            assert is_alive(pids[0])
            raise KeyError

    with trio.fail_after(PATIENCE_SECONDS), pytest.raises(ExceptionGroup) as raised:
        await job()
    assert raised.group_contains(KeyError)
    assert not is_alive(pids[0])


async def test_a_killed_worker_is_no_error(tmp_path: Path, echo: str) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with open_workers(tmp_path) as workers:
            worker = await workers.start("echo", echo)
            await worker.kill()
            await worker.send_line("anything")
            await worker.kill()
