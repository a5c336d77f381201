"""Five ways to find the frames in a read. The server uses the first; the others are why.

    python load/lab/scan.py

Rule 1: every way must find the same ends before its time is told.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from statistics import median

import numpy as np

DELIMITER = b"<\r\n>"
HEADER_BYTES = 9
READ_BYTES = 1 << 19
ROUNDS = 7

Ends = list[int]


def one_unaligned_view(data: bytes) -> Ends:
    """Candidates are the '<'; an overlapping view of 4-byte words confirms each at once."""
    octets = np.frombuffer(data, np.uint8)
    words: np.ndarray = np.ndarray((len(data) - 3,), "<u4", buffer=octets, strides=(1,))
    candidates = np.flatnonzero(octets[:-3] == DELIMITER[0])
    wanted = int.from_bytes(DELIMITER, "little")
    return list(candidates[words[candidates] == wanted])


def four_gathers(data: bytes) -> Ends:
    """The same, with each of the other three bytes gathered on its own."""
    octets = np.frombuffer(data, np.uint8)
    found = np.flatnonzero(octets[:-3] == DELIMITER[0])
    for offset in (1, 2, 3):
        found = found[octets[found + offset] == DELIMITER[offset]]
    return list(found)


def four_comparisons(data: bytes) -> Ends:
    """Four whole-array comparisons, joined."""
    octets = np.frombuffer(data, np.uint8)
    size = len(data) - 3
    masks = [octets[i : i + size] == DELIMITER[i] for i in range(4)]
    return list(np.flatnonzero(masks[0] & masks[1] & masks[2] & masks[3]))


def regular_expression(data: bytes) -> Ends:
    return [match.start() for match in re.finditer(re.escape(DELIMITER), data)]


def plain_loop(data: bytes) -> Ends:
    """The shortest, and the best below some fifty frames."""
    ends, at = [], data.find(DELIMITER, HEADER_BYTES)
    while at >= 0:
        ends.append(at)
        at = data.find(DELIMITER, at + len(DELIMITER) + HEADER_BYTES)
    return ends


WAYS: tuple[Callable[[bytes], Ends], ...] = (
    one_unaligned_view,
    four_gathers,
    four_comparisons,
    regular_expression,
    plain_loop,
)


def frames(size_bytes: int) -> bytes:
    """A read full of whole frames with random printable payloads without a '<'."""
    count = READ_BYTES // (HEADER_BYTES + size_bytes + len(DELIMITER))
    letters = np.random.default_rng(1).integers(64, 127, (count, size_bytes), np.uint8)
    header = b"1\0\1\0\0\0\0\0\0"
    return b"".join(header + row.tobytes() + DELIMITER for row in letters)


def ns_per_frame(way: Callable[[bytes], Ends], data: bytes, count: int) -> float:
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter_ns()
        way(data)
        times.append(time.perf_counter_ns() - begun)
    return median(times) / count


def main() -> None:
    sizes = (16, 128, 1024)
    reads = {size: frames(size) for size in sizes}
    expected = {size: plain_loop(reads[size]) for size in sizes}
    print("ns a frame".ljust(22) + "".join(f"{size:>8} B" for size in sizes))
    for way in WAYS:
        cells = ""
        for size in sizes:
            assert way(reads[size]) == expected[size], f"{way.__name__} finds other frames"
            cells += f"{ns_per_frame(way, reads[size], len(expected[size])):>10.1f}"
        print(way.__name__.ljust(22) + cells)


if __name__ == "__main__":
    main()
