"""Programs that need not import what they run: each is a fork of a process that has done so once.

A Python that runs `simplebus` works for half a second before it begins, and tests start hundreds.

Rule 1: it is a process of its own with the arguments, folder, environment and files that it is
given, and ends as any does. What it saves is the time of importing, and no more.
Rule 2: whatever steers a Python itself is steered when that starts: see `can_run`.

    tests     request and files ->   the process that has imported   -> fork: `python -m simplebus`
    Forked    <- pid, how it ended   everything, and waits
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_VARIABLE_PREFIXES = ("PYTHON", "LD_", "MALLOC_", "OPENBLAS_", "OMP_")
"""Variables that begin like this are heard by Python and its libraries when they start."""
REQUEST_BYTES_MAX = 1 << 17
NUMBER = struct.Struct("i")
EXCLUDED_MODULES = {"simplebus.spark", "simplebus.testing", "simplebus.__main__"}
"""What takes much longer to import, and what is no module."""


def start_variables(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: environment[name] for name in environment if name.startswith(START_VARIABLE_PREFIXES)
    }


# Where programs are begun -------------------------------------------------------------------------


class ForkServer:
    """The process that has imported everything, begun when it is first needed."""

    def __init__(self) -> None:
        self.start_variables = start_variables(dict(os.environ))
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is for the tests, which end it.
            )
        self._line = ours

    def fork_program(self, request: dict[str, Any], files: list[int]) -> None:
        with self._lock:
            socket.send_fds(self._line, [json.dumps(request).encode()], files)

    def close(self) -> None:
        self._line.close()
        self._process.wait()


_forkers: list[ForkServer] = []
_one_at_a_time = threading.Lock()


def fork_server() -> ForkServer:
    """This process's own."""
    with _one_at_a_time:
        if not _forkers:
            _forkers.append(ForkServer())
            atexit.register(_forkers[0].close)
    return _forkers[0]


def can_fork_with(environment: dict[str, str]) -> bool:
    """Whether a program with this environment would be steered as the one that it is forked of."""
    return start_variables(environment) == fork_server().start_variables


class ForkedProgram(subprocess.Popen[bytes]):
    """`simplebus` with these arguments. How it begins and how its end is heard of is all that
    differs from its base.

    Standard input, output and error are all to be given: what tests are told by is not for it.
    """

    def _execute_child(self, *given: Any, **named: Any) -> None:
        told = inspect.signature(super()._execute_child).bind(*given, **named).arguments
        request = {
            "arguments": told["args"],
            "folder": str(told["cwd"]),
            "environment": told["env"],
        }
        self._told, end = os.pipe()
        try:
            files = [told["p2cread"], told["c2pwrite"], told["errwrite"], end]
            fork_server().fork_program(request, files)
        finally:
            os.close(end)
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(told[name] for name in pipes))
        self.pid = self._hear()
        self._child_created = True

    def _hear(self) -> int:
        said = os.read(self._told, NUMBER.size)
        assert said, "the process that programs are forked of has ended"
        number: int = NUMBER.unpack(said)[0]
        return number

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        heard = select.poll()
        heard.register(self._told, select.POLLIN)
        if not heard.poll(0 if wait_flags & os.WNOHANG else None):
            return 0, 0
        status = self._hear()
        os.close(self._told)
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


# Where they are forked ----------------------------------------------------------------------------


def import_everything() -> None:
    import simplebus

    for found in pkgutil.walk_packages(simplebus.__path__, "simplebus.", onerror=lambda name: None):
        if not any(
            found.name == each or found.name.startswith(f"{each}.") for each in EXCLUDED_MODULES
        ):
            importlib.import_module(found.name)


def wait_for_requests(line: socket.socket) -> list[str]:
    """Returns in each process that is forked, as what has been asked for: its arguments. In this
    one it does not: that ends with the one who asks."""
    waker, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    whom: dict[int, int] = {}  # To tell how a process has ended.
    heard = select.poll()  # Whatever their numbers are, which `select` is particular about.
    for each in (line.fileno(), waker):
        heard.register(each, select.POLLIN)
    while True:
        ready = {number for number, _ in heard.poll()}
        if waker in ready:
            os.read(waker, 4096)
        if line.fileno() in ready:
            said, files, _, _ = socket.recv_fds(line, REQUEST_BYTES_MAX, 4)
            if not said:
                for pid in whom:  # Whoever asked for them was killed itself.
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            if not (pid := os.fork()):
                return become_program(json.loads(said), files[:3])
            os.write(files[3], NUMBER.pack(pid))
            whom[pid] = files[3]
            for each in files[:3]:
                os.close(each)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                # Who was told a number may be gone, or wait for nothing more.
                with contextlib.suppress(BrokenPipeError):
                    os.write(whom[ended[0]], NUMBER.pack(ended[1]))
                os.close(whom.pop(ended[0]))


def become_program(request: dict[str, Any], files: list[int]) -> list[str]:
    """Be like a process that has just begun."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 1 << 16)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    process.STARTED_AT = time.time()
    return list(request["arguments"])


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    from simplebus.server import process

    import_everything()
    gc.freeze()  # Or each fork copies all that there is when it looks for garbage.
    sys.argv[1:] = wait_for_requests(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("simplebus", run_name="__main__", alter_sys=True)
