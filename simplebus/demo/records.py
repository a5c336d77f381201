"""Payloads of the demo, and the receipts that its subscribers write.

    payload   checksum ':' class ':' number ':' filler        1a2b3c4d:00001:0000000042:abc…
    receipt   one record in a file, written before its message is acked

Each record is written by one call, so a killed process leaves whole records; a torn one at the end
is ignored.
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

CORRUPT = -1
"""Number of a message whose payload was not published."""

RECEIPT = np.dtype(
    [
        ("class_id", "<u2"),
        ("redelivered", "u1"),  # 1 if the message was marked as redelivered.
        ("number", "<i8"),  # The publisher's number of the message in its class, or CORRUPT.
        ("message_id", "<i8"),  # Id that the server gave to the message.
    ]
)
Receipts = npt.NDArray[np.void]
"""Array of RECEIPT, in order of arrival."""

_PACK = struct.Struct("<HBqq").pack
assert struct.calcsize("<HBqq") == RECEIPT.itemsize


def payload(class_id: int, number: int) -> bytes:
    """Return the payload of message `number` of a class."""
    body = b"%05d:%010d:" % (class_id, number) + _FILLER[: number % len(_FILLER)]
    return b"%08x:" % zlib.crc32(body) + body


def message_number(class_id: int, content: bytes) -> int:
    """Return the number of the message with this payload; CORRUPT if no message has it."""
    digits = content[_NUMBER]
    if not digits.isdigit():
        return CORRUPT
    number = int(digits)
    return number if content == payload(class_id, number) else CORRUPT


class ReceiptLog:
    """File of a subscriber's receipts; `close` closes it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, receipts: Iterable[tuple[int, bool, int, int]]) -> None:
        """Write class id, redelivered, number and message id of each message.

        Returns when the system has the data, which then outlives the process.
        """
        data = b"".join([_PACK(*receipt) for receipt in receipts])
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        os.close(self._file)


def read_receipts(path: Path) -> Receipts:
    """Read receipts, without a torn record at the end."""
    data = path.read_bytes()
    return np.frombuffer(data, RECEIPT, count=len(data) // RECEIPT.itemsize)


def receipts(rows: Iterable[tuple[int, bool, int, int]]) -> Receipts:
    """Return receipts as an array."""
    return np.array(list(rows), RECEIPT)


def has_expected_id(receipts: Receipts) -> npt.NDArray[np.bool_]:
    """Return a mask of messages whose id is the publisher's number, as on a new bus."""
    numbers: npt.NDArray[np.int64] = receipts["number"]
    message_ids: npt.NDArray[np.int64] = receipts["message_id"]
    is_expected: npt.NDArray[np.bool_] = (numbers & MESSAGE_ID_MASK) == message_ids
    return is_expected
