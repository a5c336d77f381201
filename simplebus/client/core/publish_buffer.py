"""What a program publishes, until the bus has confirmed it.

Rule 1: a position counts messages from 0 and never wraps; the wire's number follows from it, and
what follows is settled when the bus says at which number it goes on.
Rule 2: a message is kept until it is confirmed or refused. After a loss the bus says which ones it
has; the others are written again, in order, before everything else.
Rule 3: bytes under way, written on this connection and not confirmed, stay within the credit; but
one frame may always go. What the credit holds back waits here.
Rule 4: when a call raises, nothing of it was published.
Rule 5: who has numbers of its own may leave some out: these are positions without a message.

    confirmed ≤ released ≤ numbered ≤ published

    │ confirmed │ under way │ again │ segments │ contents │
    0           confirmed   released numbered            published
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from simplebus.client.core.publish_batch import (
    Bounds,
    Chunk,
    Segment,
    fitting,
    longest_of,
    opening_of,
)
from simplebus.core.errors import LocalProtocolError, Reason, RefusedError, RemoteProtocolError
from simplebus.core.limits import (
    CREDIT_BYTES,
    FRAME_BYTES_MIN,
    MESSAGE_ID_BITS,
    MESSAGE_ID_MASK,
    PLAIN_FRAMES_MAX,
)
from simplebus.core.protocol import envelope_batch as envelopes
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frames import DELIMITER

# Frames are joined to chunks of at most this size, so that others find gaps between them.
_CHUNK_BYTES = 256 * 1024
# Refusals that nobody asks for are forgotten, the oldest first.
_REFUSALS_MAX = 65_536
_HALF = 1 << (MESSAGE_ID_BITS - 1)
_PLAIN = Envelope()
_STUFFED = DELIMITER[:-1]
"""What an envelope's content never holds without more behind it."""
_NO_CLASS = cast(int, object())
"""Equal to nothing that could be given as a class id, wrong ones included."""


def _surely_fitting(payload_bytes_max: int, envelope: Envelope = _PLAIN) -> int:
    """A payload of so many bytes fits even if it needs an envelope that is stuffed throughout."""
    return payload_bytes_max // 4 * 3 - len(envelopes.encode(envelope, b""))


class Publisher:
    """One program's messages, over as many connections as it takes."""

    def __init__(self, *, frame_bytes_max: int, name_class: Callable[[int], None]) -> None:
        self.published = 0
        """Messages handed over so far: the position of the next one."""
        self.confirmed = 0
        """All positions below are stored by the bus, or refused."""
        self.handed_bytes = 0
        """Bytes of all frames that were ever handed over."""
        self.credit = CREDIT_BYTES
        """Bytes that may be under way. A guess until the bus has said it."""
        self.refused = 0
        self.resent = 0
        self.forgotten = 0
        """Confirmed messages that the bus says it has not."""
        self._frame_bytes_max = frame_bytes_max
        self._payload_bytes_max = frame_bytes_max - FRAME_BYTES_MIN
        self._plain_bytes_max = _surely_fitting(self._payload_bytes_max)
        self._name_class = name_class
        self._openings: dict[int, bytes] = {}
        self._envelope_openings: dict[int, bytes] = {}
        self._plain_class = _NO_CLASS
        """All contents are payloads of this class, and not looked at yet; or `_various` tells."""
        self._contents: list[bytes] = []
        self._put = self._contents.append
        self._various: list[bytes] = []
        """The openings of the contents, which are then ready to be sent."""
        self._segments: deque[Segment] = deque()
        self._again: deque[Chunk] = deque()
        """Numbered, and not released on this connection."""
        self._under_way: deque[Chunk] = deque()
        """Released on this connection."""
        self.under_way_bytes = 0
        """Bytes that are released on this connection and not confirmed."""
        self._settled_bytes = 0
        """Of the oldest chunk, so many bytes are confirmed."""
        self._confirmed_bytes = 0
        self._released = self._numbered = 0
        self._base = 0
        """The wire's number of position 0."""
        self._refusals: dict[int, RefusedError] = {}

    @property
    def stored_before(self) -> int:
        """How many messages the bus had of this name, or had refused, before the first one here;
        0 when it knew nothing of the name. Changes when the bus forgets."""
        return self._base

    @property
    def frame_bytes(self) -> int:
        """The longest frame that may be handed over."""
        return self._payload_bytes_max + FRAME_BYTES_MIN

    @property
    def unconfirmed(self) -> int:
        """The lowest number that is not confirmed."""
        return self._number(self.confirmed)

    @property
    def unconfirmed_bytes(self) -> int:
        """Bytes of the frames that are handed over, and neither stored nor refused."""
        return self.handed_bytes - self._confirmed_bytes

    @property
    def has_credit(self) -> bool:
        """Whether one message more may be handed over without piling up here."""
        return self.unconfirmed_bytes < self.credit

    @property
    def held_bytes(self) -> int:
        """Bytes that are not released."""
        return self.unconfirmed_bytes - self.under_way_bytes

    @property
    def released(self) -> int:
        """All positions below were given out for writing, on this connection or before it."""
        return self._released

    # Handing over --------------------------------------------------------------------------------

    def publish(self, payload: bytes, class_id: int, envelope: Envelope | None = None) -> int:
        """Hand a message over. Returns its position.

        Raises LocalProtocolError for a message longer than a frame may be, ValueError for what is
        no class id, TypeError for what is not bytes.
        """
        if (
            class_id != self._plain_class
            or envelope is not None
            or type(payload) is not bytes
            or len(payload) > self._plain_bytes_max
        ):
            self._put_any(payload, class_id, envelope)
        else:
            self._put(payload)
            self.handed_bytes += len(payload) + FRAME_BYTES_MIN
        position = self.published
        self.published = position + 1
        return position

    def _put_any(self, payload: bytes, class_id: int, envelope: Envelope | None) -> None:
        if class_id not in self._openings:
            self._open(class_id)
        is_first = not self._contents and envelope is None and type(payload) is bytes
        if is_first and len(payload) <= self._plain_bytes_max:
            self._plain_class = class_id
            self._put(payload)
            self.handed_bytes += len(payload) + FRAME_BYTES_MIN
        else:
            self._put_dressed(*self._dress(payload, class_id, envelope))

    def _put_dressed(self, opening: bytes, content: bytes) -> None:
        if self._plain_class is not _NO_CLASS:
            self._dress_contents()
        self._various.append(opening)
        self._put(content)
        self.handed_bytes += len(content) + FRAME_BYTES_MIN

    def _dress_contents(self) -> None:
        """Make the payloads that were not looked at ready to be sent."""
        class_id, self._plain_class = self._plain_class, _NO_CLASS
        for index, payload in enumerate(self._contents):
            opening, content = self._dress(payload, class_id, None)
            self.handed_bytes += len(content) - len(payload)
            self._contents[index] = content
            self._various.append(opening)

    def publish_many(
        self, payloads: Iterable[bytes], class_id: int, envelope: Envelope | None = None
    ) -> int:
        """Hand messages over, all or, when it raises what `publish` does, none of them.

        Returns the last one's position; of no messages, that of the one before.
        """
        if class_id not in self._openings:
            self._open(class_id)
        handed = list(payloads)
        if handed and set(map(type, handed)) != {bytes}:
            handed = list(map(_as_bytes, handed))
        if len(handed) > PLAIN_FRAMES_MAX and self._put_run(handed, class_id, envelope):
            return self.published - 1
        dressed = [
            self._dress(payload, class_id, envelope, f" at index {index}")
            for index, payload in enumerate(handed)
        ]
        for opening, content in dressed:
            self._put_dressed(opening, content)
        self.published += len(handed)
        return self.published - 1

    def publish_runs(
        self, runs: list[tuple[int, list[bytes]]], envelope: Envelope | None = None
    ) -> int:
        """Hand messages of several classes over in this order, as `publish_many` does each run; all
        or, when it raises, none of them."""
        if len(runs) > 1:
            self._check_runs(runs, envelope)
        for class_id, payloads in runs:
            self.publish_many(payloads, class_id, envelope)
        return self.published - 1

    def _check_runs(self, runs: list[tuple[int, list[bytes]]], envelope: Envelope | None) -> None:
        """Raise what `publish_many` would, about any of these."""
        for class_id, _ in runs:
            if class_id not in self._openings:
                self._open(class_id)
        payloads = [payload for _, run in runs for payload in run]
        if set(map(type, payloads)) == {bytes}:
            surely = _surely_fitting(self._payload_bytes_max, envelope or _PLAIN)
            if max(map(len, payloads)) <= surely:
                return
        class_ids = (class_id for class_id, run in runs for _ in run)
        for index, (payload, class_id) in enumerate(zip(payloads, class_ids, strict=True)):
            self._dress(payload, class_id, envelope, f" at index {index}")

    def _put_run(self, payloads: list[bytes], class_id: int, envelope: Envelope | None) -> bool:
        """Hand messages over in one piece. False if one of them has to be looked at for itself."""
        if envelope is None:
            opening, contents, foreign = self._openings[class_id], payloads, DELIMITER
        else:
            opening, foreign = self._envelope_openings[class_id], _STUFFED
            front = envelopes.unstuff(envelopes.encode(envelope, b""))
            contents = [front + payload for payload in payloads]
        segment = Segment.of_alike(opening, contents, foreign)
        if segment is None or (
            segment.size > self._payload_bytes_max
            and longest_of(segment.bounds) - FRAME_BYTES_MIN > self._payload_bytes_max
        ):
            return False
        self._seal()
        self._segments.append(segment)
        self.handed_bytes += segment.size
        self.published += segment.count
        return True

    def publish_frames(
        self, data: bytearray | memoryview, bounds: Bounds, class_id: int, *, left_out: int = 0
    ) -> int:
        """Hand over messages that are frames already, of one class, back to back behind a
        delimiter; `bounds` say where each begins behind that, and the last one ends. Their numbers
        are set here, behind so many that are `left_out`: positions of no message. Returns the last
        one's position.

        The caller has seen to it that they are good frames, and none longer than may be; and has
        numbers of its own where it leaves some out, of which less than 2**30 are under way.
        """
        if class_id not in self._openings:
            self._open(class_id)
        self._seal()
        segment = Segment(data, bounds, len(bounds) - 1, left_out=left_out)
        self._segments.append(segment)
        self.handed_bytes += segment.size
        self.published += left_out + segment.count
        return self.published - 1

    def knows(self, class_id: int) -> bool:
        """Whether the class was named to the bus."""
        return class_id in self._openings

    def open_class(self, class_id: int) -> None:
        """The class is known to the bus."""
        self._openings[class_id] = opening_of(frames.MESSAGE, class_id)
        self._envelope_openings[class_id] = opening_of(frames.ENVELOPE, class_id)

    def close_class(self, class_id: int) -> None:
        """The class could not be named."""
        if class_id == self._plain_class:
            self._dress_contents()
        self._openings.pop(class_id, None)
        self._envelope_openings.pop(class_id, None)

    def _open(self, class_id: int) -> bytes:
        self._name_class(class_id)
        return self._openings[class_id]

    def _dress(
        self, payload: object, class_id: int, envelope: Envelope | None, where: str = ""
    ) -> tuple[bytes, bytes]:
        """Opening and content of a message that may need an envelope."""
        payload = _as_bytes(payload)
        if envelope is None and DELIMITER not in payload:
            opening, content = self._openings[class_id], payload
        else:
            content = envelopes.encode(envelope or _PLAIN, payload)
            opening = self._envelope_openings[class_id]
        if len(content) > self._payload_bytes_max:
            raise self._too_long(payload, len(content), where)
        return opening, content

    def _too_long(self, payload: bytes, size: int, where: str) -> LocalProtocolError:
        extra = f" ({size} with its envelope)" if size != len(payload) else ""
        return LocalProtocolError(
            f"the payload{where} has {len(payload)} bytes{extra}; a message of this connection "
            f"carries at most {self._payload_bytes_max}"
        )

    # Connections ---------------------------------------------------------------------------------

    def resume(
        self,
        *,
        number: int,
        credit: int,
        frame_bytes: int,
        forgotten: bool = False,
        lost: int = 0,
    ) -> None:
        """The bus is there and goes on at this number: whatever we have below it is stored.

        A number that is none of ours comes from a bus that has forgotten us, as another bus has:
        what was not confirmed before, it is given under new numbers. `lost` messages that were
        confirmed it says it has not.

        Raises RemoteProtocolError when it does not accept frames as long as were handed over.
        """
        self._limit_frames(frame_bytes)
        self.credit = credit
        self.forgotten += lost
        ahead = (number - self._number(self.confirmed)) & MESSAGE_ID_MASK
        if not forgotten and ahead <= self._numbered - self.confirmed:
            self._settle(self._again, self.confirmed + ahead)
            self._cut_settled()
        else:
            behind = (self._number(self.confirmed) - number) & MESSAGE_ID_MASK
            if not forgotten and behind < _HALF and behind <= self.confirmed:
                self.forgotten += behind
            self._base = number - self.confirmed
            for chunk in self._again:
                chunk.stamp(self._number(chunk.first))
        self._released = self.confirmed

    def lost(self) -> None:
        """The connection is gone: what was under way is to be written again."""
        self._again.extendleft(reversed(self._under_way))
        self._under_way.clear()
        self.under_way_bytes = 0
        self._cut_settled()
        self._released = self.confirmed

    def release(self) -> Chunk | None:
        """The next frames to write; None when there are none, or no credit."""
        chunk = None
        if self._again:
            chunk = self._release_again()
        elif self._segments or len(self._contents) > 1:
            chunk = self._release_next()
        elif self._contents:
            chunk = self._release_one()
        if chunk is not None:
            self._under_way.append(chunk)
            self.under_way_bytes += chunk.size
            self._released = chunk.end
        return chunk

    def _room(self, size: int) -> int:
        """Bytes that may be released; for the next frame, of this size, if nothing is under way."""
        room = self.credit - self.under_way_bytes
        return room if self._under_way else max(room, size)

    def _release_again(self) -> Chunk | None:
        """What was numbered on another connection."""
        chunk = self._again[0]
        room = self._room(chunk.size_below(chunk.first + 1))
        count = fitting(chunk.bounds, 0, most=_CHUNK_BYTES, room=room)
        if not count:
            return None
        self._again.popleft()
        if count < chunk.count:
            chunk, rest = chunk.split(count)
            self._again.appendleft(rest)
        self.resent += count
        return chunk

    def _release_next(self) -> Chunk | None:
        if not self._segments:
            self._seal()
        segment = self._segments[0]
        first = self._numbered + segment.left_out
        room = self._room(segment.next_size)
        chunk = segment.take(most=_CHUNK_BYTES, room=room, first=first, number=self._number(first))
        if chunk is not None:
            self._numbered, segment.left_out = chunk.end, 0
            if segment.is_empty:
                self._segments.popleft()
        return chunk

    def _release_one(self) -> Chunk | None:
        """What `_release_next` does for the only message that is there."""
        if self._plain_class is not _NO_CLASS:
            self._dress_contents()
        (content,) = self._contents
        size = len(content) + FRAME_BYTES_MIN
        if size > self._room(size):
            return None
        first = self._numbered
        self._contents.clear()
        opening = self._various.pop()
        self._numbered = first + 1
        return Chunk.of_one(opening, content, first=first, number=self._number(first))

    def _seal(self) -> None:
        """Make a segment of the contents."""
        contents = self._contents
        if not contents:
            return
        segment = None
        if self._plain_class is not _NO_CLASS:
            segment = Segment.of_alike(self._openings[self._plain_class], contents, DELIMITER)
            if segment is None:
                self._dress_contents()
        self._segments.append(segment or Segment.of_various(self._various, contents))
        self._plain_class, self._various, self._contents = _NO_CLASS, [], []
        self._put = self._contents.append

    def _limit_frames(self, frame_bytes: int) -> None:
        """The bus accepts frames of this length; 0 when it does not say."""
        frame_bytes = min(frame_bytes or self._frame_bytes_max, self._frame_bytes_max)
        shrinks = frame_bytes < self._payload_bytes_max + FRAME_BYTES_MIN
        if shrinks:
            self._seal()
        self._payload_bytes_max = frame_bytes - FRAME_BYTES_MIN
        self._plain_bytes_max = _surely_fitting(self._payload_bytes_max)
        if not shrinks:
            return
        bounds = [chunk.bounds for chunk in self._again]
        bounds += [segment.bounds for segment in self._segments]
        longest = max(map(longest_of, bounds), default=0)
        if longest > frame_bytes:
            raise RemoteProtocolError(
                Reason.FRAME_TOO_LONG,
                f"the bus accepts frames of {frame_bytes} bytes; one of {longest} waits for it",
            )

    # What the bus says ---------------------------------------------------------------------------

    def confirm(self, number: int) -> None:
        """The bus has stored or refused everything below this number."""
        ahead = (number - self._number(self.confirmed)) & MESSAGE_ID_MASK
        if 0 < ahead < _HALF:
            self._check_released(ahead, number)
            freed = self._settle(self._under_way, self.confirmed + ahead)
            self.under_way_bytes -= freed

    def refuse(self, number: int, count: int, error: RefusedError) -> None:
        """The bus has not stored `count` messages from this number on, and will not."""
        ahead = (number - self._number(self.confirmed)) & MESSAGE_ID_MASK
        if ahead >= _HALF:
            return
        self._check_released(ahead + 1, number)
        first = self.confirmed + ahead
        last = min(first + count, self._released)
        self.refused += last - first
        refusals = self._refusals
        for position in range(max(first, last - _REFUSALS_MAX), last):
            refusals[position] = error
        while len(refusals) > _REFUSALS_MAX:
            del refusals[next(iter(refusals))]

    def refusals(self) -> dict[int, RefusedError]:
        """What was refused since this was asked the last time, by position."""
        taken, self._refusals = self._refusals, {}
        return taken

    def _check_released(self, ahead: int, number: int) -> None:
        if self.confirmed + ahead > self._released:
            raise RemoteProtocolError(
                Reason.NUMBER_GAP,
                f"the bus speaks of number {number}; the next one to be written is "
                f"{self._number(self._released)}",
            )

    def _number(self, position: int) -> int:
        return (self._base + position) & MESSAGE_ID_MASK

    def _settle(self, chunks: deque[Chunk], position: int) -> int:
        """Forget what is below the position. Returns how many bytes that were."""
        freed = -self._settled_bytes
        while chunks and chunks[0].end <= position:
            freed += chunks.popleft().size
        self._settled_bytes = chunks[0].size_below(position) if chunks else 0
        freed += self._settled_bytes
        self.confirmed = position
        self._confirmed_bytes += freed
        return freed

    def _cut_settled(self) -> None:
        """Drop the confirmed part of the chunk that is to be written first."""
        if self._settled_bytes:
            chunk = self._again[0]
            self._again[0] = chunk.split(self.confirmed - chunk.first)[1]
            self._settled_bytes = 0

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert self.confirmed <= self._released <= self._numbered <= self.published, vars(self)
        sizes = sum(chunk.size for chunk in self._under_way)
        settled = self._settled_bytes if self._under_way else 0
        assert self.under_way_bytes == sizes - settled
        chunks = [*self._under_way, *self._again]
        positions = [chunk.first for chunk in chunks] + [self._numbered]
        assert all(chunk.end <= after for chunk, after in zip(chunks, positions[1:], strict=True))


def _as_bytes(payload: object) -> bytes:
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise TypeError(
        f"a payload is bytes, got {type(payload).__name__}; encode it first, "
        "for example with str.encode() or json.dumps(…).encode()"
    )
