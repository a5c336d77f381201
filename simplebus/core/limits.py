"""Every bound in one place, and how the bounds relate.

Rule 1: a number that limits a buffer, a count or a wait is defined here, never where it is used.
Rule 2: what an operator may change is a field of `Limits`; what the wire or the design fixes is a
constant.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

HEADER_BYTES = 9
DELIMITER_BYTES = 4
FRAME_BYTES_MIN = HEADER_BYTES + DELIMITER_BYTES

CLASS_ID_MAX = 0xFFFF
MESSAGE_ID_BITS = 31
MESSAGE_ID_MASK = (1 << MESSAGE_ID_BITS) - 1

# Decimal digits of 2**31, the largest number that an ack range may hold (its exclusive end).
ACK_DIGITS_MAX = 10

# Below this many frames a plain loop beats the fixed cost of array operations.
PLAIN_FRAMES_MAX = 50

# One read from a socket. A batch has a fixed cost, which its copying has just pushed out of the
# caches: smaller pieces, which would stay there themselves, are dearer.
RECEIVE_BYTES = 2 * 1024 * 1024

# A partial frame up to this long is copied in front of the next read; a longer one is assembled.
HEADROOM_BYTES = 64 * 1024

# Behind what is received a buffer has this many bytes more, so that words can be read whole.
SPARE_BYTES = 16

# One write to a socket, so that no subscriber holds the loop for long.
SEND_BYTES = 2 * 1024 * 1024

# Frames sent again are copied, this many bytes at a time.
REDELIVERY_BYTES = 256 * 1024
# And from so many sequences at a time, so that a window full of holes does not hold the loop.
REDELIVERY_MESSAGES = 4096

# Parked messages are joined to pieces at least this long: many small ones cost what they weigh.
PARKED_PIECE_BYTES = 64 * 1024

# What a peer whose messages wait for a full class may still send per pause, so that acks behind
# them get through: about 6 MiB/s.
TRICKLE_BYTES = 64 * 1024
TRICKLE_SECONDS = 0.01
# How often it is looked whether one that cannot make the room has hung up.
HUNG_UP_SECONDS = 0.5

# A peer that only acknowledges, and few messages at a time, is read no more often than this: its
# acks then come in batches, and nobody's messages wait behind them.
ACK_REST_SECONDS = 0.001
ACK_REST_MESSAGES_MAX = 64
# Who published so many ticks ago, or less, may be about to publish again: its acks are not put off.
PUBLISHER_TICKS = 1

# Memory blocks from here on are asked to be huge pages: scattered access misses fewer of them.
HUGE_BYTES_MIN = 2 * 1024 * 1024

# A ring starts this small and doubles on demand.
RING_SLOTS_MIN = 256
RING_BYTES_MIN = 64 * 1024

# A ring that used less than a quarter of its memory for this many ticks gives the rest back.
RING_IDLE_TICKS = 30

# Redelivery pauses double up to this many ticks.
REDELIVERY_PAUSE_TICKS_MAX = 60

# A bulk of messages in flight must be addressable by the nearest-id rule: half the id space.
MESSAGES_MAX = 1 << (MESSAGE_ID_BITS - 2)

# The client.
# Bytes that wait for one consumer: reading pauses here, and goes on below half of it.
BUFFERED_BYTES_MAX = 4 * 1024 * 1024

# A consumer that takes nothing for so long stands still.
STILL_SECONDS = 1.0

# At the latest when so many messages are processed, or this long after the first of them, their
# acknowledgements are written.
ACKS_MAX = 4096
ACK_SECONDS = 0.05

# How drivers pace themselves: one read, messages between two looks at anything else, and how long
# leaving may take, in peace and after an error.
READ_BYTES = 256 * 1024
MESSAGES_PER_TURN = 1024
CLOSE_SECONDS = 5.0
CLOSE_SECONDS_FAILED = 1.0

assert FRAME_BYTES_MIN == 13
assert RING_SLOTS_MIN.bit_count() == 1
assert TRICKLE_BYTES <= RECEIVE_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """What an operator may bound. Sizes are bytes, times are seconds.

    Raises ValueError, naming the field and the bound, when values contradict each other.
    """

    frame_bytes: int = 1024 * 1024
    """Longest frame accepted, header and delimiter included."""
    class_messages: int = 50_000_000
    """Messages that one class may hold."""
    class_bytes: int = 512 * 1024 * 1024
    """Memory that one class may hold: its frames and their columns."""
    total_bytes: int = 1024 * 1024 * 1024
    """Memory that all classes together may hold."""
    pending_bytes: int = 64 * 1024 * 1024
    """Bytes kept for one connection beside the rings: parked messages and unsent replies."""
    connections: int = 10_000
    """Connections open at once."""
    classes: int = 4096
    """Classes known at once."""
    hello_seconds: float = 30.0
    """How long a fresh connection may stay silent."""
    frame_seconds: float = 60.0
    """How long a begun frame may stay incomplete."""
    stall_seconds: float = 60.0
    """How long a peer that holds back a full class may take no bytes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"limit {field.name} must be above 0, got {value}")
        for name, low, high in (
            ("frame_bytes", FRAME_BYTES_MIN, self.class_bytes // 2),
            ("class_messages", 1, MESSAGES_MAX),
            ("class_bytes", 4 * RING_BYTES_MIN, self.total_bytes),
            ("pending_bytes", self.frame_bytes + RECEIVE_BYTES, 1 << 40),
            ("classes", 1, CLASS_ID_MAX + 1),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"limit {name} must be from {low} to {high}, got {value}")
