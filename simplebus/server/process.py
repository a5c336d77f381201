"""Resources of the process: memory, CPU time and file descriptors.

Functions have no effect where the system does not support them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import time
from collections.abc import Awaitable, Callable

from simplebus.logs.event_logger import EventLogger
from simplebus.monitor.metrics_builder import MetricsBuilder

_PAGE_BYTES = resource.getpagesize()
STARTED_AT = time.time()
"""Unix time at which this module was loaded, which is about the start of the process."""


def resident_bytes() -> int:
    """Return the resident memory of the process; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
    return 0


def cpu_seconds() -> float:
    """Return the CPU time of all threads of the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def open_descriptor_count() -> int:
    """Return the number of open file descriptors; 0 if it cannot be read cheaply."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/fd").st_size
    return 0


def add_process_metrics(metrics_builder: MetricsBuilder) -> None:
    """Add the `process_…` metrics that Prometheus client libraries define."""
    metrics_builder.gauge(
        "process_resident_memory_bytes", "Resident memory size.", resident_bytes()
    )
    metrics_builder.counter(
        "process_cpu_seconds", "CPU time used by all threads, in seconds.", cpu_seconds()
    )
    metrics_builder.gauge(
        "process_start_time_seconds",
        "Start time of the process, in seconds since 1970.",
        STARTED_AT,
    )
    if opened := open_descriptor_count():
        metrics_builder.gauge("process_open_fds", "Open file descriptors.", opened)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    metrics_builder.gauge("process_max_fds", "Limit of open file descriptors.", limit)


log = EventLogger("simplebus.server")

_RESERVED_DESCRIPTORS = 64
SPARE_HTTP_DESCRIPTORS = 16
"""Reserved descriptors that HTTP connections may use."""


def log_connection_fault(error: Exception, peer: str) -> str:
    """Log an internal error that ended a connection. Returns a short reason."""
    if isinstance(error, MemoryError):
        log.error(
            "connection.out_of_memory",
            "{peer}: disconnected: out of memory for its messages",
            peer=peer,
        )
        return "out of memory"
    log.error(
        "connection.failed", "{peer}: disconnected by an internal error", peer=peer, exc_info=error
    )
    return "internal error"


async def run_logged(task: Callable[[], Awaitable[object]]) -> None:
    """Run a task. An internal error ends the task only, and is logged."""
    try:
        await task()
    except Exception:
        log.exception("task.failed", "a task of the server failed with an internal error")


def peer_descriptor_limit(extra: int = 0) -> int:
    """Return the limit for descriptors of peers: some are reserved for files of the journal.

    A caller may use up to `extra` of the reserved descriptors, but at most half of them.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    reserved = min(_RESERVED_DESCRIPTORS, limit // 4)
    return limit - reserved + min(extra, reserved // 2)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors to the hard limit."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def grow_descriptor_table(count: int) -> None:
    """Let the kernel allocate its table of descriptors for `count` of them now.

    In a process with threads the kernel waits at each doubling of the table for all cores, 10 to 20
    milliseconds, within `accept`. The table never shrinks.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = min(count, limit) - 1
    with contextlib.suppress(OSError), open(os.devnull) as file:
        # The lowest free descriptor from `highest` on, so that none in use is replaced.
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, highest))
