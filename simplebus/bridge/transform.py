r"""Frames as the near bus sends them, made into frames as the far bus takes them.

Rule 1: `one` says what becomes of a message. `many` says the same of a run of them, and takes
arrays where that cannot be wrong; a property test holds the two together.
Rule 2: what stays here is counted by reason, and what could never be taken there says why: nothing
is left out in silence.
Rule 3: `expires` and `not before` count from when a bus accepts a message: what has passed of them
at the near bus is taken off.

    near   │ header │ payload │ <\r\n> │    or │ header │ envelope │ payload │ <\r\n> │
    far    │ header │ envelope with the path │ payload │ <\r\n> │
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import numpy as np

from simplebus.bridge.channel_map import Renaming
from simplebus.bridge.loop_header import HOPS_MAX, stamped
from simplebus.core.channel.pattern import matches
from simplebus.core.errors import LocalProtocolError, RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, FRAME_BYTES_MIN, HEADER_BYTES, Limits
from simplebus.core.protocol import envelope_batch as envelopes
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope import CHANNEL, HEADERS, KEY, PUBLISHED, TIMES, TIMES_BYTES
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.envelope_reader import Seconds
from simplebus.core.protocol.frames import DELIMITER, Bytes, Integers, wide

_OPENS = np.frombuffer(DELIMITER[:-1], np.uint8)
"""What a content holds only where it is stuffed, or is to be."""
_PLAIN = Envelope()


class Left(StrEnum):
    """Why a message stays here."""

    OTHER = "not_for_it"
    """Its channel is none of those that are copied."""
    LOOPED = "looped"
    """It has been there, or has come too far."""
    EXPIRED = "expired"
    """It would be over when it came."""
    REFUSED = "refused"
    """It could never be taken there."""
    KNOWN = "known_there"
    """The stream that it goes to has it already, by its id."""


@dataclass(slots=True)
class Piece:
    """Messages of one class in the order of their sequences, all of one frame type."""

    raw: bytes | bytearray | memoryview
    """Their frames back to back, as a bus delivers them."""
    bounds: Integers
    """Where each frame begins in raw and the last one ends: shape (n + 1,)."""
    sequences: Integers
    """Shape (n,), ascending."""
    ages: Seconds | float = 0.0
    """How long ago each was accepted."""
    stride: int = -1
    """How long each frame is; 0 where they differ. Found out where it is not given."""

    def __post_init__(self) -> None:
        if self.stride < 0:
            lengths = self.lengths
            is_same = lengths.size > 0 and bool((lengths == lengths[0]).all())
            self.stride = int(lengths[0]) if is_same else 0

    @property
    def count(self) -> int:
        return len(self.sequences)

    @property
    def data(self) -> Bytes:
        return np.frombuffer(self.raw, np.uint8)

    @property
    def lengths(self) -> Integers:
        return np.diff(self.bounds)

    def cut(self, at: int, size: int) -> Bytes:
        """`size` bytes of each frame from `at` on: shape (n, size)."""
        if self.stride:
            return self.data.reshape(self.count, self.stride)[:, at : at + size]
        found: Bytes = self.data[self.bounds[:-1, None] + np.arange(at, at + size)]
        return found

    def checks(self) -> Integers:
        """Of each frame the checksum of its type and its content (`progress.Mark`): shape (n,)."""
        raw, edges = memoryview(self.raw), self.bounds.tolist()
        begun = zlib.crc32(raw[edges[0] : edges[0] + 1])
        return np.array(
            [zlib.crc32(raw[at + HEADER_BYTES : end], begun) for at, end in pairwise(edges)],
            np.int64,
        )

    def part(self, first: int, last: int) -> Piece:
        """Messages first..last-1 of these."""
        bounds = self.bounds[first : last + 1]
        ages = self.ages if isinstance(self.ages, float) else self.ages[first:last]
        raw = memoryview(self.raw)[int(bounds[0]) : int(bounds[-1])]
        stride = self.stride or -1
        return Piece(raw, bounds - bounds[0], self.sequences[first:last], ages, stride)


@dataclass(slots=True)
class Copies:
    """What goes to the far bus of some pieces, and what does not."""

    raws: list[bytearray | memoryview] = field(default_factory=list)
    """Of each piece a delimiter, and the frames back to back behind it; their numbers are to be
    set."""
    bounds: list[Integers] = field(default_factory=list)
    """Of each, where its frames begin behind that delimiter, and the last one ends."""
    sequences: list[Integers] = field(default_factory=list)
    """Of those that go, of each."""
    left: dict[Left, int] = field(default_factory=dict)
    """How many stay, by reason."""
    refused: list[tuple[int, str]] = field(default_factory=list)
    """Sequences of what could never be taken there, and why."""

    @property
    def count(self) -> int:
        return sum(len(each) for each in self.sequences)

    def frames(self) -> Iterator[tuple[bytearray | memoryview, Integers]]:
        """The frames of each piece behind a delimiter, and where each begins behind that, and the
        last one ends."""
        return zip(self.raws, self.bounds, strict=True)

    def numbers(self) -> Integers:
        """The sequences in one."""
        return np.concatenate(self.sequences) if self.sequences else np.empty(0, np.int64)

    def add(self, raw: bytearray | memoryview, bounds: Integers, sequences: Integers) -> None:
        self.raws.append(raw)
        self.bounds.append(bounds)
        self.sequences.append(sequences)

    def leave(self, reason: Left, count: int = 1) -> None:
        self.left[reason] = self.left.get(reason, 0) + count


class Rewriter:
    """Of one lane, from one bus to another."""

    def __init__(
        self,
        *,
        class_id: int,
        here: str,
        there: str | Collection[str],
        channels: tuple[str, ...] = (),
        renaming: Renaming | None = None,
        hops: int = HOPS_MAX,
        frame_bytes_max: int = Limits().frame_bytes,
        path: bool = True,
    ) -> None:
        """`class_id` is the class there; `here` and `there` are the identities of the two ends,
        `there` several where the far end goes by several.
        Only what one of the `channels` matches is copied; none: everything. Without `path` the step
        from here to there is not added to what a message says of its way."""
        self._class_id = class_id
        self._here = here
        self._there = (there,) if isinstance(there, str) else there
        self._channels = channels
        self._renaming = renaming or Renaming()
        self._hops = hops
        self._path = path
        self._content_bytes_max = frame_bytes_max - FRAME_BYTES_MIN
        self._header = frames.HEADER.pack(frames.ENVELOPE, class_id, 0, 0)

    # One by one: the oracle ----------------------------------------------------------------------

    def one(self, frame: bytes, age: float = 0.0) -> bytes | tuple[Left, str]:
        """A message's frame at the far end; or why it stays here, and more about that."""
        content = frame[HEADER_BYTES:-DELIMITER_BYTES]
        try:
            envelope, payload = self.read(frame[0], content)
            found = self.dressed(envelope, age)
            if isinstance(found, Left):
                return found, ""
            content = envelopes.encode(found, payload)
        except (ValueError, LocalProtocolError, RemoteProtocolError) as error:
            return Left.REFUSED, str(error)
        if len(content) > self._content_bytes_max:
            most = self._content_bytes_max + FRAME_BYTES_MIN
            size = len(content) + FRAME_BYTES_MIN
            return Left.REFUSED, f"its frame would have {size} bytes; {most} are accepted there"
        return self._header + content + DELIMITER

    def read(self, frame_type: int, content: bytes) -> tuple[Envelope, bytes]:
        """What a frame of this type says. Raises RemoteProtocolError."""
        return (_PLAIN, content) if frame_type == frames.MESSAGE else envelopes.decode(content)

    def dressed(self, envelope: Envelope, age: float) -> Envelope | Left:
        """What a message carries at the far end, or why it stays here. Raises ValueError."""
        channel = envelope.channel
        if self._channels and not any(matches(each, channel) for each in self._channels):
            return Left.OTHER
        headers = stamped(envelope.headers, here=self._here, there=self._there, hops=self._hops)
        if headers is None:
            return Left.LOOPED
        expires_ms, not_before_ms = envelope.expires_ms, envelope.not_before_ms
        if expires_ms is not None or not_before_ms is not None:
            passed = max(0, int(age * 1000.0))
            if expires_ms is not None:
                expires_ms -= passed
                if expires_ms <= 0:
                    return Left.EXPIRED
            if not_before_ms is not None:
                not_before_ms = max(0, not_before_ms - passed)
        return envelope._replace(
            channel=self._renaming.name(channel),
            headers=headers if self._path else envelope.headers,
            expires_ms=expires_ms,
            not_before_ms=not_before_ms,
        )

    # Many at once --------------------------------------------------------------------------------

    def many(self, piece: Piece, copies: Copies) -> None:
        """The same of all messages of a piece."""
        if piece.count and not self._alike(piece, copies):
            self._each(piece, copies)

    def _each(self, piece: Piece, copies: Copies) -> None:
        raw, ages = bytes(piece.raw), np.broadcast_to(piece.ages, piece.count).tolist()
        made: list[bytes] = []
        sequences: list[int] = []
        rows = zip(pairwise(piece.bounds.tolist()), piece.sequences.tolist(), ages, strict=True)
        for (begin, end), sequence, age in rows:
            found = self.one(raw[begin:end], age)
            if isinstance(found, bytes):
                made.append(found)
                sequences.append(sequence)
                continue
            reason, sentence = found
            copies.leave(reason)
            if reason is Left.REFUSED:
                copies.refused.append((sequence, sentence))
        if made:
            lengths = np.fromiter(map(len, made), np.int64, len(made))
            raw_there = bytearray(b"").join([DELIMITER, *made])
            copies.add(raw_there, _bounds(lengths), np.array(sequences, np.int64))

    def _alike(self, piece: Piece, copies: Copies) -> bool:
        """The same, where all envelopes say the same but for when they were published and their
        keys, which are of one length. False where that is not so; then nothing is done."""
        if not is_unstuffed(piece):
            return False
        found = Alike.of(piece)
        if found is None:
            return False
        try:
            dressed = self.dressed(found.envelope, 0.0)
            if isinstance(dressed, Left):
                copies.leave(dressed, piece.count)
                return True
            front = found.front(self._header, dressed)
        except (ValueError, LocalProtocolError):
            return False
        grown = front.shape[1] - found.skip
        longest = piece.stride or int(piece.lengths.max())
        if longest + grown > self._content_bytes_max + FRAME_BYTES_MIN:
            return False
        made = _joined(piece, found.skip, front)
        is_odd = (front == _OPENS[1]).any() or (front[:, -1] == _OPENS[0]).any()
        if is_odd and _opened(made[DELIMITER_BYTES:]) != piece.count:
            return False  # Something in front looks stuffed, and is not.
        bounds = piece.bounds + grown * np.arange(piece.count + 1)
        copies.add(made.data, bounds, piece.sequences)
        return True


@dataclass(frozen=True, slots=True)
class Alike:
    """What frames of one type say that say nearly the same."""

    piece: Piece
    skip: int
    """How much of each is in front of its payload."""
    fields: int
    envelope: Envelope
    """What is the same in all; time and key are the first one's."""
    key: tuple[int, int]
    """Where in each frame the key stands, with its length, and how long that is; 0 for none."""

    @classmethod
    def of(cls, piece: Piece) -> Alike | None:
        """None where they do not, or what they say depends on how old they are."""
        data = piece.data
        if data[0] == frames.MESSAGE:
            return cls(piece, HEADER_BYTES, 0, _PLAIN, (0, 0))
        last = (piece.stride or int(piece.lengths.min())) - DELIMITER_BYTES
        if last <= HEADER_BYTES:
            return None
        fields = int(data[HEADER_BYTES])
        if fields & ~_ALIKE or (piece.cut(HEADER_BYTES, 1) != fields).any():
            return None
        at = HEADER_BYTES + 1 + TIMES_BYTES[fields & TIMES]
        key = (0, 0)
        for text in (CHANNEL, KEY, HEADERS):
            if not fields & text:
                continue
            if at + 2 > last:
                return None
            size = 2 + int.from_bytes(data[at : at + 2].tobytes(), "big")
            if at + size > last:
                return None
            # A key may be another one in each; only its length is not.
            told = piece.cut(at, 2 if text == KEY else size)
            if (told != told[0]).any():
                return None
            if text == KEY:
                key = (at, size)
            at += size
        if at > last:
            return None
        try:
            envelope, _ = envelopes.decode(data[HEADER_BYTES:at].tobytes())
        except RemoteProtocolError:
            return None
        return cls(piece, at, fields, envelope, key)

    def front(self, header: bytes, dressed: Envelope) -> Bytes:
        """What is to stand in front of each payload: shape (n, bytes), or one row where it is the
        same. Raises what `encode` does."""
        times = envelopes.unstuff(envelopes.encode(Envelope(published=dressed.published), b""))
        texts = dressed._replace(published=None, key=b"")
        channel = envelopes.unstuff(envelopes.encode(texts._replace(headers=()), b""))
        headers = envelopes.unstuff(envelopes.encode(texts._replace(channel=""), b""))
        fields = self.fields & (TIMES | KEY) | channel[0] | headers[0]
        key_at, key_bytes = self.key
        key_there = len(header) + len(times) + len(channel) - 1
        before = header + bytes((fields,)) + times[1:] + channel[1:]
        pattern = before + bytes(key_bytes) + headers[1:]
        same = np.frombuffer(pattern, np.uint8)[None]
        if not key_bytes and len(times) == 1:
            return same
        rows = np.empty((self.piece.count, len(pattern)), np.uint8)
        rows[:] = same
        if key_bytes:
            rows[:, key_there : key_there + key_bytes] = self.piece.cut(key_at, key_bytes)
        if len(times) > 1:
            begin = HEADER_BYTES + 1
            rows[:, begin : begin + len(times) - 1] = self.piece.cut(begin, len(times) - 1)
        return rows


_ALIKE = PUBLISHED | CHANNEL | KEY | HEADERS


def is_unstuffed(piece: Piece) -> bool:
    """Whether what delimiters begin with is in no content: nothing is stuffed, or is to be."""
    found = np.count_nonzero(piece.data == _OPENS[1])
    if found > piece.count:  # A header may look like anything, and does not matter.
        headers = np.ascontiguousarray(wide(piece.cut(0, HEADER_BYTES), 0, HEADER_BYTES))
        found -= np.count_nonzero(headers.view(np.uint8) == _OPENS[1])
    return int(found) == piece.count or _opened(piece.data) == piece.count


def _opened(data: Bytes) -> int:
    """How often what delimiters begin with is in the data. Few bytes are like its first one."""
    first, second, third = _OPENS
    places = np.flatnonzero(data[:-2] == first)
    return int(np.count_nonzero((data[places + 1] == second) & (data[places + 2] == third)))


def _bounds(lengths: Integers) -> Integers:
    """Where frames of these lengths begin, and the last one ends."""
    bounds = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _joined(piece: Piece, skip: int, front: Bytes) -> Bytes:
    """A delimiter, and the frames with something else in place of their first `skip` bytes: one row
    of `front`, or the only one."""
    count, size, data = piece.count, front.shape[1], piece.data
    made = np.empty(DELIMITER_BYTES + data.size + count * (size - skip), np.uint8)
    made[:DELIMITER_BYTES] = np.frombuffer(DELIMITER, np.uint8)
    if stride := piece.stride:
        rows = made[DELIMITER_BYTES:].reshape(count, stride - skip + size)
        wide(rows, 0, size)[:] = wide(front, 0, size)
        wide(rows, size, stride - skip)[:] = wide(data.reshape(count, stride), skip, stride - skip)
        return made
    whole = made[DELIMITER_BYTES:]
    kept = np.ones(data.size, np.bool_)
    kept[piece.bounds[:-1, None] + np.arange(skip)] = False
    starts = piece.bounds[:-1] + (size - skip) * np.arange(count)
    places = starts[:, None] + np.arange(size)
    whole[places] = front
    rest = np.ones(whole.size, np.bool_)
    rest[places] = False
    whole[rest] = data[kept]
    return made
