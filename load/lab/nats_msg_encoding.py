"""Ways to write MSG lines for one subscription from PUB lines of many subjects and sizes.

    python load/lab/nats_msg_encoding.py

The server uses the first one: it writes a byte that does not occur in the input as a mark, and
replaces it; else it moves bytes by a mask, or slices long messages. All ways must write the same
bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # For `python load/lab/...`.

from simplebus.core.protocol.frames import unaligned
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.nats.limits import NatsLimits
from simplebus.nats.protocol import encode
from simplebus.nats.protocol.events import MixedBatch
from simplebus.nats.protocol.parser import NatsParser
from simplebus.nats.protocol.subject_table import SubjectTable

ROUNDS = 15
READ_BYTES = 2 << 20
LETTERS = b"0123456789abcdefghijklmnopqrstuvwxyz"
WORD = np.dtype("<u8")
MSG = np.uint32(int.from_bytes(b"MSG ", "little"))

Written = bytes | bytearray | memoryview


def as_the_server(mix: MixedBatch, sid: bytes) -> Written:
    """Write a byte that does not occur in place of each sid, and replace it; else use a mask."""
    return encode.encode_mixed(mix, sid, None)


def slices_of_bytes(mix: MixedBatch, sid: bytes) -> Written:
    """Encode `mix` from slices of bytes between the insertions."""
    return _joined(with_msg_verbs(mix).tobytes(), mix, sid)


def slices_of_a_view(mix: MixedBatch, sid: bytes) -> Written:
    """Encode from views, without a copy; but the garbage collector tracks each view."""
    return _joined(with_msg_verbs(mix).data, mix, sid)


def _joined(text: bytes | memoryview, mix: MixedBatch, sid: bytes) -> bytes:
    ends = mix.subject_ends.tolist()
    bounds = zip([0, *ends], [*ends, len(text)], strict=True)
    return (b" " + sid).join([text[begin:end] for begin, end in bounds])


def all_but_a_mask(mix: MixedBatch, sid: bytes) -> Written:
    """Copy all bytes except the insertions by one mask."""
    data, word = with_msg_verbs(mix), np.frombuffer(b" " + sid, np.uint8)
    written = np.empty(data.size + mix.count * word.size, np.uint8)
    seams = mix.subject_ends + np.arange(mix.count) * word.size
    is_kept = np.ones(written.size, np.bool_)
    for at, byte in enumerate(word):
        is_kept[seams + at] = False
        written[seams + at] = byte
    written[is_kept] = data
    return written.data


def words_gathered(mix: MixedBatch, sid: bytes) -> Written:
    """Copy eight bytes at a time; words that span two messages are copied again."""
    data, word = with_msg_verbs(mix), np.frombuffer(b" " + sid, np.uint8)
    seams = mix.subject_ends + np.arange(mix.count) * word.size
    size = data.size + mix.count * word.size
    steps = np.full(-(-size // 8) + 1, 8)
    steps[0] = 0
    np.subtract.at(steps, (seams + word.size + 7) // 8, word.size)
    padded = np.concatenate([data, np.zeros(16, np.uint8)])
    written = unaligned(padded, WORD)[np.cumsum(steps[:-1])].view(np.uint8)
    for at, byte in enumerate(word):
        written[seams + at] = byte
    after = seams + word.size
    for at in range(7):
        rows = -after % 8 > at
        written[(after + at)[rows]] = data[(mix.subject_ends + at)[rows]]
    return written[:size].data


def with_msg_verbs(mix: MixedBatch) -> np.ndarray:
    """Return a copy with MSG in each line."""
    data = mix.data.copy()
    unaligned(data, MSG.dtype)[mix.bounds[:-1]] = MSG
    return data


WAYS: list[Callable[[MixedBatch, bytes], Written]] = [
    as_the_server,
    slices_of_bytes,
    slices_of_a_view,
    all_but_a_mask,
    words_gathered,
]


def read(letters: bytes) -> MixedBatch:
    """Return a read full of messages on 1,000 subjects, with 1 to 300 of these letters each."""
    random, data = Random(1), bytearray()
    while len(data) < READ_BYTES:
        payload = bytes(random.choices(letters, k=random.randrange(1, 301)))
        data += b"PUB load.%d %d\r\n%b\r\n" % (random.randrange(1000), len(payload), payload)
    buffer, parser = ReceiveBuffer(), NatsParser(NatsLimits(), SubjectTable())
    events = parser.receive(buffer, buffer.fill(bytes(data[:READ_BYTES])))
    return max((e for e in events if isinstance(e, MixedBatch)), key=lambda event: event.count)


def main() -> None:
    for name, letters in (("letters", LETTERS), ("all bytes", bytes(range(256)))):
        mix = read(letters)
        expected = bytes(words_gathered(mix, b"1"))
        for way in WAYS:
            assert bytes(way(mix, b"1")) == expected, way.__name__
            seconds = []
            for _ in range(ROUNDS):
                started_at = time.process_time()
                way(mix, b"1")
                seconds.append(time.process_time() - started_at)
            ns = median(seconds) / mix.count * 1e9
            print(f"{name:10} {way.__name__:20} {ns:6.0f} ns a message")


if __name__ == "__main__":
    main()
