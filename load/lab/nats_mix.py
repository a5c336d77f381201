"""Ways to write MSG lines for one subscription from a stretch of PUB lines of many subjects and
sizes. The server uses the first where some byte does not occur in the stretch, the second where all
do and messages are short, and else the third; the others are why.

    python load/lab/nats_mix.py

Rule 1: every way must write the same bytes before its time is told.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # So that it runs by its path.

from simplebus.core.frames import unaligned
from simplebus.core.receive import ReceiveBuffer
from simplebus.nats.events import Mix
from simplebus.nats.limits import NatsLimits
from simplebus.nats.parser import Parser
from simplebus.nats.table import SubjectTable

ROUNDS = 15
WORD = np.dtype("<u8")
MSG = np.uint32(int.from_bytes(b"MSG ", "little"))
LETTERS = bytes(range(48, 58)) + bytes(range(65, 91)) + bytes(range(97, 123))


def stamped(mix: Mix) -> np.ndarray:
    data = mix.data.copy()
    unaligned(data, np.dtype("<u4"))[mix.bounds[:-1]] = MSG
    return data


def marker_and_replace(mix: Mix, sid: bytes) -> bytes:
    """A byte that does not occur marks the places, and is replaced."""
    data = stamped(mix)
    text = data.data
    whole = bytes(text)
    for marker in (0xFF, 0xFE, 0xC0, 0xC1, *range(0xF5, 0xFE), *range(256)):
        if bytes([marker]) not in whole:
            break
    else:
        raise LookupError("every byte occurs")
    data[mix.subject_ends] = marker
    return bytes(text).replace(bytes([marker]), b" " + sid + b" ")


def words_gathered(mix: Mix, sid: bytes) -> bytes:
    """Eight bytes at a time, from where they were; those that cross a seam once more."""
    data = stamped(mix)
    k = len(sid) + 1
    word = b" " + sid
    n = mix.count
    size = data.size + n * k
    ends = mix.subject_ends
    # Output position of each inserted word.
    seams = ends + np.arange(n) * k
    count = -(-size // 8)
    out = np.empty(count, WORD)
    # For each output word the insertions that are wholly in front of where it begins.
    firsts = (seams + k + 7) // 8
    steps = np.zeros(count + 1, np.int64)
    np.add.at(steps, firsts, k) if False else None
    steps[:] = 8
    steps[0] = 0
    np.subtract.at(steps, firsts[firsts <= count], k)
    at = np.cumsum(steps[:count])
    padded = np.empty(data.size + 16, np.uint8)
    padded[: data.size] = data
    src = unaligned(padded, WORD)
    out[:] = src[at]
    # Words that a seam crosses: bytes from the left of it, the insertion, bytes from the right.
    flat = out.view(np.uint8)
    # left part: up to 7 bytes in front of the seam, in the word where the seam begins
    # word containing seam start holds left bytes with old shift
    for j in range(k):
        flat[seams + j] = word[j]
    # right of the seam up to the next word boundary
    after = seams + k
    left = (-after) % 8
    for j in range(7):
        rows = left > j
        flat[(after + j)[rows]] = data[(ends + j)[rows]]
    return flat[:size].tobytes()


def slices_joined(mix: Mix, sid: bytes) -> bytes:
    """A slice of the stretch between any two insertions."""
    data = stamped(mix)
    view = data.data
    ends = mix.subject_ends.tolist()
    pieces = [view[a:b] for a, b in zip([0, *ends], [*ends, len(view)], strict=True)]
    return (b" " + sid).join(pieces)


def slices_mapped(mix: Mix, sid: bytes) -> bytes:
    data = stamped(mix)
    view = bytes(data)
    ends = mix.subject_ends.tolist()
    pieces = map(view.__getitem__, map(slice, [0, *ends], [*ends, len(view)]))
    return (b" " + sid).join(pieces)


def all_slices_joined(mix: Mix, sid: bytes) -> bytes:
    data, word = mix.data.data, b" " + sid
    pieces = [
        piece
        for begin, line, end in zip(
            mix.bounds[:-1].tolist(),
            mix.subject_ends.tolist(),
            mix.bounds[1:].tolist(),
            strict=True,
        )
        for piece in (b"MSG ", data[begin + 4 : line], word, data[line:end])
    ]
    return b"".join(pieces)


def mask(mix: Mix, sid: bytes) -> bytes:
    """Everything but the insertions, by a flag for each byte."""
    data = stamped(mix)
    word = b" " + sid
    out = np.empty(data.size + mix.count * len(word), np.uint8)
    keep = np.ones(out.size, np.bool_)
    seams = mix.subject_ends + np.arange(mix.count) * len(word)
    for j in range(len(word)):
        keep[seams + j] = False
        out[seams + j] = word[j]
    out[keep] = data
    return out.tobytes()


def sample(letters: bytes | None, size: int) -> Mix:
    random = Random(1)
    parts = []
    total = 0
    while total < size:
        count = random.randrange(1, 301)
        payload = bytes(random.choices(letters, k=count)) if letters else random.randbytes(count)
        parts.append(b"PUB load.%d %d\r\n%b\r\n" % (random.randrange(1000), count, payload))
        total += len(parts[-1])
    buffer = ReceiveBuffer()
    data = b"".join(parts)[: (2 << 20)]
    parser = Parser(NatsLimits(), SubjectTable())
    [*events] = parser.receive(buffer, buffer.fill(data))
    best = max((e for e in events if isinstance(e, Mix)), key=lambda e: e.count)
    times = []
    for _ in range(ROUNDS):
        buffer.fill(data)
        parser._tail.clear()
        t = time.perf_counter()
        for _event in parser.receive(buffer, len(data)):
            pass
        times.append(time.perf_counter() - t)
    print(f"parse {best.count} messages: {median(times) / best.count * 1e9:6.1f} ns a message")
    return best


def main() -> None:
    ways: list[Callable[[Mix, bytes], bytes]] = [
        marker_and_replace,
        words_gathered,
        slices_joined,
        slices_mapped,
        all_slices_joined,
        mask,
    ]
    for name, letters in (("letters", LETTERS), ("all bytes", None)):
        mix = sample(letters, 2 << 20)
        expected = all_slices_joined(mix, b"1")
        for way in ways:
            try:
                assert way(mix, b"1") == expected, way.__name__
            except LookupError as error:
                print(f"{name:10} {way.__name__:22} {error}")
                continue
            times = []
            for _ in range(ROUNDS):
                t = time.perf_counter()
                way(mix, b"1")
                times.append(time.perf_counter() - t)
            print(
                f"{name:10} {way.__name__:22} {median(times) / mix.count * 1e9:6.1f} ns a message"
            )


if __name__ == "__main__":
    main()
