r"""Frames of the source, rewritten for the target.

`rewrite` processes one message. `rewrite_run` does the same for a run of messages, with arrays
where the result is certain to be equal; a property test compares the two. Skipped messages are
counted by reason. `expires` and `not before` count from when a bus accepts a message, so the time
that passed at the source is subtracted.

    source   │ header │ payload │ <\r\n> │    or │ header │ envelope │ payload │ <\r\n> │
    target   │ header │ envelope with the path │ payload │ <\r\n> │
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import numpy as np

from simplebus.bridge.channel_map import ChannelMap
from simplebus.bridge.loop_header import HOPS_MAX, extend_path
from simplebus.core.channel.pattern import matches
from simplebus.core.errors import LocalProtocolError, RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, FRAME_BYTES_MIN, HEADER_BYTES, Limits
from simplebus.core.protocol import envelope_batch as envelopes
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope import CHANNEL, HEADERS, KEY, PUBLISHED, TIMES, TIMES_BYTES
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.envelope_reader import Seconds
from simplebus.core.protocol.frames import DELIMITER, Bytes, Integers, view_byte_columns

_DELIMITER_START = np.frombuffer(DELIMITER[:-1], np.uint8)
"""First bytes of a delimiter. In unstuffed content they occur nowhere else."""
_NO_METADATA = Envelope()


class SkipReason(StrEnum):
    """Reason why a message is not copied. The values are labels of a metric."""

    FILTERED = "not_for_it"
    """The channel of the message matches no pattern of the copier."""
    LOOPED = "looped"
    """The message has passed the target, or too many buses."""
    EXPIRED = "expired"
    """The message would be expired on arrival."""
    REJECTED = "refused"
    """The target can never store the message."""
    DUPLICATE = "known_there"
    """The target stream already has a message with this id."""


@dataclass(slots=True)
class MessageRun:
    """Messages of one class and frame type, in sequence order."""

    raw: bytes | bytearray | memoryview
    """Frames back to back, as a bus delivers them."""
    bounds: Integers
    """Start of each frame in `raw`, and the end of the last one: shape (n + 1,)."""
    sequences: Integers
    """Ascending sequences: shape (n,)."""
    ages: Seconds | float = 0.0
    """Seconds since the source accepted each message."""
    stride: int = -1
    """Length of each frame, or 0 if the lengths differ. Computed if it is -1."""

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

    def slice_frames(self, offset: int, size: int) -> Bytes:
        """Return `size` bytes of each frame, from offset `at` on: shape (n, size)."""
        if self.stride:
            return self.data.reshape(self.count, self.stride)[:, offset : offset + size]
        result: Bytes = self.data[self.bounds[:-1, None] + np.arange(offset, offset + size)]
        return result

    def checksums(self) -> Integers:
        """Return the checksum of each frame's type and content, as in `MessageFingerprint`: shape
        (n,).
        """
        raw, edges = memoryview(self.raw), self.bounds.tolist()
        type_checksum = zlib.crc32(raw[edges[0] : edges[0] + 1])
        return np.array(
            [
                zlib.crc32(raw[begin + HEADER_BYTES : end], type_checksum)
                for begin, end in pairwise(edges)
            ],
            np.int64,
        )

    def slice(self, first: int, last: int) -> MessageRun:
        """Return messages `first` to `last - 1`."""
        bounds = self.bounds[first : last + 1]
        ages = self.ages if isinstance(self.ages, float) else self.ages[first:last]
        raw = memoryview(self.raw)[int(bounds[0]) : int(bounds[-1])]
        stride = self.stride or -1
        return MessageRun(raw, bounds - bounds[0], self.sequences[first:last], ages, stride)


@dataclass(slots=True)
class RewrittenFrames:
    """Frames for the target, and counts of the skipped messages."""

    raws: list[bytearray | memoryview] = field(default_factory=list)
    """A delimiter and the frames of each run. The message numbers are not set yet."""
    bounds: list[Integers] = field(default_factory=list)
    """Start of each frame after the delimiter, and end of the last frame, for each run."""
    sequences: list[Integers] = field(default_factory=list)
    """Sequences of the frames of each run."""
    skipped_counts: dict[SkipReason, int] = field(default_factory=dict)
    """Number of skipped messages by reason."""
    rejected: list[tuple[int, str]] = field(default_factory=list)
    """Sequences of messages that the target can never store, with the reasons."""

    @property
    def count(self) -> int:
        return sum(len(numbers) for numbers in self.sequences)

    def frames(self) -> Iterator[tuple[bytearray | memoryview, Integers]]:
        """Yield the frames of each run after a delimiter, and their bounds."""
        return zip(self.raws, self.bounds, strict=True)

    def all_sequences(self) -> Integers:
        """Return all sequences as one array."""
        return np.concatenate(self.sequences) if self.sequences else np.empty(0, np.int64)

    def add(self, raw: bytearray | memoryview, bounds: Integers, sequences: Integers) -> None:
        self.raws.append(raw)
        self.bounds.append(bounds)
        self.sequences.append(sequences)

    def skip(self, reason: SkipReason, count: int = 1) -> None:
        self.skipped_counts[reason] = self.skipped_counts.get(reason, 0) + count


class FrameRewriter:
    """Rewrites frames of one copier."""

    def __init__(
        self,
        *,
        class_id: int,
        source: str,
        targets: str | Collection[str],
        channels: tuple[str, ...] = (),
        channel_map: ChannelMap | None = None,
        hops_max: int = HOPS_MAX,
        frame_bytes_max: int = Limits().frame_bytes,
        adds_path: bool = True,
    ) -> None:
        """Create a rewriter.

        Args:
            class_id: Class at the target.
            source: Identity of the source.
            targets: Identity of the target, or several.
            channels: Patterns of the channels to copy; empty for all.
            channel_map: Rules that rename channels.
            hops_max: Largest number of buses on the path of a message.
            frame_bytes_max: Largest frame that the target accepts.
            adds_path: False to leave the `bridge-path` header unchanged.
        """
        self._class_id = class_id
        self._source_identity = source
        self._target_identities = (targets,) if isinstance(targets, str) else targets
        self._channels = channels
        self._channel_map = channel_map or ChannelMap()
        self._hops_max = hops_max
        self._adds_path = adds_path
        self._content_bytes_max = frame_bytes_max - FRAME_BYTES_MIN
        self._header = frames.HEADER.pack(frames.ENVELOPE, class_id, 0, 0)

    # One message at a time: the reference implementation -----------------------------------------

    def rewrite(self, frame: bytes, age: float = 0.0) -> bytes | tuple[SkipReason, str]:
        """Return the frame of a message for the target, or the reason why it is skipped, with
        details.

        `age` is the time since the source accepted the message, in seconds.
        """
        content = frame[HEADER_BYTES:-DELIMITER_BYTES]
        try:
            envelope, payload = self.decode(frame[0], content)
            result = self.rewrite_envelope(envelope, age)
            if isinstance(result, SkipReason):
                return result, ""
            content = envelopes.encode(result, payload)
        except (ValueError, LocalProtocolError, RemoteProtocolError) as error:
            return SkipReason.REJECTED, str(error)
        if len(content) > self._content_bytes_max:
            bytes_max = self._content_bytes_max + FRAME_BYTES_MIN
            size = len(content) + FRAME_BYTES_MIN
            return (
                SkipReason.REJECTED,
                f"its frame has {size} bytes, expected at most {bytes_max}",
            )
        return self._header + content + DELIMITER

    def decode(self, frame_type: int, content: bytes) -> tuple[Envelope, bytes]:
        """Return envelope and payload of a frame's content. Raises RemoteProtocolError."""
        return (
            (_NO_METADATA, content) if frame_type == frames.MESSAGE else envelopes.decode(content)
        )

    def rewrite_envelope(self, envelope: Envelope, age: float) -> Envelope | SkipReason:
        """Return the envelope for the target, or the reason to skip it; see `rewrite`.

        Raises ValueError.
        """
        channel = envelope.channel
        if self._channels and not any(matches(pattern, channel) for pattern in self._channels):
            return SkipReason.FILTERED
        headers = extend_path(
            envelope.headers,
            source=self._source_identity,
            targets=self._target_identities,
            hops_max=self._hops_max,
        )
        if headers is None:
            return SkipReason.LOOPED
        expires_ms, not_before_ms = envelope.expires_ms, envelope.not_before_ms
        if expires_ms is not None or not_before_ms is not None:
            passed = max(0, int(age * 1000.0))
            if expires_ms is not None:
                expires_ms -= passed
                if expires_ms <= 0:
                    return SkipReason.EXPIRED
            if not_before_ms is not None:
                not_before_ms = max(0, not_before_ms - passed)
        return envelope._replace(
            channel=self._channel_map.map_channel(channel),
            headers=headers if self._adds_path else envelope.headers,
            expires_ms=expires_ms,
            not_before_ms=not_before_ms,
        )

    # Whole runs ----------------------------------------------------------------------------------

    def rewrite_run(self, run: MessageRun, output: RewrittenFrames) -> None:
        """Rewrite all messages of a run."""
        if run.count and not self._rewrite_uniform(run, output):
            self._rewrite_each(run, output)

    def _rewrite_each(self, run: MessageRun, output: RewrittenFrames) -> None:
        raw, ages = bytes(run.raw), np.broadcast_to(run.ages, run.count).tolist()
        rewritten_frames: list[bytes] = []
        sequences: list[int] = []
        rows = zip(pairwise(run.bounds.tolist()), run.sequences.tolist(), ages, strict=True)
        for (begin, end), sequence, age in rows:
            result = self.rewrite(raw[begin:end], age)
            if isinstance(result, bytes):
                rewritten_frames.append(result)
                sequences.append(sequence)
                continue
            reason, sentence = result
            output.skip(reason)
            if reason is SkipReason.REJECTED:
                output.rejected.append((sequence, sentence))
        if rewritten_frames:
            lengths = np.fromiter(map(len, rewritten_frames), np.int64, len(rewritten_frames))
            joined = bytearray(b"").join([DELIMITER, *rewritten_frames])
            output.add(joined, _to_bounds(lengths), np.array(sequences, np.int64))

    def _rewrite_uniform(self, run: MessageRun, output: RewrittenFrames) -> bool:
        """Rewrite a run whose envelopes differ at most in publish time and key, with keys of one
        length.

        Returns False, without changes, for another run.
        """
        if not is_unstuffed(run):
            return False
        uniform = UniformRun.detect(run)
        if uniform is None:
            return False
        try:
            rewritten = self.rewrite_envelope(uniform.envelope, 0.0)
            if isinstance(rewritten, SkipReason):
                output.skip(rewritten, run.count)
                return True
            prefixes = uniform.encode_prefixes(self._header, rewritten)
        except (ValueError, LocalProtocolError):
            return False
        growth = prefixes.shape[1] - uniform.prefix_bytes
        longest = run.stride or int(run.lengths.max())
        if longest + growth > self._content_bytes_max + FRAME_BYTES_MIN:
            return False
        rewritten_frames = _replace_prefixes(run, uniform.prefix_bytes, prefixes)
        may_look_stuffed = (prefixes == _DELIMITER_START[1]).any() or (
            prefixes[:, -1] == _DELIMITER_START[0]
        ).any()
        if (
            may_look_stuffed
            and _count_delimiter_starts(rewritten_frames[DELIMITER_BYTES:]) != run.count
        ):
            return False  # A prefix contains the start of a delimiter.
        bounds = run.bounds + growth * np.arange(run.count + 1)
        output.add(rewritten_frames.data, bounds, run.sequences)
        return True


@dataclass(frozen=True, slots=True)
class UniformRun:
    """Run of messages whose envelopes differ at most in publish time and key."""

    run: MessageRun
    prefix_bytes: int
    """Length of header and envelope in each frame."""
    fields: int
    envelope: Envelope
    """Envelope of the first message. Only publish time and key differ in the others."""
    key: tuple[int, int]
    """Offset of the key, with its length field, in each frame, and its size; the size is 0 without
    a key.
    """

    @classmethod
    def detect(cls, run: MessageRun) -> UniformRun | None:
        """Return the uniform run, or None if the envelopes differ or depend on the age of the
        messages.
        """
        data = run.data
        if data[0] == frames.MESSAGE:
            return cls(run, HEADER_BYTES, 0, _NO_METADATA, (0, 0))
        last = (run.stride or int(run.lengths.min())) - DELIMITER_BYTES
        if last <= HEADER_BYTES:
            return None
        fields = int(data[HEADER_BYTES])
        if fields & ~_UNIFORM_FIELDS or (run.slice_frames(HEADER_BYTES, 1) != fields).any():
            return None
        offset = HEADER_BYTES + 1 + TIMES_BYTES[fields & TIMES]
        key = (0, 0)
        for field_bit in (CHANNEL, KEY, HEADERS):
            if not fields & field_bit:
                continue
            if offset + 2 > last:
                return None
            size = 2 + int.from_bytes(data[offset : offset + 2].tobytes(), "big")
            if offset + size > last:
                return None
            # Keys may differ in content, but not in length.
            values = run.slice_frames(offset, 2 if field_bit == KEY else size)
            if (values != values[0]).any():
                return None
            if field_bit == KEY:
                key = (offset, size)
            offset += size
        if offset > last:
            return None
        try:
            envelope, _ = envelopes.decode(data[HEADER_BYTES:offset].tobytes())
        except RemoteProtocolError:
            return None
        return cls(run, offset, fields, envelope, key)

    def encode_prefixes(self, header: bytes, rewritten: Envelope) -> Bytes:
        """Return the bytes before each payload: shape (n, bytes), or one row if they are equal.

        Raises what `encode` raises.
        """
        times = envelopes.unstuff(envelopes.encode(Envelope(published=rewritten.published), b""))
        texts = rewritten._replace(published=None, key=b"")
        channel = envelopes.unstuff(envelopes.encode(texts._replace(headers=()), b""))
        headers = envelopes.unstuff(envelopes.encode(texts._replace(channel=""), b""))
        fields = self.fields & (TIMES | KEY) | channel[0] | headers[0]
        key_at, key_bytes = self.key
        key_position = len(header) + len(times) + len(channel) - 1
        before = header + bytes((fields,)) + times[1:] + channel[1:]
        pattern = before + bytes(key_bytes) + headers[1:]
        equal_row = np.frombuffer(pattern, np.uint8)[None]
        if not key_bytes and len(times) == 1:
            return equal_row
        rows = np.empty((self.run.count, len(pattern)), np.uint8)
        rows[:] = equal_row
        if key_bytes:
            rows[:, key_position : key_position + key_bytes] = self.run.slice_frames(
                key_at, key_bytes
            )
        if len(times) > 1:
            begin = HEADER_BYTES + 1
            rows[:, begin : begin + len(times) - 1] = self.run.slice_frames(begin, len(times) - 1)
        return rows


_UNIFORM_FIELDS = PUBLISHED | CHANNEL | KEY | HEADERS


def is_unstuffed(run: MessageRun) -> bool:
    """Return True if no content contains the start of a delimiter, so nothing is byte-stuffed."""
    second_byte_count = np.count_nonzero(run.data == _DELIMITER_START[1])
    if second_byte_count > run.count:  # Only content is stuffed, so bytes of headers do not count.
        headers = np.ascontiguousarray(
            view_byte_columns(run.slice_frames(0, HEADER_BYTES), 0, HEADER_BYTES)
        )
        second_byte_count -= np.count_nonzero(headers.view(np.uint8) == _DELIMITER_START[1])
    return int(second_byte_count) == run.count or _count_delimiter_starts(run.data) == run.count


def _count_delimiter_starts(data: Bytes) -> int:
    """Count the delimiter starts in `data`, searching for the rare first byte."""
    first, second, third = _DELIMITER_START
    positions = np.flatnonzero(data[:-2] == first)
    return int(np.count_nonzero((data[positions + 1] == second) & (data[positions + 2] == third)))


def _to_bounds(lengths: Integers) -> Integers:
    """Return the start of each frame, and the end of the last frame."""
    bounds = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _replace_prefixes(run: MessageRun, prefix_bytes: int, prefixes: Bytes) -> Bytes:
    """Return a delimiter and the frames, with their first `prefix_bytes` bytes replaced.

    `prefixes` has one row per frame, or one row for all frames.
    """
    count, size, data = run.count, prefixes.shape[1], run.data
    rewritten_frames = np.empty(
        DELIMITER_BYTES + data.size + count * (size - prefix_bytes), np.uint8
    )
    rewritten_frames[:DELIMITER_BYTES] = np.frombuffer(DELIMITER, np.uint8)
    if stride := run.stride:
        rows = rewritten_frames[DELIMITER_BYTES:].reshape(count, stride - prefix_bytes + size)
        view_byte_columns(rows, 0, size)[:] = view_byte_columns(prefixes, 0, size)
        view_byte_columns(rows, size, stride - prefix_bytes)[:] = view_byte_columns(
            data.reshape(count, stride), prefix_bytes, stride - prefix_bytes
        )
        return rewritten_frames
    output = rewritten_frames[DELIMITER_BYTES:]
    is_source_payload = np.ones(data.size, np.bool_)
    is_source_payload[run.bounds[:-1, None] + np.arange(prefix_bytes)] = False
    starts = run.bounds[:-1] + (size - prefix_bytes) * np.arange(count)
    prefix_positions = starts[:, None] + np.arange(size)
    output[prefix_positions] = prefixes
    is_payload = np.ones(output.size, np.bool_)
    is_payload[prefix_positions] = False
    output[is_payload] = data[is_source_payload]
    return rewritten_frames
