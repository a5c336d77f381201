"""Header parsing of a few frames: loop against arrays.

    python load/lab/header_parsing.py

All ways must read the same headers. The server's threshold between both is near the crossing that
this prints.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np

HEADER = np.dtype([("type", "u1"), ("class_id", ">u2"), ("message_id", ">i4"), ("timer", ">u2")])
ROW = struct.Struct(">BHiH")
FRAME_BYTES = 45
ROUNDS = 200
COUNTS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)

Rows = list[tuple[int, ...]]
Columns = tuple[np.ndarray, ...]


def by_loop(data: bytes, starts: list[int]) -> Rows:
    return [ROW.unpack_from(data, start) for start in starts]


def by_gather(data: bytes, starts: np.ndarray) -> np.ndarray:
    octets = np.frombuffer(data, np.uint8)
    return octets[starts[:, None] + np.arange(HEADER.itemsize)].view(HEADER)[:, 0]


def by_views(data: bytes, starts: np.ndarray) -> Columns:
    """One overlapping, unaligned view for each field."""
    return tuple(
        np.ndarray((len(data) - 8,), kind, buffer=data, offset=offset, strides=(1,))[starts]
        for kind, offset in (("u1", 0), (">u2", 1), (">i4", 3), (">u2", 7))
    )


def median_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        started_at = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started_at)
    return median(times) / 1e3


def main() -> None:
    print(f"{'frames':>7} {'loop':>10} {'gather':>10} {'views':>10}   us a batch")
    for count in COUNTS:
        data = np.random.default_rng(count).bytes(count * FRAME_BYTES)
        starts = np.arange(count) * FRAME_BYTES
        listed = starts.tolist()
        rows = by_loop(data, listed)
        assert [tuple(row) for row in by_gather(data, starts).tolist()] == rows
        columns = [column.tolist() for column in by_views(data, starts)]
        assert list(zip(*columns, strict=True)) == rows
        times = (
            median_us(partial(by_loop, data, listed)),
            median_us(partial(by_gather, data, starts)),
            median_us(partial(by_views, data, starts)),
        )
        print(f"{count:>7} " + " ".join(f"{us:>10.2f}" for us in times))


if __name__ == "__main__":
    main()
