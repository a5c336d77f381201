"""Slow and simple implementations of `protocol/binary.md` that fast code is compared with.

Nothing here is imported from simplebus, and nothing is optimized, so that a reader can compare an
oracle with the page. An oracle interprets valid input and does not validate it. If an oracle and
the code disagree, the page decides which one is wrong.
"""

from __future__ import annotations

HEADER_BYTES = 9
DELIMITER = b"<\r\n>"
ID_COUNT = 1 << 31
"""Message ids run from 0 to ID_COUNT - 1 and then start again at 0."""


def split_frames(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole frames at the start of `data`, with delimiters, and the remaining bytes.

    The nine header bytes of a frame are never searched. The first delimiter at or after them
    ends the frame, and the next byte begins another header.
    """
    frames: list[bytes] = []
    start = 0
    while (position := data.find(DELIMITER, start + HEADER_BYTES)) >= 0:
        end = position + len(DELIMITER)
        frames.append(data[start:end])
        start = end
    return frames, data[start:]


def parse_frame(frame: bytes) -> tuple[int, int, int, int, bytes]:
    """Return type byte, class id, message id, timer index and content of one whole frame."""
    assert split_frames(frame) == ([frame], b""), f"not exactly one frame: {frame!r}"
    return _parse_whole_frame(frame)


def parse_frames(data: bytes) -> tuple[list[tuple[int, int, int, int, bytes]], bytes]:
    """Return the parsed whole frames at the start of `data`, and the remaining bytes."""
    frames, remainder = split_frames(data)
    return [_parse_whole_frame(frame) for frame in frames], remainder


def _parse_whole_frame(frame: bytes) -> tuple[int, int, int, int, bytes]:
    return (
        frame[0],
        int.from_bytes(frame[1:3], "big"),
        int.from_bytes(frame[3:7], "big"),
        int.from_bytes(frame[7:9], "big"),
        frame[HEADER_BYTES : -len(DELIMITER)],
    )


def build_frame(
    frame_type: int,
    *,
    class_id: int = 0,
    content: bytes = b"",
    message_id: int = 0,
    timer_index: int = 0,
) -> bytes:
    """Encode one frame. The content must not contain the delimiter."""
    return (
        bytes([frame_type])
        + class_id.to_bytes(2, "big")
        + message_id.to_bytes(4, "big")
        + timer_index.to_bytes(2, "big")
        + content
        + DELIMITER
    )


def parse_ack(content: bytes) -> tuple[int, int] | None:
    """Parse the range of an Ack's content, character by character. Returns None if it is invalid.

    The last id's exclusive end may be written as the original does, with a minus sign.
    """
    if content.endswith(b"--2147483648"):
        content = content.replace(b"--", b"-")
    numbers = content.split(b"-")
    if len(numbers) != 2:
        return None
    for number in numbers:
        if not 1 <= len(number) <= 10 or any(digit not in b"0123456789" for digit in number):
            return None
    first, last = int(numbers[0]), int(numbers[1])
    return (first, last) if first < last and first < ID_COUNT and last <= ID_COUNT else None


def parse_connect(content: bytes) -> set[int] | None:
    """Parse the class ids of a Connect's content. Returns None if it is not an array of ids."""
    blanks = b" \t\n\r"
    inner = content.strip(blanks)
    if len(inner) < 2 or inner[:1] != b"[" or inner[-1:] != b"]":
        return None
    inner = inner[1:-1]
    if not inner.strip(blanks):
        return set()
    class_ids = set()
    entries = inner.split(b",")
    for entry in entries:
        number = entry.strip(blanks)
        if not number or any(digit not in b"0123456789" for digit in number):
            return None
        if len(number) > 5 or (len(number) > 1 and number[:1] == b"0") or int(number) > 65535:
            return None
        class_ids.add(int(number))
    return class_ids if len(entries) <= 65536 else None


class AckOracle:
    """One subscription's acknowledgements, as a set of sequences.

    start..floor    acknowledged without a gap
    floor..cursor   sent; acknowledged out of order or still in flight
    cursor          the next sequence to be sent; a test moves it as it sends

    Invariant: start <= floor <= cursor, and start <= every member of acked < cursor
    """

    def __init__(self, *, floor: int = 0, cursor: int | None = None) -> None:
        self.start = floor
        self.cursor = floor if cursor is None else cursor
        self.acked: set[int] = set()

    @property
    def floor(self) -> int:
        """The lowest sequence that was sent and not acknowledged, or the cursor."""
        sequence = self.start
        while sequence in self.acked:
            sequence += 1
        return sequence

    def nearest_sequence(self, wire_id: int) -> int:
        """Return the sequence with these low 31 bits that is nearest to the floor.

        At equal distance, 2**30 on both sides, the lower sequence is chosen. The result may be
        negative: that is below every floor, so acknowledging it changes nothing.
        """
        floor = self.floor
        laps = range(floor // ID_COUNT - 1, floor // ID_COUNT + 2)
        candidates = [lap * ID_COUNT + wire_id for lap in laps]
        return min(candidates, key=lambda sequence: (abs(sequence - floor), sequence))

    def ack_ids(self, first: int, last: int) -> int:
        """Acknowledge the wire ids `first` up to but not including `last`.

        Returns:
            Number of ids that were never sent. They stay unacknowledged when they are sent.
        """
        first_sequence = self.nearest_sequence(first)
        last_sequence = first_sequence + (last - first)
        newly_acked = range(max(first_sequence, self.start), min(last_sequence, self.cursor))
        self.acked.update(newly_acked)
        return max(0, last_sequence - max(first_sequence, self.cursor))

    def unacked_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the sent and unacknowledged sequences of `first` to `last` as half-open ranges."""
        sent = range(max(first, self.start), min(last, self.cursor))
        return group_ids([sequence for sequence in sent if sequence not in self.acked])


class RingOracle:
    """One class's stored messages, as a dict from sequence to frame bytes.

    Invariant: floor <= every stored sequence < head
    """

    def __init__(self, *, floor: int = 0) -> None:
        self.head = floor
        self.frames: dict[int, bytes] = {}

    @property
    def floor(self) -> int:
        """The lowest stored sequence, or the head if no message is stored."""
        return min(self.frames, default=self.head)

    def append(self, frame: bytes) -> int:
        """Store a frame unchanged and return its sequence."""
        sequence = self.head
        self.frames[sequence] = frame
        self.head += 1
        return sequence

    def release(self, first: int, last: int) -> None:
        """Remove the stored sequences `first` up to but not including `last`."""
        for sequence in range(max(first, self.floor), min(last, self.head)):
            self.frames.pop(sequence, None)

    def read(self, first: int, last: int) -> bytes:
        """Return the stored frames of `first` to `last`, concatenated."""
        stored = range(max(first, self.floor), min(last, self.head))
        return b"".join(self.frames[sequence] for sequence in stored if sequence in self.frames)


def group_ids(ids: list[int]) -> list[tuple[int, int]]:
    """Group ids that are consecutive in order of arrival into half-open ranges.

    Id 0 after id 2147483647 begins a new range: no range spans the wrap.
    """
    ranges: list[tuple[int, int]] = []
    for message_id in ids:
        if ranges and ranges[-1][1] == message_id:
            ranges[-1] = (ranges[-1][0], message_id + 1)
        else:
            ranges.append((message_id, message_id + 1))
    return ranges
