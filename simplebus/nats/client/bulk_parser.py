"""Array parser for the messages of a server in one read.

Every line that looks like MSG or HMSG is a candidate, also inside payloads; a candidate is a
message only if another message ends where it begins. Lines with single blanks and CR LF are handled
here; the line parser handles everything else.

    bytes      MSG a 1 3 ␍␊ x␊x ␍␊ HMSG b 1 r 12 14 ␍␊ … ␍␊
    feeds                 ↑   ↑    ↑                 ↑       every LF
    starts     ↑                   ↑                         after CR LF, where a verb follows
    blanks        ↑ ↑ ↑                ↑ ↑ ↑ ↑  ↑            every blank; they separate words
    ends                           ↑                     ↑   from the size in the line
"""

from __future__ import annotations

import numpy as np

from simplebus.core.protocol.frames import Bytes, Flags, Integers, Words, unaligned
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.numbers import parse_similar_numbers

BATCH_MESSAGES_MIN = 16
"""Fewer consecutive messages are parsed singly."""

_CR, _LF, _BLANK = (np.uint8(byte) for byte in b"\r\n ")
_WORD: np.dtype[np.uint64] = np.dtype("<u8")
_MSG = np.uint64(int.from_bytes(b"\r\nMSG ", "little"))
_HMSG = np.uint64(int.from_bytes(b"\r\nHMSG ", "little"))
_SIX, _SEVEN = np.uint64((1 << 48) - 1), np.uint64((1 << 56) - 1)
_SIZE_DIGITS_MAX = 9
_SID_DIGITS_MAX = 18


class ClientBulkParser:
    """Candidates in raw[first:last]. PADDING bytes must precede `first` and follow `last`."""

    def __init__(self, raw: bytes, first: int, last: int, max_message: int) -> None:
        self._raw = raw
        self._last = last
        self._max_message_bytes = max_message
        data: Bytes = np.frombuffer(raw, np.uint8)
        self._data = data
        feeds = np.flatnonzero(data[first:last] == _LF)
        feeds += first
        words: Words = unaligned(data, _WORD)
        heads = words[feeds - 1]
        is_long: Flags = (heads & _SEVEN) == _HMSG
        lines = np.flatnonzero(((heads & _SIX) == _MSG) | is_long)
        if lines.size and lines[-1] == feeds.size - 1:
            lines = lines[:-1]
        self.starts: Integers = feeds[lines] + 1
        self._feeds: Integers = feeds[lines + 1]
        self._is_long = is_long[lines]
        # The first message has no LF in front of it.
        if raw.startswith((b"MSG ", b"HMSG "), first) and feeds.size:
            self.starts = np.concatenate([[first], self.starts])
            self._feeds = np.concatenate([feeds[:1], self._feeds])
            self._is_long = np.concatenate([[raw.startswith(b"H", first)], self._is_long])
        self._parse_lines(first, last)
        self._link_candidates()

    def _parse_lines(self, first: int, last: int) -> None:
        """Parse the lines of the candidates and flag those in plain form."""
        data = self._data
        blanks = np.flatnonzero(data[first:last] == _BLANK)
        blanks += first
        starts, feeds, is_long = self.starts, self._feeds, self._is_long
        # Entries for the lines with the last blanks.
        padded = np.concatenate([blanks, np.full(6, last)])
        at = blanks.searchsorted(starts)
        blanks_min = at + 3 + is_long  # Blanks of a line without a reply subject.
        has_reply: Flags = padded[blanks_min] < feeds
        plain: Flags = (padded[blanks_min - 1] < feeds) & (padded[blanks_min + 1] > feeds)
        plain &= data[feeds - 1] == _CR
        line_ends = feeds - 1
        subjects = padded[at] + 1
        subject_ends = padded[at + 1]
        sid_ends = padded[at + 2]
        reply_ends = padded[at + 2 + has_reply]
        header_ends = padded[at + 2 + has_reply + is_long]
        plain &= (subjects < subject_ends) & (subject_ends + 1 < sid_ends)
        plain &= (sid_ends + 1 < reply_ends) | ~has_reply
        plain &= (sid_ends - subject_ends - 1 <= _SID_DIGITS_MAX) & (
            line_ends - header_ends - 1 <= _SIZE_DIGITS_MAX
        )
        sids, good = parse_similar_numbers(data, subject_ends + 1, sid_ends)
        plain &= good
        sizes, good = parse_similar_numbers(data, header_ends + 1, line_ends)
        plain &= good & (sizes <= self._max_message_bytes)
        headers = np.zeros(sizes.size, np.int64)
        long = np.flatnonzero(is_long)
        if long.size:
            begins, ends = reply_ends[long] + 1, header_ends[long]
            found, good = parse_similar_numbers(data, begins, ends)
            good &= (found <= sizes[long]) & (ends - begins <= _SIZE_DIGITS_MAX)
            plain[long] &= good
            headers[long] = np.where(plain[long], found, 0)
        bodies = feeds + 1
        self.ends = np.where(plain, bodies + sizes + 2, 0)
        plain &= self.ends <= last
        self._plain = plain
        replies = np.where(has_reply, sid_ends + 1, bodies)
        reply_ends = np.where(has_reply, reply_ends, bodies)
        self._columns = (
            sids,
            subjects,
            subject_ends,
            replies,
            reply_ends,
            bodies,
            bodies + headers,
        )

    def _link_candidates(self) -> None:
        """Find the candidate that begins where each one ends."""
        starts, ends, plain = self.starts, self.ends, self._plain
        linked = np.zeros(starts.size, np.bool_)
        np.equal(ends[:-1], starts[1:], out=linked[:-1])
        linked &= plain
        self._breaks: Integers = np.flatnonzero(~linked)
        jumps = starts.searchsorted(ends[self._breaks])
        good = jumps < starts.size
        good[good] = starts[jumps[good]] == ends[self._breaks[good]]
        good &= plain[self._breaks]
        self._jumps: Integers = np.where(good, jumps, -1)

    def parse_batch(self, offset: int) -> tuple[ReceivedMessages, int] | None:
        """Return the consecutive messages from raw[at] on and the offset of their end; None if
        they are too few.
        """
        row = int(self.starts.searchsorted(offset))
        if row == self.starts.size or self.starts[row] != offset:
            return None
        pieces: list[tuple[int, int]] = []
        count = 0
        while row >= 0:
            step = int(self._breaks.searchsorted(row))
            stop, following = int(self._breaks[step]), int(self._jumps[step])
            if following >= 0 or self._is_complete(stop):
                stop += 1
            if stop > row:
                pieces.append((row, stop))
                count += stop - row
            row = following
        if count < BATCH_MESSAGES_MIN:
            return None
        rows: slice | Integers = slice(*pieces[0])
        if len(pieces) > 1:
            rows = np.concatenate([np.arange(*piece) for piece in pieces])
        ends = self.ends[rows]
        columns = [*(column[rows] for column in self._columns), ends - 2]
        return ReceivedMessages(self._raw, *columns), int(ends[-1])

    def _is_complete(self, row: int) -> bool:
        """Return True if a candidate without a successor is plain and ends with CR LF."""
        return bool(self._plain[row]) and self._raw.startswith(b"\r\n", int(self.ends[row]) - 2)
