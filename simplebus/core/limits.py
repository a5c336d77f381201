"""Bounds of buffers, counts and times, in one place.

A bound that an operator may change is a field of `Limits`; a bound that the wire format or the
design fixes is a constant. A divisor `N` means one Nth: of a memory budget, for example.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

# Wire format ---------------------------------------------------------------------------------

HEADER_BYTES = 9
DELIMITER_BYTES = 4
FRAME_BYTES_MIN = HEADER_BYTES + DELIMITER_BYTES

CLASS_ID_MAX = 0xFFFF
SEQUENCE_MAX = (1 << 63) - 1
MESSAGE_ID_BITS = 31
MESSAGE_ID_MASK = (1 << MESSAGE_ID_BITS) - 1

# Decimal digits of 2**31, the largest number in an ack range (its exclusive end).
ACK_DIGITS_MAX = 10

# A ring holds at most half of the message ids, so that the nearest sequence to an id is unique.
MESSAGES_MAX = 1 << (MESSAGE_ID_BITS - 2)

# Reading and writing sockets -----------------------------------------------------------------

# Below this number of frames a plain loop is faster than array operations, which have a fixed cost.
PLAIN_FRAMES_MAX = 50

# The server handles the frames of a read one by one, without arrays, up to this number and size.
# Measured: a message costs 3 to 5 us, a batch 40 us and hardly more for further messages.
FEW_FRAMES_MAX = 8
FEW_FRAMES_BYTES_MAX = 4096

# Replies and up to this many bytes of messages are copied into one write.
JOINED_BYTES_MAX = 16 * 1024

# A Confirm that may wait is sent alone after this time.
CONFIRM_WAIT_SECONDS = 0.005

# Size of the largest read from a socket. Each batch has a fixed cost, so large reads cost less.
RECEIVE_BYTES = 2 * 1024 * 1024

# A partial frame up to this length is copied in front of the next read; a longer one is assembled.
# Then reads are shorter: a turn would copy several long frames into new memory.
HEADROOM_BYTES = 64 * 1024
LONG_FRAME_READ_BYTES = 1024 * 1024

# Unused bytes at the end of a receive buffer, so that whole machine words can be read.
RECEIVE_PADDING_BYTES = 16

# Size of one write to a socket, so that no subscriber occupies the event loop for long.
SEND_BYTES = 2 * 1024 * 1024
# A piece of this size ends the turn of its connection.
LARGE_PIECE_BYTES = 256 * 1024
# Messages of one piece that get a new timer index, which takes 0.1 microseconds each.
RESTAMPED_MESSAGES_MAX = 16_384

# Lower bound of the read size of a peer whose messages others cannot keep up with.
REDUCED_READ_BYTES_MIN = 16 * 1024
# After a read with more expensive events than this, such as Subscribe requests, the next read is
# short.
EXPENSIVE_EVENTS_MAX = 16
# Slow requests of one peer that one turn of the event loop processes, by their length. The length
# of each is increased by SLOW_REQUEST_BYTES, because even a short request may take a millisecond.
SLOW_REQUESTS_BYTES_MAX = 8 * 1024
SLOW_REQUEST_BYTES = 4096
# The increase for a Nack or Working, which takes about 40 microseconds, or 100 with a dead letter.
SLOW_ACK_BYTES = 400
# The increase for each message of the Nack or Working, which may become a dead letter.
SLOW_ACK_BYTES_PER_MESSAGE = 64
# A Nack or Working for more than LONG_NACK_MESSAGES messages is processed in parts of about that
# many ranges; a terminate also of at most TERMINATED_PER_TURN messages.
LONG_NACK_MESSAGES = 64
TERMINATED_PER_TURN = 1024
# Messages with several channels that one turn processes: each new channel takes some microseconds.
MIXED_ENVELOPES_PER_TURN = 256
# Bytes of all headers that one turn processes: a header of a few bytes takes half a microsecond.
HEADERS_BYTES_PER_TURN = 32 * 1024
# Frames of different lengths, types or classes, and frames that begin with an Ack, in one turn.
# After some refusals, the frames of some turns are fewer: each refusal is sent in an Error frame.
FRAMES_PER_TURN = 8192
ACKS_PER_TURN = 16_384
REFUSALS_MAX = 16
FRAMES_AFTER_REFUSALS = 32
# Acks of several subscriptions, or between other frames, in one turn: in version 2, each may be
# invalid and is then refused.
INTERLEAVED_ACKS_PER_TURN = 512
INTERLEAVED_ACKS_PER_TURN_VERSION1 = 4096
# Runs of messages of one class in one turn, if the peer may not publish to some of the classes:
# each of their runs is refused in an Error.
REFUSED_RUNS_PER_TURN = 1024
# Different types and classes of the frames that one turn processes: each has its own batch. The
# acks of a subscription, or a single message for NATS clients, take 50 microseconds.
KEYS_PER_TURN = 256
SLOW_KEYS_PER_TURN = 6
# Classes for which one turn stores messages of a connection: 20 to 100 microseconds for each.
CLASSES_PER_TURN = 12
# Changes between frame types in one turn: consecutive frames of one type are processed together.
TYPE_CHANGES_PER_TURN = 128
# Sessions whose timeouts are checked in one turn of the event loop, and classes and positions that
# are ticked in one turn.
TICKED_SESSIONS_PER_TURN = 64
TICKED_CLASSES_PER_TURN = 128
# Classes of a Connect that are created in one turn of the event loop.
CREATED_CLASSES_PER_TURN = 24
# Positions of a class that are notified of new messages, or that drop old ones, in one turn.
POSITIONS_PER_TURN = 128
# Members of a group from which one turn takes messages back, because they are overdue, purged or
# dropped; fewer if the members hold many ranges of messages.
RECLAIMED_MEMBERS_PER_TURN = 16
RECLAIMED_RANGES_PER_TURN = 512
# Positions of a class whose messages are counted in one step, and the same for members of a group.
COUNTED_POSITIONS_PER_STEP = 1024
COUNTED_MEMBERS_PER_STEP = 512
# Positions whose floors are compared at once, to find the lowest one of a class.
FLOOR_CORRECTIONS_MAX = 1024
# Messages that the positions of a class may examine in one turn while they drop expired ones.
EXPIRY_SCANNED_PER_TURN = 1024
# Classes and subjects of a Connect that are checked in one turn. If other requests create classes
# between the turns, the check is repeated. The last of DECLARATION_CHECKS_MAX checks takes one
# turn.
CHECKED_CLASSES_PER_TURN = 512
DECLARATION_CHECKS_MAX = 4
# Classes whose permissions are checked in one turn, for a user with fewer than
# RULES_PER_PERMISSION_CHECK rules. With N times as many rules, it is about an Nth of this number.
PERMISSION_CHECKS_PER_TURN = 128
RULES_PER_PERMISSION_CHECK = 16
# Existing classes that are examined in one turn when settings change.
EXAMINED_CLASSES_PER_TURN = 512
# Sessions whose held bytes are counted in one turn, and that are closed in one turn, because all
# together exceed the limit.
COUNTED_SESSIONS_PER_TURN = 1024
CLOSED_SESSIONS_PER_TURN = 64
# Sessions to which changed users and rate limits are applied in one turn.
CHANGED_SESSIONS_PER_TURN = 128
# Connections of publishers that a shutdown examines, and may disconnect, in one turn.
STOPPED_CONNECTIONS_PER_TURN = 64
EXPENSIVE_EVENTS_READ_BYTES = 1024
# If the frames of a longer read need many turns, the first turn does not process any of them.
CUT_READ_BYTES_MAX = 256 * 1024

# Bytes that a peer whose messages wait for a full class may still send per interval, so that the
# acks behind its messages are read: about 6 MiB/s.
TRICKLE_BYTES = 64 * 1024
TRICKLE_SECONDS = 0.01
# Interval of the check whether a peer whose acks cannot help has closed its connection.
DISCONNECT_CHECK_SECONDS = 0.5

# Delay of the next read from a peer that only acks, so that its acks arrive in batches. The read is
# not delayed if the last one had acks of more than ACK_READ_DELAY_MESSAGES_MAX messages.
ACK_READ_DELAY_SECONDS = 0.001
ACK_READ_DELAY_MESSAGES_MAX = 64
# A peer that published in the last ticks may publish again: its reads are not delayed.
RECENT_PUBLISH_TICKS = 1

# How long a peer has to read the error that explains why it is disconnected.
CLOSE_FLUSH_SECONDS = 1.0

# Rate limits ---------------------------------------------------------------------------------

# A rate-limited publisher waits until it may publish this slice of its rate, but not for less than
# the minimum below.
RATE_LIMIT_SLICE_SECONDS = 0.05
RATE_LIMIT_WAIT_SECONDS_MIN = 0.001
# A rate-limited connection reads the slice of its rate at once, or these bytes if that is more.
RATE_LIMITED_READ_BYTES_MIN = 256
# Assumed size of a message before it is known.
RATE_LIMIT_MESSAGE_BYTES = 64
# Users and addresses whose recent publishing is remembered.
TOKEN_BUCKETS_MAX = 65_536

# Rings ---------------------------------------------------------------------------------------

# A ring starts with this size and doubles on demand.
RING_SLOTS_MIN = 256
RING_BYTES_MIN = 64 * 1024

# A ring grows by segments. Touching a larger one takes too long; smaller ones cost more in total.
RING_SEGMENT_BYTES_MAX = 4 * 1024 * 1024

# Address space that a growing ring leaves to the rest of the process.
ADDRESS_SPACE_RESERVE_BYTES = 16 * 1024 * 1024

# A ring frees the memory that it did not need for this many ticks, some segments with each tick.
RING_IDLE_TICKS = 30
# Single messages reuse the front of an empty segment after this many bytes, which fit into a cache.
RING_RESTART_BYTES = 64 * 1024
RING_FREED_SEGMENTS_MAX = 2

# A full class that drops its oldest messages, and has more positions and members of groups than
# this, drops a further part of its messages each time, because moving all of them for each new
# message takes long.
DROPPED_SINGLY_POSITIONS_MAX = 64
DROP_OLDEST_DIVISOR = 64

# A full class that spills evicts this part of its memory at once.
SPILL_EVICTION_DIVISOR = 8
# Older messages are read back in pieces of this size; all pieces share a part of all memory.
SPILL_READ_BYTES = 1024 * 1024
SPILL_MEMORY_DIVISOR = 8
# Entries of the table of the bytes that are on disk up to a sequence.
SPILL_SIZE_STEPS_MAX = 4096

# Compaction starts when a class keeps this many bytes of other messages because of its last values,
# or more if the values themselves are larger. Values are copied in batches of this size.
COMPACTION_BYTES_MIN = 1024 * 1024
COMPACTION_BATCH_BYTES = 1024 * 1024

# Messages waiting in a full class are joined up to this length: short pieces have a high overhead.
PARKED_BATCH_BYTES = 16 * 1024
# So many waiting envelopes count as one more batch, because each may have a channel of its own.
ENVELOPES_PER_PARKED_BATCH = 32

# Resolution and maximum number of steps of the time index of a class.
TIME_INDEX_STEP_SECONDS = 0.01
TIME_INDEX_STEPS_MAX = 65_536

# Delivery ------------------------------------------------------------------------------------

# Messages in flight of a subscription that does not ask for another number.
IN_FLIGHT_MESSAGES = 65_536
IN_FLIGHT_BYTES = 16 * 1024 * 1024
# Messages, acknowledged or not, whose bytes are measured in one turn.
MEASURED_MESSAGES_PER_TURN = 32_768
# Messages in flight of a group member that does not ask for another number. It is small because
# other members cannot get the messages that one member holds.
GROUP_IN_FLIGHT_MESSAGES = 256
# Larger numbers are lowered to this, because acks in any order search the ranges of messages that
# the member holds.
GROUP_IN_FLIGHT_MAX = 16_384
IN_FLIGHT_MAX = MESSAGES_MAX

# Redelivered frames are copied in pieces of up to REDELIVERY_BYTES. A piece covers up to
# REDELIVERY_MESSAGES sequences, so that a window with many gaps does not occupy the event loop.
REDELIVERY_BYTES = 256 * 1024
REDELIVERY_MESSAGES = 4096
# Pieces are larger if all messages match and need no conversion, because they are copied as few
# ranges: up to REDELIVERY_PIECES ranges of a window with gaps.
REDELIVERY_PLAIN_BYTES = 1024 * 1024
REDELIVERY_PLAIN_MESSAGES = 32_768
REDELIVERY_PIECES = 128

# Messages that are checked at once to find out whether a subscription receives all of them.
LOOKAHEAD_MESSAGES = 16_384

# Messages scanned in one turn without finding one to deliver.
SCAN_MESSAGES_MAX = 32_768
# After scanning this many messages, a connection starts no other scan in the same turn.
CONNECTION_SCAN_MESSAGES_MAX = SCAN_MESSAGES_MAX // 2
# Messages scanned in one turn for a subscription that starts with last values.
LAST_VALUES_SCANNED_PER_TURN = 32_768
# Channels that are compared with the patterns of a subscription in one turn. Each is compared once.
COMPARED_CHANNELS_MAX = 384
# A message that is converted or delayed individually counts as this many scanned messages.
SCAN_COST_OF_COPY = 16
# A delayed range of messages that becomes due counts as this many scanned messages.
SCAN_COST_OF_DELAY = 64
# A redelivered range of a window with gaps counts as this many scanned messages.
SCAN_COST_OF_PIECE = 128
# Spans that are searched for the attempts of messages that wait for redelivery.
WAITING_SEARCH_SPANS_MAX = 128
# Spans that are searched for a message that a client settles after it has left the position.
RELEASED_SEARCH_SPANS_MAX = 4096
# Ranges of messages whose attempts and delays a subscription without a durable passes on to one of
# another kind, at the cost of microseconds each.
HANDOVER_RANGES_MAX = 640

# The first scan for expired messages covers this many. Later scans grow while all are expired.
EXPIRY_SCAN_INITIAL_MESSAGES = 8
# Messages scanned for expiry per tick, for all positions of all classes.
EXPIRY_SCAN_MESSAGES_MAX = 1 << 20

# The default backoff doubles up to this many ticks.
BACKOFF_TICKS_MAX = 60
# Steps of a configured backoff, each no longer than a day.
BACKOFF_STEPS_MAX = 64
BACKOFF_SECONDS_MAX = 86_400.0
# Default deliveries of a message: about 13 minutes with the default backoff. RabbitMQ's quorum
# queues give up after 20.
DEFAULT_DELIVERIES_MAX = 16
DELIVERIES_MAX = 0xFFFF

# Messages of a key-ordered group that may be in flight, or wait behind the cursor because of their
# key, before the group stops scanning. If all of them are purged or dropped, one turn removes them
# from the tables of the group.
KEY_ORDERED_MESSAGES_MAX = 4096

# Dead letters --------------------------------------------------------------------------------

# Dead letters are appended in batches of at most this many messages and REDELIVERY_BYTES. Each
# message takes about 25 microseconds.
DEAD_LETTER_BATCH_MESSAGES = 64
# Remembered reasons of nacks, for messages that will be redelivered: number, bytes in total, bytes
# of one. A reason is a sentence, not a stack trace.
FAILURE_REASONS_MAX = 4096
FAILURE_REASONS_BYTES_MAX = 4 * 1024 * 1024
FAILURE_REASON_BYTES_MAX = 1024
# All dead letters together may hold this part of all memory, because they may stay forever.
DEAD_LETTERS_MEMORY_DIVISOR = 4
# This part of all memory is reserved for them: if the memory is full, the reason may be messages
# that cannot be processed and that must become dead letters.
DEAD_LETTERS_RESERVE_DIVISOR = 16

# Memory estimates and quotas -----------------------------------------------------------------

# Approximate memory of a durable. All durables may take a part of the memory of the classes.
DURABLE_BYTES = 8 * 1024
DURABLES_MEMORY_DIVISOR = 4
# A user with restricted permissions may create this part of all classes, and of the durables.
USER_QUOTA_DIVISOR = 4
# Restricted users leave this part of all classes to other users.
RESERVED_CLASSES_DIVISOR = 8
# Parts of all classes that clients without a user may create: the clients of one address together
# (also the part of all durables), and each connection.
ADDRESS_QUOTA_DIVISOR = 2
CONNECTION_QUOTA_DIVISOR = 4
# Classes that are checked for use per tick.
IDLE_CLASS_CHECKS_PER_TICK = 256

# The pending bytes of all connections are checked again after this part of the limit was received.
PENDING_CHECK_DIVISOR = 16
# Pending bytes that a reply counts for before it is built.
PENDING_REPLY_BYTES = 256

# Memory of a channel beside its text, of a pattern, and of each segment of a pattern with
# wildcards: about as measured for patterns that have nothing in common.
CHANNEL_BYTES = 256
PATTERN_BYTES = 2560
PATTERN_SEGMENT_BYTES = 512

# Version 2 -----------------------------------------------------------------------------------

NAME_CHARACTERS_MAX = 200
# User name, password and token: long enough for tokens of other systems.
SECRET_CHARACTERS_MAX = 4096
# Permission rules of one user, for publishing and for subscribing.
RULES_MAX = 1024
# Classes, and channels of one class, whose permissions are cached per user.
PERMISSION_CACHE_MAX = 65_536
# Longest JSON of a request: a longer one takes more than some milliseconds to decode.
REQUEST_BYTES_MAX = 64 * 1024
# Longest frame of a peer that has not authenticated yet: a Connect.
HANDSHAKE_FRAME_BYTES_MAX = 64 * 1024
# Buffered bytes of all unauthenticated peers together. Heartbeats of one such peer, which are not
# buffered.
HANDSHAKES_BYTES_MAX = 16 * 1024 * 1024
HANDSHAKE_HEARTBEATS_MAX = 64
CHANNEL_BYTES_MAX = 4096
# Headers of a published message: more take milliseconds to convert for one NATS client.
HEADERS_MAX = 1024
# The same of a stored message, as many as fit: a dead letter has more than the published message.
STORED_HEADERS_MAX = 16_384
BINDINGS_MAX = 256
# Pairs of a class and a NATS subject that is bound to it.
SUBJECT_BINDINGS_MAX = 4096
# Segments of a pattern with wildcards, as many as an AMQP routing key can have.
PATTERN_SEGMENTS_MAX = 128
# Patterns that are compared with a channel name at once.
PATTERN_PAGE_SIZE = 1024
# Patterns of new subscriptions that are indexed, or of ended ones that are removed, in one turn of
# the event loop. More would delay other clients by several milliseconds.
PATTERNS_PER_TURN = 64
# Patterns of a subscription that are indexed when it begins; more of them are indexed later.
PATTERNS_INDEXED_AT_ONCE = 16
# Patterns of a subscription that are removed when it ends; more of them are removed later.
PATTERNS_REMOVED_AT_ONCE = 4
# Subscriptions and declared classes of a closed connection that end in one turn of the event loop.
SUBSCRIPTIONS_ENDED_PER_TURN = 16
# A turn ends fewer subscriptions if those of groups hold more messages than this.
RETURNED_PER_TURN = 128
# Ranges of delayed messages of ended subscriptions that are freed in one turn.
FREED_SPANS_PER_TURN = 8192
DECLARED_CLASSES_ENDED_PER_TURN = 512
# Subscriptions and durables of a class to which a Purge is applied in one turn.
PURGED_POSITIONS_PER_TURN = 128
# Result cache of a subscription index: names, values of all names, and combined pattern sets.
CACHE_NAMES_MAX = 4096
CACHE_VALUES_MAX = 1 << 19
CACHE_RESULTS_MAX = 256
# Results of a subscription index with more values are pages, not tuples.
MATCHES_IN_TUPLE_MAX = 512
# A class that is declared by name only gets an id from ASSIGNED_CLASS_ID_MIN on: one of this many
# ids that are computed from the name, or any free id if all of these are in use.
ASSIGNED_CLASS_ID_MIN = 0x8000
ASSIGNED_CLASS_ID_PROBES = 64
# A class with CHANNEL_NAMES_MAX channels forgets channels without stored messages, at least
# FORGET_CHANNELS_MIN at once.
CHANNEL_NAMES_MAX = 65_536
FORGET_CHANNELS_MIN = 4096
# The longest time after which an idle durable may be removed: a year.
IDLE_SECONDS_MAX = 365 * 86_400.0
# Subscription numbers have 16 bits.
SUBSCRIPTIONS_MAX = 0xFFFF
# One Fetch reply.
FETCH_MESSAGES_MAX = 65_536
FETCH_BYTES_MAX = 1024 * 1024
# Acceptance times in a Fetch reply, of 50 bytes each: far less than the messages.
FETCH_TIMES_MAX = 4096
# Purged ranges in a Fetch reply, and purged ranges that a class remembers.
FETCH_PURGED_MAX = 4096
PURGED_RANGES_MAX = 65_536
# Contents of an Inquire reply: classes, sessions, positions of a class, members and patterns of a
# position, characters of a text. Work for an Inquire reply: examined spans, messages and patterns.
INQUIRY_CLASSES_MAX = 1024
INQUIRY_SESSIONS_MAX = 256
INQUIRY_POSITIONS_MAX = 64
INQUIRY_MEMBERS_MAX = 32
INQUIRY_PATTERNS_MAX = 8
INQUIRY_TEXT_CHARACTERS_MAX = 200
INQUIRY_SPANS_MAX = 1024
INQUIRY_MESSAGES_MAX = 1 << 20
INQUIRY_PATTERN_CHECKS_MAX = 20_000
# How long a version 2 peer may be silent by default.
HEARTBEAT_SECONDS = 30.0
HEARTBEAT_SECONDS_MAX = 3600.0
# A peer that misses this many heartbeats is disconnected.
HEARTBEATS_MISSED_MAX = 3

# Publishers ----------------------------------------------------------------------------------

# Unconfirmed frames of a publisher.
CREDIT_BYTES = 8 * 1024 * 1024
# Time for which the states of disconnected publishers are kept, and their maximum number.
PRODUCER_STATE_SECONDS = 3600.0
PRODUCER_STATES_MAX = 65_536
# An instance whose name was used by another instance continues this many numbers ahead, so that it
# has certainly not used the next number before. The step is odd and not a simple fraction of the
# number range: if two instances alternate, it takes long until one of them uses a number again.
PRODUCER_TAKEOVER_STEP = 820_265_763
# Memory of the bitmaps of all producer states.
PRODUCER_BITMAPS_BYTES_MAX = 16 * 1024 * 1024
# Refusals that are kept for one publisher, and for all, until the publisher has received them.
PRODUCER_REFUSALS_MAX = 256
TOTAL_PRODUCER_REFUSALS_MAX = 65_536
# A refusal is forgotten after the publisher has used this many later numbers.
PRODUCER_RESENT_NUMBERS_MAX = 1 << 22
# Messages with the id of an earlier message of their class are duplicates for this long, as in
# JetStream. An id takes about 200 bytes.
DUPLICATE_WINDOW_SECONDS = 120.0
MESSAGE_IDS_MAX = 262_144
MESSAGE_IDS_EXPIRED_PER_TICK = 4096

# Journal -------------------------------------------------------------------------------------

# Unwritten bytes at which publishers that are not limited by credit are paused.
COMMIT_LOG_BYTES_MAX = 64 * 1024 * 1024
# Interval of complete scans for state changes; proportionally longer with more positions, classes
# and rows about single messages than this.
CHECKPOINT_SECONDS = 0.1
CHECKPOINT_POSITIONS = 1000
# A portion of a scan: classes and durables that it examines, and their rows about single messages.
# Then the scan pauses for CHECKPOINT_PAUSE_SECONDS, so that other tasks run. A durable is not
# divided between portions: the attempts and delays of CHECKPOINT_RANGES_MAX ranges are recorded,
# and those of all ranges when the server stops.
CHECKPOINT_POSITIONS_PER_TURN = 64
CHECKPOINT_ROWS_PER_TURN = 1024
CHECKPOINT_RANGES_MAX = 4096
CHECKPOINT_PAUSE_SECONDS = 0.005
# With this many changes of classes, durables and publisher names, a write batch is built even if
# the journal's thread is busy: building a longer batch later would take too long.
CHANGES_PER_WRITE_BATCH = 64
# Publisher names that a snapshot collects in one turn. A connected publisher whose numbers are not
# all confirmed counts for more.
CHECKPOINT_PRODUCERS_PER_TURN = 1024
CHECKPOINT_UNCONFIRMED_COST = 32
# If there are no messages to write, sent and acknowledged messages are recorded at this interval. A
# batch records up to PROGRESS_POSITIONS_PER_TURN positions. A position whose record needs more rows
# or a longer window than this is left to the complete scan.
PROGRESS_SECONDS = 0.005
PROGRESS_POSITIONS_PER_TURN = 256
PROGRESS_ROWS_MAX = 256
PROGRESS_WINDOW_MESSAGES = 65_536
# A snapshot is written after this many bytes of changes, or after four times the size of the last
# snapshot if that is more.
SNAPSHOT_CHANGE_BYTES_MIN = 4 * 1024 * 1024
# A snapshot is also written after this many bytes of messages, so that recovery need not read more
# messages to find the used message numbers.
SNAPSHOT_MESSAGE_BYTES = 256 * 1024 * 1024
# Subscriptions whose remaining messages are united exactly; with more, an approximation is used.
CHECKPOINT_UNION_MAX = 16
# Recovery may find messages that were released just before a crash. So a class, and all classes
# together, may exceed their limits by half and by this many bytes during recovery.
RESTORE_HEADROOM_BYTES = 512 * 1024 * 1024

# Client --------------------------------------------------------------------------------------

# Acks are written after this many messages, or this long after the first of them.
ACK_BATCH_MESSAGES = 4096
ACK_SECONDS = 0.05

# Size of one read of a client.
READ_BYTES = 256 * 1024
# Messages that a program handles before other tasks run.
MESSAGES_PER_TURN = 1024
# A blocking client stops reading when this much waits for its program.
PREFETCH_BYTES = 16 * 1024 * 1024
# Time limit of closing a client: normally, and after an error.
CLOSE_SECONDS = 5.0
CLOSE_SECONDS_FAILED = 1.0

assert FRAME_BYTES_MIN == 13
assert RING_SLOTS_MIN.bit_count() == 1
assert TRICKLE_BYTES <= CUT_READ_BYTES_MAX <= RECEIVE_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that an operator can configure. Sizes are bytes, times are seconds.

    Raises:
        ValueError: if a value is out of range or contradicts another one. The message names the
            field and the bounds.
    """

    frame_bytes: int = 1024 * 1024
    """Longest frame accepted, including header and delimiter."""
    class_messages: int = 50_000_000
    """Messages that one class may hold."""
    class_bytes: int = 512 * 1024 * 1024
    """Memory of one class: frames and columns."""
    dead_letter_bytes: int = 64 * 1024 * 1024
    """Memory of the dead letters of one class, at most `class_bytes`. The oldest are dropped when
    it is used up. The dead letters of all classes hold at most a quarter of `total_bytes`; further
    ones wait. A sixteenth of `total_bytes` is reserved for them."""
    total_bytes: int = 1024 * 1024 * 1024
    """Memory of all classes: frames, columns, channel names, and the patterns of connected and
    disconnected subscriptions. When it is used up, classes are full, and a Subscribe with patterns
    is refused with `memory_limit`."""
    pending_bytes: int = 64 * 1024 * 1024
    """Memory of one connection outside the rings: messages that wait for a full class, and unsent
    replies."""
    total_pending_bytes: int = 1024 * 1024 * 1024
    """Limit of the pending bytes of all connections together, checked once per tick. Above it, the
    connections with the most pending bytes are closed."""
    connections: int = 10_000
    """Open connections."""
    classes: int = 4096
    """Existing classes."""
    subscriptions: int = 1024
    """Subscriptions of one version 2 connection."""
    durables: int = 4096
    """Durables and groups of one class."""
    classes_per_address: int | None = None
    """Classes created by clients of one address without a user; 0 for no limit, None for half of
    `classes`."""
    classes_per_connection: int | None = None
    """Classes created by one connection without a user; 0 for no limit, None for a quarter of
    `classes`."""
    durables_per_address: int | None = None
    """Durables and groups, in all classes, created by clients of one address without a user; 0 for
    no limit, None for half of `durables`."""
    credit_bytes: int = CREDIT_BYTES
    """Unconfirmed bytes of a version 2 publisher."""
    hello_seconds: float = 30.0
    """Time that a new connection may stay silent."""
    frame_seconds: float = 60.0
    """Time that a frame may stay incomplete."""
    stall_seconds: float = 60.0
    """Time that a peer may read nothing while publishers wait for it because a class is full."""

    def __post_init__(self) -> None:
        for name in ("classes_per_address", "classes_per_connection", "durables_per_address"):
            if (quota := getattr(self, name)) is not None and quota < 0:
                raise ValueError(f"limit {name} must be 0 or more, got {quota}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.default is not None and not value > 0:
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
    def granted_credit_bytes(self) -> int:
        """Credit that the server grants: `credit_bytes`, but at most what may be pending."""
        return min(self.credit_bytes, self.pending_bytes - RECEIVE_BYTES)
