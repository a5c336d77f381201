"""Ways to find frame boundaries in a read.

    python load/lab/frame_scanning.py

The server uses the first for frames of different lengths, the next two if all seem equally long,
and the last for a few frames. All ways must find the same ends.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # For `python load/lab/...`.

from simplebus.core.limits import RECEIVE_PADDING_BYTES
from simplebus.core.protocol.frame_splitter import SplitterScratch, find_delimiters

DELIMITER = b"<\r\n>"
HEADER_BYTES = 9
READ_BYTES = 1 << 21
ROUNDS = 15
SCRATCH = SplitterScratch(2 * READ_BYTES)

Ends = list[int] | npt.NDArray[np.int64]


def blocks_words_groups(data: bytearray) -> Ends:
    """Flag blocks of bytes, then groups of eight flags, twice."""
    return find_delimiters(data, 0, len(data) - RECEIVE_PADDING_BYTES, SCRATCH)[0]


def stride_and_count(data: bytearray) -> Ends:
    """Check one '<' per frame, and a delimiter at each multiple of the first frame's length."""
    stride, octets = _strides(data)
    assert np.count_nonzero(octets == DELIMITER[0]) == octets.size // stride
    return np.arange(stride - len(DELIMITER), octets.size, stride)


def stride_and_string_search(data: bytearray) -> Ends:
    """Like `stride_and_count`, with a search for the first '<' of each frame."""
    stride, octets = _strides(data)
    at = np.strings.find(octets.view(f"S{stride}"), DELIMITER[:1], HEADER_BYTES)
    assert (at == stride - len(DELIMITER)).all()
    return np.arange(stride - len(DELIMITER), octets.size, stride)


def _strides(data: bytearray) -> tuple[int, npt.NDArray[np.uint8]]:
    stride = data.find(DELIMITER, HEADER_BYTES) + len(DELIMITER)
    size = (len(data) - RECEIVE_PADDING_BYTES) // stride * stride
    octets = np.frombuffer(data, np.uint8, size)
    words: np.ndarray = np.ndarray((size // stride,), "<u4", data, stride - 4, (stride,))
    assert (words == int.from_bytes(DELIMITER, "little")).all()
    return stride, octets


def one_unaligned_view(data: bytearray) -> Ends:
    """Check all '<' at once through an overlapping view of 4-byte words."""
    octets = np.frombuffer(data, np.uint8)
    words: np.ndarray = np.ndarray((len(data) - 3,), "<u4", buffer=octets, strides=(1,))
    candidates = np.flatnonzero(octets[:-3] == DELIMITER[0])
    delimiter_word = int.from_bytes(DELIMITER, "little")
    return candidates[words[candidates] == delimiter_word]


def four_gathers(data: bytearray) -> Ends:
    """Like `one_unaligned_view`, but gather each of the other three bytes."""
    octets = np.frombuffer(data, np.uint8)
    found = np.flatnonzero(octets[:-3] == DELIMITER[0])
    for offset in (1, 2, 3):
        found = found[octets[found + offset] == DELIMITER[offset]]
    return found


def four_comparisons(data: bytearray) -> Ends:
    """Combine four comparisons of whole arrays."""
    octets = np.frombuffer(data, np.uint8)
    size = len(data) - 3
    masks = [octets[i : i + size] == DELIMITER[i] for i in range(4)]
    return np.flatnonzero(masks[0] & masks[1] & masks[2] & masks[3])


def regular_expression(data: bytearray) -> Ends:
    return [match.start() for match in re.finditer(re.escape(DELIMITER), data)]


def plain_loop(data: bytearray) -> Ends:
    """Loop over frames: the shortest code, and the fastest below about fifty frames."""
    ends, at = [], data.find(DELIMITER, HEADER_BYTES)
    while at >= 0:
        ends.append(at)
        at = data.find(DELIMITER, at + len(DELIMITER) + HEADER_BYTES)
    return ends


WAYS: tuple[Callable[[bytearray], Ends], ...] = (
    blocks_words_groups,
    stride_and_count,
    stride_and_string_search,
    one_unaligned_view,
    four_gathers,
    four_comparisons,
    regular_expression,
    plain_loop,
)


def frames(minimum: int, maximum: int) -> bytearray:
    """Return a read full of frames with printable payloads without '<', and spare bytes."""
    random = np.random.default_rng(1)
    frame_bytes = HEADER_BYTES + (minimum + maximum) // 2 + len(DELIMITER)
    sizes = random.integers(minimum, maximum + 1, READ_BYTES // frame_bytes - 100)
    letters = random.integers(64, 127, READ_BYTES, np.uint8).tobytes()
    header = b"1\0\1\0\0\0\0\0\0"
    whole = b"".join(header + letters[at : 2 * at] + DELIMITER for at in sizes)
    return bytearray(whole + bytes(RECEIVE_PADDING_BYTES))


def ns_per_frame(way: Callable[[bytearray], Ends], data: bytearray, count: int) -> float:
    times = []
    for _ in range(ROUNDS):
        started_at = time.perf_counter_ns()
        way(data)
        times.append(time.perf_counter_ns() - started_at)
    return median(times) / count


def main() -> None:
    reads = {
        "16 B": frames(16, 16),
        "128 B": frames(128, 128),
        "1 KiB": frames(1024, 1024),
        "1 to 300 B": frames(1, 300),
    }
    print("ns a frame".ljust(26) + "".join(f"{name:>12}" for name in reads))
    for way in WAYS:
        cells = ""
        for name, data in reads.items():
            if name == "1 to 300 B" and way in (stride_and_count, stride_and_string_search):
                cells += f"{'-':>12}"
                continue
            expected = plain_loop(data)
            assert list(way(data)) == expected, f"{way.__name__} finds other frames"
            cells += f"{ns_per_frame(way, data, len(expected)):>12.1f}"
        print(way.__name__.ljust(26) + cells)


if __name__ == "__main__":
    main()
