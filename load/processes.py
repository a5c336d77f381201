"""Child process: output, CPU time, memory and end.

A child is stopped by its pid, and dies with its parent. Every wait has a deadline. One thread that
ends with the program starts all children, because the kernel takes the starting thread for the
parent. `setpriv` sets the signal: a `preexec_fn` would run Python code in the forked child, where
the finalizers of thread-local objects shut down sockets that the child shares with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

POLL_S = 0.005
STOP_S = 10.0
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
_LIBC = ctypes.CDLL(None)
_STARTER = ThreadPoolExecutor(1, "starter of processes")


class LoadError(Exception):
    """A measurement is invalid or failed. The text is one sentence."""


class Process:
    """Child process, stopped at the end of its `with` block.

    Its output goes to files, so that it never blocks on a pipe.
    """

    def __init__(
        self, name: str, command: Sequence[str | Path], *, directory: Path | None = None
    ) -> None:
        self.name = name
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop().
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._child = _STARTER.submit(
            subprocess.Popen,
            [*DIE_WITH_PARENT, *(str(word) for word in command)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            cwd=directory,
        ).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._child.pid

    def is_running(self) -> bool:
        return self._child.poll() is None

    def output(self) -> str:
        return _read_whole_lines(self._output.fileno())

    def errors(self) -> str:
        return _read_whole_lines(self._errors.fileno())

    def wait_for_line(self, words: str, *, timeout_s: float) -> str:
        """Return the first complete line of either output that contains `words`."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self._child.poll() is not None
            for line in (self.output() + self.errors()).splitlines(keepends=True):
                if words in line and line.endswith("\n"):
                    return line.rstrip()
            if ended:
                raise LoadError(
                    f"{self.name} ended before it printed {words!r}: {self.last_words()}"
                )
            if time.monotonic() > deadline:
                raise LoadError(
                    f"{self.name} did not print {words!r} within {timeout_s:g} s: "
                    f"{self.last_words()}"
                )
            time.sleep(POLL_S)

    def finish(self, *, timeout_s: float) -> str:
        """Wait for a successful end, and return the output."""
        try:
            status = self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            raise LoadError(f"{self.name} did not end within {timeout_s:g} s") from None
        if status != 0:
            raise LoadError(f"{self.name} ended with status {status}: {self.last_words()}")
        return self.output()

    def last_words(self) -> str:
        """Return the end of the error output, or of the output if the error output is empty."""
        return (self.errors().strip() or self.output().strip() or "it printed nothing")[-600:]

    def stop(self) -> None:
        """Stop by SIGTERM, then SIGKILL. Does nothing if the process has ended."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            try:
                self._child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait(STOP_S)
        with contextlib.suppress(OSError):
            self._output.close()
            self._errors.close()

    def kill(self) -> None:
        """Kill by SIGKILL and wait for the end. `stop` must still be called."""
        self._child.kill()
        self._child.wait(STOP_S)

    def cpu_s(self) -> float:
        """Return user and system time of all threads, including ended ones."""
        return time.clock_gettime(_cpu_clock(self.pid))

    def memory_bytes(self) -> int:
        return self._status_bytes("VmRSS")

    def descriptors(self) -> int:
        """Return the number of open files and sockets."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def reset_peak_memory(self) -> None:
        """Reset the peak, if the kernel allows it."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak_memory_bytes(self) -> int:
        return self._status_bytes("VmHWM")

    def _status_bytes(self, field: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise LoadError(f"/proc has no {field} of {self.name}")


@contextlib.contextmanager
def separate_core(pid: int) -> Iterator[None]:
    """Keep the main thread of a process on one core, and this thread off it."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(pid, cores[:1])
    os.sched_setaffinity(0, cores[1:] or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def real_time_priority() -> Iterator[bool]:
    """Give this thread precedence over normal threads, and yield True if the system permits it.

    Otherwise the thread may wait up to 4 ms (measured) for another thread of its core, even for one
    at low priority.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    is_permitted = True
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        is_permitted = False
    try:
        yield is_permitted
    finally:
        os.sched_setscheduler(0, policy, parameters)


def _cpu_clock(pid: int) -> int:
    """Return the id of the CPU clock of a process, which counts ns; /proc counts ticks of 10 ms."""
    clock = ctypes.c_int()
    if _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise LoadError(f"process {pid} has no CPU clock; it has ended")
    return clock.value


def _read_whole_lines(handle: int) -> str:
    return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace")
