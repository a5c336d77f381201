"""What the demo publishes, and what its subscribers write down.

    payload   checksum ':' class ':' number ':' filler        1a2b3c4d:00001:0000000042:abc…
    receipt   one record in a file, written before its message is acknowledged

Rule 1: a record is written in whole with one call, so that a process killed at any moment leaves
whole records behind; a torn one at the end is ignored.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from simplebus.core.limits import MESSAGE_ID_MASK

_FILLER = b"The quick brown fox jumps over the lazy"
_NUMBER = slice(15, 25)

PAYLOAD_BYTES_MIN = 26
PAYLOAD_BYTES_MAX = PAYLOAD_BYTES_MIN + len(_FILLER) - 1

DAMAGED = -1
"""Stands for the number of a message whose payload is not what was published."""

RECEIPT = np.dtype(
    [
        ("class_id", "<u2"),
        ("redelivered", "u1"),  # Whether the message came marked as sent again.
        ("number", "<i8"),  # The publisher's number of the message in its class, or DAMAGED.
        ("message_id", "<i8"),  # The bus's number of it.
    ]
)
Receipts = npt.NDArray[np.void]
"""An array of RECEIPT, in the order in which the messages came."""

_PACK = struct.Struct("<HBqq").pack
assert struct.calcsize("<HBqq") == RECEIPT.itemsize


def payload(class_id: int, number: int) -> bytes:
    """What the publisher sends as its message `number` of a class."""
    body = b"%05d:%010d:" % (class_id, number) + _FILLER[: number % len(_FILLER)]
    return b"%08x:" % zlib.crc32(body) + body


def number_in(class_id: int, content: bytes) -> int:
    """The number of the message with this content, or DAMAGED if none has exactly this content."""
    digits = content[_NUMBER]
    if not digits.isdigit():
        return DAMAGED
    number = int(digits)
    return number if content == payload(class_id, number) else DAMAGED


class Notebook:
    """Where a subscriber writes receipts down. Owns the file; `close` closes it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, receipts: Iterable[tuple[int, bool, int, int]]) -> None:
        """Write (class id, redelivered, number, message id) of each message. Returns when the
        system has them: they then outlive the process."""
        data = b"".join([_PACK(*receipt) for receipt in receipts])
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Receipts:
    """What was written down, without a torn record at the end."""
    data = path.read_bytes()
    return np.frombuffer(data, RECEIPT, count=len(data) // RECEIPT.itemsize)


def receipts(rows: Iterable[tuple[int, bool, int, int]]) -> Receipts:
    """The same as an array, without a file."""
    return np.array(list(rows), RECEIPT)


def is_named(receipts: Receipts) -> npt.NDArray[np.bool_]:
    """Whether each message carried the id that the bus must have given it: alone on a fresh bus,
    a publisher's numbers are the bus's."""
    named: npt.NDArray[np.bool_] = (receipts["number"] & MESSAGE_ID_MASK) == receipts["message_id"]
    return named
