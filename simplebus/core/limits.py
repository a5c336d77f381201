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
SEQUENCE_MAX = (1 << 63) - 1
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
# Of messages that nothing is special about, of which all are wanted, more at a time: they are
# copied in few pieces. Of a window full of holes, so many pieces.
REDELIVERY_PLAIN_BYTES = 1024 * 1024
REDELIVERY_PLAIN_MESSAGES = 32_768
REDELIVERY_PIECES = 2048

# How many messages are looked at at once to find out whether all are for a subscription.
LOOK_AHEAD_MESSAGES = 16_384

# So many messages are looked at in one turn, if none of them is for whom they are looked at.
LOOKED_MESSAGES_MAX = 65_536
# One that is dealt with by itself, be it converted or put off, counts as so many of them.
LOOKED_FOR_ONE = 16
# And in so many spans it is looked for one message.
LOOKED_FOR_SPANS = 1024

# Messages that expired are looked for in so many first, and in more as long as there is no other;
# and in one tick, for all positions of all classes, in so many.
EXPIRED_FIRST = 8
EXPIRED_MESSAGES_MAX = 1 << 20

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

# Who may publish so fast and no faster, and has to wait, waits for so much of it at once, or longer
# than this; where what was read cannot wait, so much is read of it at once, or these bytes if that
# is more. A message is taken to be so long before it is known. So many users and addresses are
# remembered that have published lately.
METERED_PART_SECONDS = 0.05
METERED_WAIT_SECONDS = 0.001
METERED_READ_BYTES = 256
METERED_MESSAGE_BYTES = 64
METERS_MAX = 65_536

# Memory blocks from here on are asked to be huge pages: scattered access misses fewer of them.
HUGE_BYTES_MIN = 2 * 1024 * 1024

# How long a peer that is told why it is cut off has for reading it.
FAREWELL_SECONDS = 1.0

# A ring starts this small and doubles on demand.
RING_SLOTS_MIN = 256
RING_BYTES_MIN = 64 * 1024

# A ring that used less than a quarter of its memory for this many ticks gives the rest back.
RING_IDLE_TICKS = 30

# So many messages that are given up become dead letters at once, and if they are long no more than
# REDELIVERY_BYTES of them: each is written by itself.
DEAD_LETTERS_MAX = 256
# And so often in a tick, of what one position could not bury before.
BURIED_AT_ONCE = 4
# Of so many messages that are to come again the bus remembers what was said of them last, and so
# many bytes of that.
ERRORS_MAX = 4096
ERRORS_BYTES_MAX = 4 * 1024 * 1024
# How long that may be: a sentence, no trace.
ERROR_BYTES_MAX = 1024
# All dead letters together may hold a part of all memory: nobody may read them.
DEAD_LETTERS_PART = 4
# And such a part of it is for nothing else: what fills the memory is what cannot be processed.
DEAD_LETTERS_ASIDE = 16

# Redelivery pauses double up to this many ticks.
REDELIVERY_PAUSE_TICKS_MAX = 60
# Who wants other pauses says so many at most, each no longer than a day.
BACKOFF_MAX = 64
PAUSE_SECONDS_MAX = 86_400.0
# A message is sent so often before it is given up, unless told otherwise: with the pauses above,
# for some thirteen minutes. As RabbitMQ's quorum queues, which give up after 20.
DELIVERIES = 16
DELIVERIES_MAX = 0xFFFF

# A bulk of messages in flight must be addressable by the nearest-id rule: half the id space.
MESSAGES_MAX = 1 << (MESSAGE_ID_BITS - 2)

# Where a read brings more events than so many, and fewer bytes each, the next one is short: what
# each costs keeps the loop from everybody else.
DENSE_EVENTS = 64
DENSE_EVENT_BYTES = 256
DENSE_READ_BYTES = 16 * 1024
# So is it where a read asks for more subscriptions than so many: about so many are made in one turn
# of the loop.
HEAVY_EVENTS = 16
HEAVY_READ_BYTES = 1024

# What a durable takes, roughly, and which part of the memory of classes all may take beside it.
DURABLE_BYTES = 8 * 1024
DURABLES_PART = 4
# And such a part of all classes, and of one class's durables, may a user make who may not do
# everything.
USER_PART = 4
# All of these together leave such a part of all classes to others: a class that is made stays.
LEFT_PART = 8

# Of what is held for last values alone, so many bytes may be no value's; more when the values have
# more. Values are stored anew so many bytes at a time.
CLUTTER_BYTES_MIN = 1024 * 1024
CARRIED_BYTES = 1024 * 1024

# Of what may be kept for all together, one part in so many comes between two looks at it.
BEGUN_PART = 16

# Version 2.
# What an answer that is owed weighs until it is made.
OWED_BYTES = 256
NAME_CHARACTERS_MAX = 200
# Of a user's name, a password and a token: long enough for tokens that others have made.
SECRET_CHARACTERS_MAX = 4096
# Of one user's permissions to publish, and to subscribe.
RULES_MAX = 1024
# Classes, and channels of one class, of which a user's verdicts are remembered.
VERDICTS_KEPT_MAX = 65_536
# The longest frame of a peer that has to say who it is, and has not: a Connect.
GREETING_BYTES_MAX = 64 * 1024
# Of all such peers together; and Heartbeats of one, which are not kept.
GREETINGS_BYTES_MAX = 16 * 1024 * 1024
EARLY_HEARTBEATS_MAX = 64
CHANNEL_BYTES_MAX = 4096
BINDINGS_MAX = 1024
# Pairs of a class and a subject of the NATS door that is bound to it.
SUBJECTS_BOUND_MAX = 4096
# Segments of a pattern with wildcards: as many as a routing key of AMQP can have. However short,
# each takes memory and time.
PATTERN_SEGMENTS_MAX = 128
# So many patterns are compared with a name at once.
SHEET_PATTERNS_MAX = 1024
# Of a sublist: names whose matches are remembered, and the values of all these together; and of how
# many sets of patterns it is remembered what they come to.
CACHE_NAMES_MAX = 4096
CACHE_VALUES_MAX = 1 << 20
CACHE_RESULTS_MAX = 256
# Who names a class without an id is given one from here on. So many are looked at that follow from
# the name; then any that is free will do.
GIVEN_ID_MIN = 0x8000
GIVEN_IDS_TRIED = 64
# With so many channels of one class, those that no stored message carries are forgotten: so many at
# a time at least.
CHANNEL_NAMES_MAX = 65_536
CHANNELS_FORGOTTEN = 4096
# Memory that a channel takes beside its text; and each pattern of a subscription, and if it has
# wildcards each of its segments: about what was measured for those that have the least in common.
CHANNEL_BYTES = 256
PATTERN_BYTES = 2560
PATTERN_SEGMENT_BYTES = 512
# The longest after which a durable that nobody uses may be forgotten: a year.
IDLE_SECONDS_MAX = 365 * 86_400.0
# As many numbers as the wire has.
SUBSCRIPTIONS_MAX = 0xFFFF
IN_FLIGHT_MAX = MESSAGES_MAX
# What one Fetch answers at most.
FETCH_MESSAGES_MAX = 65_536
FETCH_BYTES_MAX = 1024 * 1024
# And it tells so many times of acceptance, at 50 bytes each: far less than the messages.
FETCH_TIMES_MAX = 4096
# And of purged messages among them so many rows; of one class, so many are known at once.
FETCH_PURGED_MAX = 4096
PURGED_RANGES_MAX = 65_536
# What is said of one thing that is asked about: so many classes, sessions, positions of a class,
# members and patterns of a position, characters of a text; and so much is looked at for it.
EXPLAINED_CLASSES = 1024
EXPLAINED_SESSIONS = 256
EXPLAINED_POSITIONS = 64
EXPLAINED_MEMBERS = 32
EXPLAINED_PATTERNS = 8
EXPLAINED_CHARACTERS = 200
EXPLAINED_SPANS = 1024
EXPLAINED_MESSAGES = 1 << 20
EXPLAINED_MATCHES = 20_000
# A subscription is sent so much that it has not acknowledged, unless it asks for another number.
IN_FLIGHT_MESSAGES = 65_536
IN_FLIGHT_BYTES = 16 * 1024 * 1024
# And a member of a group so much: what one holds, the others cannot have.
GROUP_IN_FLIGHT_MESSAGES = 256
# In a group by key so many messages may wait behind the cursor for others of their key, or for the
# member that gets their key, before the group looks no further.
LANES_MESSAGES_MAX = 32_768
# A publisher's frames that may be unconfirmed.
CREDIT_BYTES = 8 * 1024 * 1024
# Publishers that are gone are remembered so long, and so many of them.
PUBLISHER_SECONDS = 3600.0
PUBLISHERS_MAX = 65_536
# A program whose name another one had meanwhile is told a number so far ahead that it has not used
# it, whatever its credit. Odd, and no simple part of all numbers: however often two take turns,
# it is long until one of them comes by where it was.
PUBLISHER_STEP = 820_265_763
# And which of their messages were stored though some before them were not, one bit for each number
# up to the last one of them.
PUBLISHERS_AHEAD_BYTES_MAX = 16 * 1024 * 1024
# Refusals are remembered of each publisher, and of all, until their program has heard of them; one
# behind which so many numbers were used is no news.
PUBLISHER_REFUSALS_MAX = 256
PUBLISHERS_REFUSALS_MAX = 65_536
PUBLISHER_RESENT_MAX = 1 << 22
# A publisher whose credit does not hold it waits while so much is to be written.
LEDGER_BYTES_MAX = 64 * 1024 * 1024
# A class that is full, and whose messages are on disk, too, lets go of such a part of its memory at
# once. Who needs older messages is read so many bytes at a time; of these, all together hold a part
# of all memory. And so many marks say how long what is on disk is.
SPILL_PART = 8
SPILL_READ_BYTES = 1024 * 1024
SPILL_MEMORY_PART = 8
SPILLED_MARKS_MAX = 4096
# What is kept past the process, beside messages, is looked at so often, less often where it is more
# than so many positions, classes and rows about single messages. All of it is written anew when
# what has changed takes so many bytes, and four times as many as all of it; or when so many bytes
# of messages have come, so that which numbers those have used is known without reading them. And of
# so many subscriptions that end with the process it is found out exactly what they leave behind.
KEPT_SECONDS = 0.1
KEPT_POSITIONS = 1000
KEPT_BYTES_MIN = 4 * 1024 * 1024
KEPT_FRAME_BYTES = 256 * 1024 * 1024
KEPT_UNION_MAX = 16
# What was let go of just before a crash, and what was about to be, is there again after it: so a
# class, and all of them together, may hold half as much again as their limits then, and so much.
RESTORED_BYTES_BEYOND = 512 * 1024 * 1024
# When messages were accepted is known to within so many seconds, and for so many points in time.
TIMES_STEP_SECONDS = 0.01
TIMES_MAX = 65_536
# How long a version 2 peer may be silent unless told otherwise.
HEARTBEAT_SECONDS = 30.0
HEARTBEAT_SECONDS_MAX = 3600.0
# A peer that is silent for so many heartbeats is gone.
HEARTBEATS_MISSED_MAX = 3

# The client.
# At the latest when so many messages are processed, or this long after the first of them, their
# acknowledgements are written.
ACKS_MAX = 4096
ACK_SECONDS = 0.05

# How drivers pace themselves: one read, messages between two looks at anything else, and how long
# leaving may take, in peace and after an error.
READ_BYTES = 256 * 1024
MESSAGES_PER_TURN = 1024
# With so much that waits for a loop, a client without an event loop takes no more.
AHEAD_BYTES = 16 * 1024 * 1024
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
    dead_letter_bytes: int = 64 * 1024 * 1024
    """Memory that the dead letters of one class may hold, the oldest of which make room; no more
    than `class_bytes`. Those of all classes together hold a quarter of `total_bytes` at most, and
    what is given up beyond that waits; a sixteenth of it is for nothing else."""
    total_bytes: int = 1024 * 1024 * 1024
    """Memory that all classes together may hold: their frames and columns, the names of the
    channels that their messages carry, the patterns of their subscriptions, connected or not.
    When it is spent, a message finds its class full, and a Subscribe that brings patterns is
    refused with `memory_limit`."""
    pending_bytes: int = 64 * 1024 * 1024
    """Bytes kept for one connection beside the rings: parked messages and unsent replies."""
    total_pending_bytes: int = 1024 * 1024 * 1024
    """The same for all connections together. Looked at once per tick; above it, those for which the
    most is kept are cut off."""
    connections: int = 10_000
    """Connections open at once."""
    classes: int = 4096
    """Classes known at once."""
    subscriptions: int = 1024
    """Subscriptions of one version 2 connection."""
    durables: int = 4096
    """Durable subscriptions of one class."""
    credit_bytes: int = CREDIT_BYTES
    """What a version 2 publisher may have unconfirmed."""
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
            ("dead_letter_bytes", 4 * RING_BYTES_MIN, 1 << 40),
            ("pending_bytes", self.frame_bytes + RECEIVE_BYTES, 1 << 40),
            ("total_pending_bytes", self.pending_bytes, 1 << 50),
            ("classes", 1, CLASS_ID_MAX + 1),
            ("subscriptions", 1, SUBSCRIPTIONS_MAX),
            ("credit_bytes", 1, 1 << 40),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"limit {name} must be from {low} to {high}, got {value}")

    @property
    def credit_granted(self) -> int:
        """What a publisher is told: no more than may be kept for it."""
        return min(self.credit_bytes, self.pending_bytes - RECEIVE_BYTES)
