"""What the system says of this process: memory, processor, descriptors.

Rule 1: what the system does not tell is left out.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time

from simplebus.monitor.counted import Counted

_PAGE_BYTES = resource.getpagesize()
STARTED = time.time()
"""About when this process has begun: when this was loaded."""


def resident_bytes() -> int:
    """Memory that the process has in use; 0 where that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
    return 0


def cpu_seconds() -> float:
    """Processor time of all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def descriptors() -> int:
    """How many are open; 0 where that cannot be told at once."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/fd").st_size
    return 0


def count(counted: Counted) -> None:
    """The metrics that every client library has."""
    counted.gauge("process_resident_memory_bytes", "Resident memory size.", resident_bytes())
    counted.counter("process_cpu_seconds", "Processor time spent.", cpu_seconds())
    counted.gauge("process_start_time_seconds", "When it has begun, since 1970.", STARTED)
    if opened := descriptors():
        counted.gauge("process_open_fds", "Open file descriptors.", opened)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    counted.gauge("process_max_fds", "As many may be open.", most)
