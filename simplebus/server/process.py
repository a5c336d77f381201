"""What the server asks of the system: memory that stays or goes, as many sockets as may be.

Rule 1: what the system does not know or does not allow changes nothing.
Rule 2: where it gives no more memory, who asked for it loses its connection, in a sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
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


# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

log = logging.getLogger("simplebus.server")

_SPARE_DESCRIPTORS = 64
SPARE_FOR_OPERATORS = 16
"""Of these, so many are for who asks how the server is doing."""


def keep_temporary_arrays_mapped() -> None:
    """Have the allocator keep what batches free, instead of returning and faulting it in again.

    Measured with two classes interleaved: 110,000 page faults a second without this, none with it.
    Rings have mappings of their own and are returned all the same.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # Not glibc.
        return
    mallopt(_M_MMAP_THRESHOLD, 4 << 20)
    mallopt(_M_TRIM_THRESHOLD, 32 << 20)


def give_back() -> None:
    """Return to the system what is free, wherever it lies. It takes milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def blame(error: Exception, what: str) -> str:
    """Log what has ended a connection through no fault of its peer. Returns the reason in short."""
    if isinstance(error, MemoryError):
        log.error("%s: disconnected: the system has no memory for what it says", what)
        return "out of memory"
    log.error("%s: disconnected by an internal error", what, exc_info=error)
    return "internal error"


def descriptors_for_peers(more: int = 0) -> int:
    """Sockets of peers have descriptors below this one: some are left for the journal's files, and
    of these up to so many `more` are for other sockets."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = min(_SPARE_DESCRIPTORS, most // 4)
    return most - spare + min(more, spare // 2)


def allow_many_sockets() -> None:
    """Let this process have as many descriptors as it may ask for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
