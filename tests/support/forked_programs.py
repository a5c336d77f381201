"""Fork server that runs `simplebus` and scripts without importing all modules again.

Importing takes half a second, and tests start hundreds of programs. A fork is a separate process
with its own arguments, folder, environment and files; only the import time is saved. Variables
that Python or its libraries read at start cannot be changed for a fork: see `can_fork_with`.

    tests           request and files ->   fork server                -> fork: `python -m simplebus`
    ForkedProgram   <- pid, exit status    (has imported everything)           or `python FILE`
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
import types
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_VARIABLE_PREFIXES = ("PYTHON", "LD_", "MALLOC_", "OPENBLAS_", "OMP_")
"""Prefixes of variables that Python and its libraries read when they start."""
REQUEST_BYTES_MAX = 1 << 17
NUMBER = struct.Struct("i")
EXCLUDED_MODULES = {"simplebus.spark", "simplebus.testing", "simplebus.__main__"}
"""Modules that take much longer to import, or must not be imported."""


def start_variables(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: environment[name] for name in environment if name.startswith(START_VARIABLE_PREFIXES)
    }


# Client, in the test process ---------------------------------------------------------------------


class ForkServer:
    """The process that forks programs, seen from the tests."""

    def __init__(self) -> None:
        self.start_variables = start_variables(dict(os.environ))
        self._lock = threading.Lock()
        own_socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_socket:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(server_socket.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[server_socket.fileno()],
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C ends the tests, which end this process.
            )
        self._socket = own_socket

    def fork_program(self, request: dict[str, Any], files: list[int]) -> None:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_fork_servers: list[ForkServer] = []
_fork_server_lock = threading.Lock()


def fork_server() -> ForkServer:
    """Return this process's fork server, started at the first call."""
    with _fork_server_lock:
        if not _fork_servers:
            _fork_servers.append(ForkServer())
            atexit.register(_fork_servers[0].close)
    return _fork_servers[0]


def can_fork_with(environment: dict[str, str]) -> bool:
    """Return True if a program with this environment may be a fork of the fork server."""
    return start_variables(environment) == fork_server().start_variables


class ForkedProgram(subprocess.Popen[bytes]):
    """A `Popen` whose process is started by the fork server, as leader of a process group.

    The command begins with `simplebus` or `python`: see `run_script`. Standard input, output and
    error must all be given.
    """

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        popen_arguments = inspect.signature(super()._execute_child).bind(*args, **kwargs).arguments
        request = {
            "arguments": popen_arguments["args"],
            "folder": str(popen_arguments["cwd"]),
            "environment": popen_arguments["env"],
        }
        self._reply_pipe, write_end = os.pipe()
        try:
            files = [
                popen_arguments["p2cread"],
                popen_arguments["c2pwrite"],
                popen_arguments["errwrite"],
                write_end,
            ]
            fork_server().fork_program(request, files)
        finally:
            os.close(write_end)
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(popen_arguments[name] for name in pipes))
        self.pid = self._read_number()
        self._child_created = True

    def _read_number(self) -> int:
        message = os.read(self._reply_pipe, NUMBER.size)
        assert message, "the fork server has ended"
        descriptor: int = NUMBER.unpack(message)[0]
        return descriptor

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        poller = select.poll()
        poller.register(self._reply_pipe, select.POLLIN)
        if not poller.poll(0 if wait_flags & os.WNOHANG else None):
            return 0, 0
        status = self._read_number()
        os.close(self._reply_pipe)
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


# Fork server process -----------------------------------------------------------------------------


def import_everything() -> None:
    import simplebus

    for found in pkgutil.walk_packages(simplebus.__path__, "simplebus.", onerror=lambda name: None):
        if not any(
            found.name == excluded or found.name.startswith(f"{excluded}.")
            for excluded in EXCLUDED_MODULES
        ):
            importlib.import_module(found.name)


def wait_for_requests(requests: socket.socket) -> list[str]:
    """Fork a process for each request. Return its command in the forked process only.

    The fork server itself exits when the tests close the socket.
    """
    waker, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    reply_pipes: dict[int, int] = {}  # By process id; receives the exit status.
    poller = select.poll()  # Unlike `select`, `poll` accepts any descriptor.
    for descriptor in (requests.fileno(), waker):
        poller.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if waker in ready:
            os.read(waker, 4096)
        if requests.fileno() in ready:
            message, files, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
            if not message:
                for pid in reply_pipes:  # The requesting process was killed.
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            if not (pid := os.fork()):
                return become_program(json.loads(message), files[:3])
            os.setpgid(pid, pid)
            os.write(files[3], NUMBER.pack(pid))
            reply_pipes[pid] = files[3]
            for descriptor in files[:3]:
                os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                # The reader may be gone.
                with contextlib.suppress(BrokenPipeError):
                    os.write(reply_pipes[ended[0]], NUMBER.pack(ended[1]))
                os.close(reply_pipes.pop(ended[0]))


def become_program(request: dict[str, Any], files: list[int]) -> list[str]:
    """Take over the files, folder and environment of a request, and return its command."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
    os.closerange(3, 1 << 16)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    process.STARTED_AT = time.time()
    return list(request["arguments"])


def run_script(arguments: list[str]) -> None:
    """Run a script as `python [-W error] [-u] FILE` or `python [-W error] -c CODE` would.

    The script imports `simplebus` anew: it has only those modules that it imports itself.
    """
    for name in [module for module in sys.modules if module.partition(".")[0] == "simplebus"]:
        del sys.modules[name]
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        arguments = arguments[2:]
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        arguments = arguments[1:]
    sys.argv = arguments
    if arguments[0] == "-c":
        sys.path[0] = ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    from simplebus.server import process

    import_everything()
    gc.freeze()  # Otherwise each fork copies all objects at its first garbage collection.
    program, *sys.argv[1:] = wait_for_requests(socket.socket(fileno=int(sys.argv[1])))
    if program == "python":
        run_script(sys.argv[1:])
    else:
        runpy.run_module("simplebus", run_name="__main__", alter_sys=True)
