"""Processes that the demo and the bench start: told what to do on standard input, heard on standard
output.

Rule 1: whoever starts workers ends them, by their pid, whatever happens. A worker whose standard
input ends, ends too: so none outlives its parent.
Rule 2: Ctrl-C in the terminal is for the parent alone. It decides what becomes of its workers.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from simplebus.console.stdin_lines import Lines, standard_input
from simplebus.core.errors import BusError

_END_SECONDS = 5.0


class WorkerError(BusError):
    """A worker did not do its part. The text is one sentence."""


async def end_with_input(scope: trio.CancelScope) -> None:
    """For a worker that needs no more words: cancel the scope when its parent lets go of it."""
    async for _ in standard_input():
        pass
    scope.cancel()


class Worker:
    """A worker as its parent sees it."""

    def __init__(self, name: str, process: trio.Process, errors: Path) -> None:
        self.name = name
        self.process = process
        self.may_end = False
        """Whether its end is no surprise."""
        assert process.stdout is not None
        self.lines = Lines(process.stdout.receive_some)
        """What it says, until it ends."""
        self._errors = errors

    async def say(self, word: str) -> None:
        """Tell it something."""
        assert self.process.stdin is not None
        with contextlib.suppress(trio.BrokenResourceError):  # It has ended: `watch` says so.
            await self.process.stdin.send_all(word.encode() + b"\n")

    async def watch(self) -> None:
        """Wait for its end. Raises WorkerError if that was not due yet, or if it ended badly."""
        status = await self.process.wait()
        if not self.may_end or status > 0:
            raise WorkerError(f"the {self.name} ended with status {status}: {self._last_words()}")

    async def finish(self) -> None:
        """Let it come to its end."""
        self.may_end = True
        assert self.process.stdin is not None
        await self.process.stdin.aclose()
        await self.process.wait()

    async def kill(self) -> None:
        """End it at once, in the middle of whatever it does."""
        self.may_end = True
        self.process.kill()
        await self.process.wait()

    def _last_words(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class Workers:
    """All workers of one job. Made by `open_workers`."""

    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._folder = folder
        self._all: list[Worker] = []

    async def start(self, name: str, module: str, *arguments: object) -> Worker:
        """Run `python -m module arguments…`. From now on, its unexpected end is an error."""
        errors = self._folder / f"errors-{len(self._all)}"
        with errors.open("wb") as file:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        worker = Worker(name, process, errors)
        self._all.append(worker)
        self._nursery.start_soon(worker.watch)
        return worker

    async def end_all(self) -> None:
        """Kill what is left."""
        with trio.move_on_after(_END_SECONDS, shield=True):
            for worker in self._all:
                await worker.kill()
                assert worker.process.stdin is not None
                assert worker.process.stdout is not None
                await worker.process.stdin.aclose()
                await worker.process.stdout.aclose()


@asynccontextmanager
async def open_workers(folder: Path) -> AsyncIterator[Workers]:
    """Workers that are ended when the block ends. Their unexpected end raises WorkerError, in an
    exception group, in the block."""
    async with trio.open_nursery() as nursery:
        workers = Workers(nursery, folder)
        try:
            yield workers
            nursery.cancel_scope.cancel()
        finally:
            await workers.end_all()


def sentences(errors: BaseExceptionGroup[BaseException]) -> list[str]:
    """What the errors in a group say."""
    said = []
    for error in errors.exceptions:
        said += sentences(error) if isinstance(error, BaseExceptionGroup) else [str(error)]
    return said
