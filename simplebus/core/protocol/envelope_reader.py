"""Array reader for envelopes that have the same fields.

Each field is read from all envelopes at once. If a text is the same in all envelopes, one
comparison shows this; otherwise the text of each envelope is looked up among the texts read before.
Envelopes with other fields are flagged as irregular, and the caller passes them to `decode`. So are
envelopes with byte stuffing before the payload, because stuffing shifts the fields behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

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
    check_headers,
    decode_channel,
    decode_channels,
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

_UINT8: np.dtype[np.uint8] = np.dtype("u1")
_LENGTH: np.dtype[np.uint16] = np.dtype(">u2")
_UINT32: np.dtype[np.uint32] = np.dtype("<u4")
_UINT64: np.dtype[np.uint64] = np.dtype("<u8")
_MILLISECONDS: np.dtype[np.uint64] = np.dtype(">u8")
_TIMES_BYTES: Integers = np.array(TIMES_BYTES, np.int64)
_STUFFED_WORD = np.uint32(int.from_bytes(STUFFED, "little"))
_ONES = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)
_OPENERS = np.uint64(0x3C3C3C3C3C3C3C3C)

# Longer texts are not compared with those of the other envelopes: each eight bytes take a
# microsecond or more.
_COMPARED_TEXT_BYTES_MAX = 512

# With more than one irregular frame in this many, the loop is faster.
_REGULAR_PER_IRREGULAR_MIN = 8


# A full cache loses its oldest entries one by one. Python copies the dict from time to time, which
# takes several milliseconds with more entries than this.
_CACHED_TEXTS_MAX = 40_960
_CACHED_TEXT_BYTES_MAX = 256
_PLACEHOLDERS = 4096
_names_by_text = {b"\xff\xff" + number.to_bytes(2, "big"): "" for number in range(_PLACEHOLDERS)}
"""Decoded channels by their text with its length prefix.

The placeholders equal no text. With them, this dict does not grow in the same turn as the channel
table of a class that receives the same channels: both together take several milliseconds.
"""


def _decode_texts(texts: list[bytes]) -> Sequence[str | None]:
    """Return the channels of different texts with their length prefixes; None if malformed."""
    cached_names = list(map(_names_by_text.get, texts))
    if None not in cached_names:
        return cached_names
    new = [text for text, name in zip(texts, cached_names, strict=True) if name is None]
    names = decode_channels([text[2:] for text in new])
    if names is None:
        return [
            name or _decode_or_none(text) for text, name in zip(texts, cached_names, strict=True)
        ]
    decoded = dict(zip(new, names, strict=True))
    if max(map(len, new)) <= _CACHED_TEXT_BYTES_MAX:
        _names_by_text.update(decoded)
        excess = len(_names_by_text) - _CACHED_TEXTS_MAX
        for text in list(islice(_names_by_text, max(0, excess))):
            del _names_by_text[text]
    return [name or decoded[text] for text, name in zip(texts, cached_names, strict=True)]


def _decode_or_none(text: bytes) -> str | None:
    try:
        return decode_channel(text[2:])
    except RemoteProtocolError:
        return None


class UniformEnvelopeReader:
    """Reads one field after another from envelopes that have the same fields.

    Values of irregular envelopes are meaningless, and the caller must replace them. They are read
    from within the frame of the envelope.
    """

    def __init__(self, batch: FrameBatch, fields: int, content_lengths: Integers) -> None:
        self._batch = batch
        self._fields = fields
        self._content_lengths = content_lengths
        """Length of the content of each frame."""
        self._first_content = batch.data[HEADER_BYTES : batch.ends[0] - DELIMITER_BYTES].tobytes()
        self._irregular: Flags = _view_column(batch, _UINT8, 0) != fields
        self._offset: int | Integers = 1 + TIMES_BYTES[fields & TIMES]
        """Offset of the next field in each content; one number while all are equal."""
        self._is_all_same = True
        """True if all texts read so far are the same in all envelopes."""

    @classmethod
    def for_batch(cls, batch: FrameBatch) -> UniformEnvelopeReader | None:
        """Return a reader for the batch, or None if its frames cannot be read this way."""
        fields = int(batch.data[HEADER_BYTES])
        content_lengths = batch.lengths - (HEADER_BYTES + DELIMITER_BYTES)
        if fields & RESERVED or content_lengths.min() < 1 + TIMES_BYTES[fields & TIMES]:
            return None
        return cls(batch, fields, content_lengths)

    def irregular_indexes(self) -> list[int] | None:
        """Return the indexes of the frames that need `decode`; None if there are too many."""
        if not self._is_all_same:
            self._mark_stuffed()
        elif STUFFED in self._first_content[: self._offset]:
            return None
        if np.count_nonzero(self._irregular) * _REGULAR_PER_IRREGULAR_MIN > self._batch.count:
            return None
        return np.flatnonzero(self._irregular).tolist()

    # Times ---------------------------------------------------------------------------------------

    def read_times(self) -> tuple[Seconds, Seconds]:
        """Return expiry and delay of each envelope, in seconds from acceptance."""
        if self._fields & TIMES:
            self._irregular |= self._find_stuffed_times()
        return self._read_seconds(EXPIRES, NEVER), self._read_seconds(NOT_BEFORE, 0.0)

    def _read_seconds(self, field: int, default: float) -> Seconds:
        if not self._fields & field:
            return np.full(self._batch.count, default)
        offset = 1 + TIMES_BYTES[self._fields & (field - 1)]
        return _view_column(self._batch, _MILLISECONDS, offset).astype(np.float64) / 1000.0

    def _find_stuffed_times(self) -> Flags:
        """Return flags of the contents in which stuffing begins in the fields byte or the times."""
        batch, end = self._batch, 1 + TIMES_BYTES[self._fields & TIMES]
        stuffed: Flags = np.full(batch.count, self._fields == DELIMITER[0])
        for offset in range(1, end, 8):
            differences = _view_column(batch, _UINT64, offset) ^ _OPENERS
            # A flag is set if one of the eight bytes is 0.
            stuffed |= ((differences - _ONES) & ~differences & _TOPS) != 0
        candidates = np.flatnonzero(stuffed)
        if candidates.size:
            offsets = batch.starts[candidates, None] + np.arange(HEADER_BYTES, HEADER_BYTES + end)
            words = unaligned(batch.data, _UINT32)[offsets]
            stuffed[candidates] = (words == _STUFFED_WORD).any(axis=1)
        return stuffed

    # Texts ---------------------------------------------------------------------------------------

    def read_channels(self) -> tuple[dict[str, int], Numbers]:
        """Return the number of each channel name, and the channel number of each envelope."""
        numbers: Numbers = np.zeros(self._batch.count, np.uint32)
        if not self._fields & CHANNEL:
            return {"": 0}, numbers
        texts = self._read_next_texts()
        different = list(dict.fromkeys(texts))
        decoded = _decode_texts(different)
        if None in decoded:
            self._mark_bad_texts(
                texts, {text for text, name in zip(different, decoded, strict=True) if name is None}
            )
        different_names = [name for name in dict.fromkeys(decoded) if name is not None]
        names = dict(zip(different_names, range(len(different_names)), strict=True))
        if len(names) > 1:
            if len(names) == len(different):
                number_by_text = dict(zip(different, names.values(), strict=True))
            else:
                number_by_text = {
                    text: 0 if name is None else names[name]
                    for text, name in zip(different, decoded, strict=True)
                }
            numbers = np.fromiter(map(number_by_text.__getitem__, texts), np.uint32, len(texts))
        return names, numbers

    def locate_keys(self) -> tuple[Integers, Integers]:
        """Return begin and end of each key in the data of the batch. Must be the first read."""
        starts = self._batch.starts + HEADER_BYTES
        if self._fields & CHANNEL:
            self._locate_next_texts()
        if not self._fields & KEY:
            return starts, starts
        begins, ends = self._locate_next_texts()
        return starts + begins + 2, starts + ends

    def skip_key(self) -> None:
        if self._fields & KEY:
            self._locate_next_texts()

    def skip_headers(self, headers_max: int) -> None:
        """Check the headers. Envelopes with more than `headers_max` headers are irregular."""
        if self._fields & HEADERS:
            texts = self._read_next_texts()
            bad = set()
            for text in set(texts):
                try:
                    check_headers(text[2:], headers_max=headers_max)
                except RemoteProtocolError:
                    bad.add(text)
            self._mark_bad_texts(texts, bad)

    def _mark_bad_texts(self, texts: list[bytes], bad: set[bytes]) -> None:
        """Flag the frames with malformed texts as irregular."""
        if len(texts) == 1:
            self._irregular |= texts[0] in bad
        elif bad:
            self._irregular |= np.array([text in bad for text in texts])

    def _read_next_texts(self) -> list[bytes]:
        """Return the next text of each envelope, with its length prefix; a single text if all
        envelopes have the same.
        """
        offset = self._offset
        if isinstance(offset, int):
            end = offset + 2 + int.from_bytes(self._first_content[offset : offset + 2], "big")
            text = self._first_content[offset:end]
            is_long = end - offset > _COMPARED_TEXT_BYTES_MAX
            if not is_long and end <= self._content_lengths.min():
                different = _find_different(self._batch, offset, text)
                if np.count_nonzero(different) * _REGULAR_PER_IRREGULAR_MIN <= self._batch.count:
                    self._irregular |= different
                    self._offset = end
                    return [text]
        begins, ends = self._locate_next_texts()
        starts = self._batch.starts + HEADER_BYTES
        bounds = zip((starts + begins).tolist(), (starts + ends).tolist(), strict=True)
        raw = self._batch.data.tobytes()
        return [raw[begin:end] for begin, end in bounds]

    def _locate_next_texts(self) -> tuple[int | Integers, Integers]:
        """Return begin and end of the next text in each content, with its length prefix."""
        offset, lengths = self._offset, self._content_lengths
        is_too_short: Flags = lengths < offset + 2
        if is_too_short.any():
            offset = np.where(is_too_short, 0, offset).astype(np.int64)
        ends = _view_column(self._batch, _LENGTH, offset).astype(np.int64) + offset + 2
        is_too_short |= ends > lengths
        ends[is_too_short] = 0
        self._irregular |= is_too_short
        self._offset = int(ends[0]) if (ends == ends[0]).all() else ends
        self._is_all_same = False
        return offset, ends

    def _mark_stuffed(self) -> None:
        """Flag envelopes with stuffing before the payload as irregular."""
        batch = self._batch
        if STUFFED[1:] not in batch.data.tobytes():
            return
        stuffed = np.flatnonzero(unaligned(batch.data, _UINT32) == _STUFFED_WORD)
        indexes = np.searchsorted(batch.starts, stuffed, "right") - 1
        nuls = stuffed + len(STUFFED) - 1 - batch.starts[indexes] - HEADER_BYTES
        ends = self._offset if isinstance(self._offset, int) else self._offset[indexes]
        in_content = nuls >= len(STUFFED) - 1
        self._irregular[indexes[in_content & (nuls < ends)]] = True


def measure_headers(batch: FrameBatch, indexes: Integers) -> Integers | None:
    """Return the bytes of the headers of some envelopes, shape (n,); None if none has headers.

    Numbers of malformed and of stuffed envelopes may be wrong, but stay within the frame.
    """
    data, ends = batch.data, batch.ends[indexes] - DELIMITER_BYTES
    begins = batch.starts[indexes] + HEADER_BYTES
    fields = data[begins]
    has_headers = (fields & HEADERS) != 0
    if not has_headers.any():
        return None
    offsets = begins + 1 + _TIMES_BYTES[fields & TIMES]
    lengths: Integers = np.zeros(indexes.size, np.int64)
    for field in (CHANNEL, KEY, HEADERS):
        has_field = (fields & field) != 0
        texts = unaligned(data, _LENGTH)[np.minimum(offsets, ends)].astype(np.int64)
        lengths = np.where(has_field, texts, 0)
        offsets = np.minimum(offsets + np.where(has_field, 2 + texts, 0), ends)
    return lengths


class EnvelopeSurvey(NamedTuple):
    """Differences between envelopes, which determine how long reading them takes."""

    other_channel_count: int
    """Envelopes with another channel than the first one, or other fields."""
    other_indexes: Integers
    """Indexes of envelopes that may have other fields, another delay, channel or headers than the
    first one.
    """
    may_be_stuffed: bool
    """True if there may be byte stuffing before payloads, so that each envelope is decoded."""


def survey_envelopes(batch: FrameBatch) -> EnvelopeSurvey:
    """Compare envelopes with the first one of the batch."""
    first = batch.data[HEADER_BYTES : batch.ends[0] - DELIMITER_BYTES].tobytes()
    shortest = (batch.stride or int(batch.lengths.min())) - HEADER_BYTES - DELIMITER_BYTES
    fields = first[0] if first else RESERVED
    begin = end = 1 + TIMES_BYTES[fields & TIMES]
    if fields & CHANNEL:
        end += 2 + int.from_bytes(first[end : end + 2], "big")
    if fields & RESERVED or end > shortest:
        return EnvelopeSurvey(batch.count, np.arange(batch.count), may_be_stuffed=True)
    if begin == 1:
        different = _find_different(batch, 0, first[:end])
    else:
        different = _find_different(batch, 0, first[:1])
        different |= _find_different(batch, begin, first[begin:end])
    other_channel_count = int(np.count_nonzero(different))
    if fields & NOT_BEFORE:  # Each delay may be scheduled separately.
        different[:] = True
    if fields & HEADERS:
        headers_end = end + 2 + int.from_bytes(first[end : end + 2], "big")
        is_long = headers_end - end > _COMPARED_TEXT_BYTES_MAX
        if fields & KEY or is_long or headers_end > shortest:
            different[:] = True
        else:
            different |= _find_different(batch, end, first[end:headers_end])
            end = headers_end
    is_all_same = not (fields & KEY or different.any())
    return EnvelopeSurvey(
        other_channel_count,
        np.flatnonzero(different),
        STUFFED in (first[:end] if is_all_same else batch.data.tobytes()),
    )


def _find_different(batch: FrameBatch, offset: int, text: bytes) -> Flags:
    """Return flags of the contents that do not have `text` at `offset`. All are long enough."""
    different: Flags = np.zeros(batch.count, np.bool_)
    for end in range(len(text), 0, -8):  # Words that end here; the first one begins before it.
        words = _view_column(batch, _UINT64, offset + end - 8)
        if end < 8:
            words = words >> np.uint64(8 * (8 - end))
        expected = np.uint64(int.from_bytes(text[max(0, end - 8) : end], "little"))
        different |= words != expected
    return different


def _view_column(
    batch: FrameBatch, dtype: np.dtype[Item], offset: int | Integers
) -> npt.NDArray[Item]:
    """Return one item of each content, `offset` bytes into it; negative offsets reach into the
    header.
    """
    if batch.stride and isinstance(offset, int):
        return strided(batch.data, dtype, HEADER_BYTES + offset, batch.stride, batch.count)
    items: npt.NDArray[Item] = unaligned(batch.data, dtype)[batch.starts + (HEADER_BYTES + offset)]
    return items
