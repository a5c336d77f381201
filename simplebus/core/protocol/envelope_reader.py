"""Envelopes that have the same fields, read field by field, all of them at once.

Rule 1: an envelope that may be other than it seems is odd: it is read by `decode`, not here.
Rule 2: what is the same in all is read once and compared; what is not is cut out of each and looked
up among those seen before.
Rule 3: a stuffing before the payload shifts what stands behind it, so it makes an envelope odd. In
texts that are the same in all it is looked for once, elsewhere in each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol.envelope import (
    CHANNEL,
    EXPIRES,
    HEADERS,
    KEY,
    NOT_BEFORE,
    RESERVED,
    STUFFED,
    TIMES,
    TIMES_BYTES,
    channel_of,
    headers_of,
)
from simplebus.core.protocol.frames import (
    DELIMITER,
    Flags,
    FrameBatch,
    Integers,
    Item,
    strided,
    unaligned,
)

Numbers = npt.NDArray[np.uint32]
"""Shape (n,)."""
Seconds = npt.NDArray[np.float64]
"""Shape (n,)."""

NEVER = float("inf")

_BYTE: np.dtype[np.uint8] = np.dtype("u1")
_LENGTH: np.dtype[np.uint16] = np.dtype(">u2")
_WORD: np.dtype[np.uint32] = np.dtype("<u4")
_LONG: np.dtype[np.uint64] = np.dtype("<u8")
_MILLISECONDS: np.dtype[np.uint64] = np.dtype(">u8")
_STUFFED_WORD = np.uint32(int.from_bytes(STUFFED, "little"))
_ONES = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)
_OPENERS = np.uint64(0x3C3C3C3C3C3C3C3C)

# With more odd frames than one in this many, the plain loop is faster.
_ODD_ONE_IN = 8


class EnvelopeReader:
    """Reads envelopes that have the same fields, one field after the other in all of them.

    What is read of an odd one means nothing. It stays within its frame, and is put right later.
    """

    def __init__(self, batch: FrameBatch, fields: int, contents: Integers) -> None:
        self._batch = batch
        self._fields = fields
        self._contents = contents
        """How long they are."""
        self._first = batch.data[HEADER_BYTES : batch.ends[0] - DELIMITER_BYTES].tobytes()
        self._odd: Flags = _column(batch, _BYTE, 0) != fields
        self._at: int | Integers = 1 + TIMES_BYTES[fields & TIMES]
        """Where the next field begins in the content; one number while it is the same in all."""
        self._all_same = True
        """Whether what was read of the texts is the same in all."""

    @classmethod
    def of(cls, batch: FrameBatch) -> EnvelopeReader | None:
        """None when the frames cannot be read so."""
        fields = int(batch.data[HEADER_BYTES])
        contents = batch.lengths - (HEADER_BYTES + DELIMITER_BYTES)
        if fields & RESERVED or contents.min() < 1 + TIMES_BYTES[fields & TIMES]:
            return None
        return cls(batch, fields, contents)

    def odd_ones(self) -> list[int] | None:
        """Indexes of the frames that `decode` has to look at; None when there are too many."""
        if not self._all_same:
            self._find_stuffed()
        elif STUFFED in self._first[: self._at]:
            return None
        if np.count_nonzero(self._odd) * _ODD_ONE_IN > self._batch.count:
            return None
        return np.flatnonzero(self._odd).tolist()

    # Times ---------------------------------------------------------------------------------------

    def times(self) -> tuple[Seconds, Seconds]:
        """Expiry and opening of each."""
        if self._fields & TIMES:
            self._odd |= self._stuffed_in_times()
        return self._seconds(EXPIRES, NEVER), self._seconds(NOT_BEFORE, 0.0)

    def _seconds(self, which: int, otherwise: float) -> Seconds:
        if not self._fields & which:
            return np.full(self._batch.count, otherwise)
        at = 1 + TIMES_BYTES[self._fields & (which - 1)]
        return _column(self._batch, _MILLISECONDS, at).astype(np.float64) / 1000.0

    def _stuffed_in_times(self) -> Flags:
        """In which contents a stuffing begins in the times or the fields byte before them."""
        batch, end = self._batch, 1 + TIMES_BYTES[self._fields & TIMES]
        stuffed: Flags = np.full(batch.count, self._fields == DELIMITER[0])
        for at in range(1, end, 8):
            other = _column(batch, _LONG, at) ^ _OPENERS
            stuffed |= ((other - _ONES) & ~other & _TOPS) != 0  # One of its eight bytes is 0.
        suspects = np.flatnonzero(stuffed)
        if suspects.size:
            places = batch.starts[suspects, None] + np.arange(HEADER_BYTES, HEADER_BYTES + end)
            words = unaligned(batch.data, _WORD)[places]
            stuffed[suspects] = (words == _STUFFED_WORD).any(axis=1)
        return stuffed

    # Texts ---------------------------------------------------------------------------------------

    def channels(self) -> tuple[dict[str, int], Numbers]:
        """The channels, and the number of each one's."""
        numbers: Numbers = np.zeros(self._batch.count, np.uint32)
        if not self._fields & CHANNEL:
            return {"": 0}, numbers
        names: dict[str, int] = {}
        texts = self._next_texts()
        found, bad = dict.fromkeys(texts, 0), set()
        for text in found:
            try:
                found[text] = names.setdefault(channel_of(text[2:]), len(names))
            except RemoteProtocolError:
                bad.add(text)
        self._drop_bad(texts, bad)
        if len(names) > 1:
            numbers = np.fromiter(map(found.__getitem__, texts), np.uint32, len(texts))
        return names, numbers

    def keys(self) -> tuple[Integers, Integers]:
        """Where in the batch's data the key of each begins and ends, where nothing was read yet."""
        starts = self._batch.starts + HEADER_BYTES
        if self._fields & CHANNEL:
            self._next_places()
        if not self._fields & KEY:
            return starts, starts
        begins, ends = self._next_places()
        return starts + begins + 2, starts + ends

    def skip_key(self) -> None:
        if self._fields & KEY:
            self._next_places()

    def skip_headers(self) -> None:
        if self._fields & HEADERS:
            texts = self._next_texts()
            bad = set()
            for text in set(texts):
                try:
                    headers_of(text[2:])
                except RemoteProtocolError:
                    bad.add(text)
            self._drop_bad(texts, bad)

    def _drop_bad(self, texts: list[bytes], bad: set[bytes]) -> None:
        """Frames with these texts are odd."""
        if len(texts) == 1:
            self._odd |= texts[0] in bad
        elif bad:
            self._odd |= np.array([text in bad for text in texts])

    def _next_texts(self) -> list[bytes]:
        """The next text of each with its length; only one when it is the same in all."""
        at = self._at
        if isinstance(at, int):
            end = at + 2 + int.from_bytes(self._first[at : at + 2], "big")
            text = self._first[at:end]
            if end <= self._contents.min():
                different = self._different(at, text)
                if np.count_nonzero(different) * _ODD_ONE_IN <= self._batch.count:
                    self._odd |= different
                    self._at = end
                    return [text]
        begins, ends = self._next_places()
        starts = self._batch.starts + HEADER_BYTES
        places = zip((starts + begins).tolist(), (starts + ends).tolist(), strict=True)
        raw = self._batch.data.tobytes()
        return [raw[begin:end] for begin, end in places]

    def _different(self, at: int, text: bytes) -> Flags:
        """Which contents do not hold this text there. All of them are long enough."""
        different: Flags = np.zeros(self._batch.count, np.bool_)
        for end in range(len(text), 0, -8):  # Words that end here; the first one is longer.
            words = _column(self._batch, _LONG, at + end - 8)
            if end < 8:
                words = words >> np.uint64(8 * (8 - end))
            expected = np.uint64(int.from_bytes(text[max(0, end - 8) : end], "little"))
            different |= words != expected
        return different

    def _next_places(self) -> tuple[int | Integers, Integers]:
        """Where the next text of each begins and ends in the content, and with it the length."""
        at, contents = self._at, self._contents
        out: Flags = contents < at + 2
        if out.any():
            at = np.where(out, 0, at).astype(np.int64)
        ends = _column(self._batch, _LENGTH, at).astype(np.int64) + at + 2
        out |= ends > contents
        ends[out] = 0
        self._odd |= out
        self._at = int(ends[0]) if (ends == ends[0]).all() else ends
        self._all_same = False
        return at, ends

    def _find_stuffed(self) -> None:
        """Mark what is stuffed before its payload, and so was not read rightly."""
        batch = self._batch
        if STUFFED[1:] not in batch.data.tobytes():
            return
        places = np.flatnonzero(unaligned(batch.data, _WORD) == _STUFFED_WORD)
        indexes = np.searchsorted(batch.starts, places, "right") - 1
        nuls = places + len(STUFFED) - 1 - batch.starts[indexes] - HEADER_BYTES
        ends = self._at if isinstance(self._at, int) else self._at[indexes]
        in_content = nuls >= len(STUFFED) - 1
        self._odd[indexes[in_content & (nuls < ends)]] = True


def _column(batch: FrameBatch, dtype: np.dtype[Item], offset: int | Integers) -> npt.NDArray[Item]:
    """One item of each content, `offset` bytes into it, or before it."""
    if batch.stride and isinstance(offset, int):
        return strided(batch.data, dtype, HEADER_BYTES + offset, batch.stride, batch.count)
    items: npt.NDArray[Item] = unaligned(batch.data, dtype)[batch.starts + (HEADER_BYTES + offset)]
    return items
