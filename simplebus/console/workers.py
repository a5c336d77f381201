"""Worker processes of the demo and the bench, controlled through standard input and output.

The parent always kills its workers by pid, and a worker ends when its standard input ends, so no
worker outlives its parent. Workers run in their own session, so Ctrl-C interrupts only the parent,
which decides about its workers.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from simplebus.console.stdin_lines import LineReader, read_stdin_lines
from simplebus.core.errors import BusError

_KILL_SECONDS_MAX = 5.0


class WorkerError(BusError):
    """A worker failed. The text is one sentence."""


async def cancel_at_stdin_end(scope: trio.CancelScope) -> None:
    """Cancel the scope when standard input ends. For a worker that reads no more commands."""
    async for _ in read_stdin_lines():
        pass
    scope.cancel()


class Worker:
    """Worker process, as seen by its parent."""

    def __init__(self, name: str, process: trio.Process, errors: Path) -> None:
        self.name = name
        self.process = process
        self.is_exit_expected = False
        """True if the process may end without an error."""
        assert process.stdout is not None
        self.lines = LineReader(process.stdout.receive_some)
        """Lines of the worker's standard output."""
        self._errors = errors

    async def send_line(self, line: str) -> None:
        """Send a line to the worker's standard input."""
        assert self.process.stdin is not None
        with contextlib.suppress(trio.BrokenResourceError):  # It has ended: `watch` raises.
            await self.process.stdin.send_all(line.encode() + b"\n")

    async def watch(self) -> None:
        """Wait until the process ends. Raises WorkerError if it ends early or with a status above
        0.
        """
        status = await self.process.wait()
        if not self.is_exit_expected or status > 0:
            raise WorkerError(
                f"the {self.name} ended with status {status}: {self._last_error_line()}"
            )

    async def end_input(self) -> None:
        """Close the worker's standard input and wait until the process ends."""
        self.is_exit_expected = True
        assert self.process.stdin is not None
        await self.process.stdin.aclose()
        await self.process.wait()

    async def kill(self) -> None:
        """Kill the process and wait until it has ended."""
        self.is_exit_expected = True
        self.process.kill()
        await self.process.wait()

    def _last_error_line(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no error output"


class Workers:
    """All workers of one job. Made by `open_workers`."""

    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._folder = folder
        self._workers: list[Worker] = []

    async def start(self, name: str, module: str, *arguments: object) -> Worker:
        """Run `python -m module arguments…`. Its unexpected end raises WorkerError in
        `open_workers`.
        """
        errors = self._folder / f"errors-{len(self._workers)}"
        with errors.open("wb") as file:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        worker = Worker(name, process, errors)
        self._workers.append(worker)
        self._nursery.start_soon(worker.watch)
        return worker

    async def kill_all(self) -> None:
        """Kill all workers that still run."""
        with trio.move_on_after(_KILL_SECONDS_MAX, shield=True):
            for worker in self._workers:
                await worker.kill()
                assert worker.process.stdin is not None
                assert worker.process.stdout is not None
                await worker.process.stdin.aclose()
                await worker.process.stdout.aclose()


@asynccontextmanager
async def open_workers(folder: Path) -> AsyncIterator[Workers]:
    """Give `Workers` that are killed when the block ends.

    The unexpected end of a worker cancels the block and raises WorkerError in an exception group.
    """
    async with trio.open_nursery() as nursery:
        workers = Workers(nursery, folder)
        try:
            yield workers
            nursery.cancel_scope.cancel()
        finally:
            await workers.kill_all()


def error_texts(errors: BaseExceptionGroup[BaseException]) -> list[str]:
    """Return the messages of all errors in a group."""
    texts = []
    for error in errors.exceptions:
        texts += error_texts(error) if isinstance(error, BaseExceptionGroup) else [str(error)]
    return texts
