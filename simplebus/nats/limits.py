"""Limits of the NATS server and their relations.

Bounds that an operator may change are fields of `NatsLimits`, with the defaults of nats-server
2.15. Bounds fixed by the protocol or the design are constants.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

# Digits of a size, including leading zeros.
SIZE_DIGITS_MAX = 9
# Subjects that have numbers at the same time; when more are needed, all are forgotten.
SUBJECTS_MAX = 65_536
# Forgotten subjects whose memory is freed at once.
SUBJECTS_FREED_PER_TURN = 1024
# Longer subjects are left to the line parser.
BULK_SUBJECT_BYTES_MAX = 128
# Smallest uniform batch. Messages are compared in blocks of growing size, so that a batch that
# breaks off early costs little.
UNIFORM_BATCH_MESSAGES_MIN = 8
UNIFORM_BLOCK_MESSAGES = 256
UNIFORM_BLOCK_MESSAGES_MAX = 8 * 1024
# The bulk parser runs if this many messages are likely or this many bytes remain, unless the
# current message is longer than the maximum: then single lines are faster. A mixed batch has
# between MIXED_BATCH_MESSAGES_MIN and MIXED_BATCH_MESSAGES_MAX messages.
BULK_PARSE_MESSAGES_MIN = 48
BULK_PARSE_BYTES_MIN = 8 * 1024
BULK_PARSE_MESSAGE_BYTES_MAX = 2 * 1024
MIXED_BATCH_MESSAGES_MIN = 16
MIXED_BATCH_MESSAGES_MAX = 32 * 1024
# Maximum number of messages of a mixed batch whose subjects are not in the subject table yet.
NEW_SUBJECT_MESSAGES_MAX = 192
# A batch is delivered message by message if more than this fraction of the messages have different
# sinks.
SCATTERED_FRACTION = 0.8
# Maximum number of messages that are parsed singly after the bulk parser found no batch.
SINGLE_MESSAGES_MAX = 16
# Default for the messages in flight of an acked subscription. With more, client libraries begin to
# drop pending messages.
ACKED_IN_FLIGHT_MESSAGES = 1000
# Messages for acked subscriptions that are encoded at once. Encoding a message takes as long as
# scanning SCAN_COST_OF_ENCODING messages.
ENCODED_MESSAGES_MAX = 128
SCAN_COST_OF_ENCODING = 256
# Cached permission decisions; the cache is cleared when it is full.
CACHED_PERMISSIONS_MAX = 4096
# Open reply subjects of a client with a response permission; the oldest are dropped.
OPEN_REPLIES_MAX = 65_536
# PubAcks of one client that may wait for the journal.
WAITING_PUB_ACKS_MAX = 16_384
# Interval of reads from a client whose messages wait for space in a class.
BLOCKED_READ_INTERVAL_SECONDS = 0.5
# The first PING is sent early, to detect clients that never answer.
FIRST_PING_SECONDS = 2.0
# Pieces of output are joined up to this size: each piece costs a system call.
OUTPUT_PIECE_BYTES = 64 * 1024

# Smallest body that the output of several clients shares. Copies for thousands of clients take
# long, mostly in page faults.
SHARED_BODY_BYTES_MIN = 16 * 1024

# Events and output of one read; a batch is one event. Beyond these limits, the rest of the read is
# processed in later turns of the event loop, and the next read of the client is shorter, down to
# READ_BYTES_MIN, so that a busy client does not delay others. A publication with more output is
# delivered in several turns.
EVENTS_PER_READ = 2048
OUTPUT_PER_READ_BYTES = 5 * 1024 * 1024
# A publication in several turns begins in the next turn if its messages, which are copied for it,
# are longer than this.
COPIED_IN_TURN_BYTES_MAX = 256 * 1024
# A batch that costs more for one client, or for queue groups, is delivered message by message.
BATCH_COST_PER_CLIENT_MAX = OUTPUT_PER_READ_BYTES
# Cost of an event outside batches, as the number of output bytes that take equally long.
EVENT_COST_BYTES = 4 * 1024
# Cost of a PING or PONG, and of a CONNECT.
PING_COST_BYTES = 10 * 1024
CONNECT_COST_BYTES = 64 * 1024
# Cost of a request that nobody has received, besides that of looking for the requester among the
# sinks of its reply subject.
NO_RESPONDERS_COST_BYTES = 16 * 1024
SUBSCRIBE_COST_BYTES = 1024 * 1024
# Cost of ending an acked subscription because of a repeated CONNECT.
UNSUBSCRIBE_COST_BYTES = 256 * 1024
# Cost of appending some dead letters of a position that ends.
DEAD_LETTERS_COST_BYTES = 4 * 1024 * 1024
# Cost of delivering a batch to one sink, and the extra cost if the sink has a delivery filter.
DELIVERY_COST_BYTES = 24 * 1024
FILTERED_DELIVERY_COST_BYTES = 16 * 1024
# Cost of delivering a message outside batches to one sink.
SINGLE_DELIVERY_COST_BYTES = 10 * 1024
# Cost of grouping one sink of a batch that is delivered in several turns by its client.
GROUPING_COST_BYTES = 2 * 1024
# Cost of comparing one sink of a subject with that of another subject.
SINK_COMPARISON_COST_BYTES = 128
# Cost of searching for the sinks of a subject without a cached result, and maximum number of
# messages with such subjects in one turn. The permissions of a publisher that are decided in one
# turn may cost as much.
SEARCHED_SUBJECT_COST_BYTES = 14 * 1024
SEARCHED_SUBJECTS_PER_TURN_MAX = 384
# Cost of a permission decision that is not cached, and the extra cost of each rule that the subject
# is compared with. Many decisions are divided into steps of DECISION_STEP_COST_BYTES.
DECISION_COST_BYTES = 10 * 1024
DECISION_RULE_COST_BYTES = 2 * 1024
DECISION_STEP_COST_BYTES = 640 * 1024
# Largest number of delivery filters for which a mixed batch is delivered as a batch to one client,
# or to queue groups. With more filters, it is delivered message by message.
FILTERS_PER_BATCH_MAX = 4
# Cost of finding, merging or examining one of many sinks of a subject. The search for the sinks of
# a batch ends when more than SEARCHED_SINKS_PER_TURN_MAX are found; then its messages are published
# singly.
FOUND_SINK_COST_BYTES = 384
SEARCHED_SINKS_PER_TURN_MAX = 4 * 1024
# After a turn that took long, messages for more clients than this are sent in later turns: each
# client costs a system call.
SENT_AFTER_LONG_TURN_MAX = 64
# Memory of deliveries of the bus that wait for later turns, in equal parts for the classes that
# have any. Beyond it, the clients that cause more of them are not read.
WAITING_DELIVERIES_BYTES_MAX = 64 * 1024 * 1024
# Estimated memory of a waiting delivery besides its messages, and for each of its sinks.
WAITING_DELIVERY_BYTES = 1024
WAITING_SINK_BYTES = 8
# Time for which a publisher of the bus is not read because deliveries of its messages wait. It is
# longer while their memory exceeds the limit.
WAITING_DELIVERIES_STALL_SECONDS = 1.0
# Encoded copies of a batch, for different subscription ids, that are kept from turn to turn.
ENCODED_BATCHES_KEPT_MAX = 4
# If a leaving client has more subscriptions than this, they are removed later, a limited number in
# each turn of the event loop, so that other clients do not wait.
IMMEDIATE_REMOVALS_MAX = 128
REMOVALS_PER_TURN_MAX = 64
# Clients whose timeouts are checked in one turn of the event loop. Each may be sent a PING.
CHECKED_CLIENTS_PER_TURN = 128
# Cost of disconnecting a client, as checks of clients. Each subscription that is removed at once
# costs another one.
DISCONNECT_COST_CHECKS = 4
# Output buffers whose memory is counted in one turn, and those of one more client.
EXAMINED_BUFFERS_PER_TURN = 2048
# Discarded output of slow clients that is returned to the system in one turn: bytes, and pieces.
FREED_BYTES_PER_TURN = 2 * 1024 * 1024
FREED_PIECES_PER_TURN = 1024
READ_BYTES_MIN = 4 * 1024
# The cost of a batch for many clients depends on the number of clients more than on its size. So
# the reads of its publisher are not shorter than this, unless one client gets too much output.
FAN_OUT_READ_BYTES = 32 * 1024
# Estimated memory per subscription, per character of its subject, per pattern, per token of a
# pattern behind the indexed prefix, and per queue group member. All subscriptions together may use
# 1/SUBSCRIPTION_MEMORY_DIVISOR of the memory budget of classes.
SUBSCRIPTION_MEMORY_BYTES = 512
SUBJECT_CHARACTER_MEMORY_BYTES = 3
PATTERN_MEMORY_BYTES = 768
PATTERN_TOKEN_MEMORY_BYTES = 320
QUEUE_MEMBER_MEMORY_BYTES = 512
SUBSCRIPTION_MEMORY_DIVISOR = 4
# Memory that each client may use while there is space.
CLIENT_SUBSCRIPTION_MEMORY_MIN_BYTES = 64 * 1024
# Cost of an ack.
ACK_COST_BYTES = 48 * 1024
# What a nack, a working, or an ack in a queue group costs besides, and a terminate.
NACK_EXTRA_COST_BYTES = 96 * 1024
TERMINATE_EXTRA_COST_BYTES = 640 * 1024
# Cost of an ack or terminate by a client that has left the position: many spans are searched.
SPAN_SEARCH_COST_BYTES = OUTPUT_PER_READ_BYTES // 2
# Cost of a message stored in a class with others, and of a message stored singly.
BATCHED_STORE_COST_BYTES = 1024
SINGLE_STORE_COST_BYTES = 4 * 1024
# Cost of a byte of headers of a message that is converted to or from an envelope.
HEADER_COST_FACTOR = 128
# Cost of converting a stored message with an envelope, and size up to which all are converted at
# once.
SINGLE_CONVERSION_COST_BYTES = 16 * 1024
CONVERTED_AT_ONCE_BYTES = 4 * 1024
# Messages without headers that are converted and delivered together.
CONVERTED_BATCH_MAX = 1024
# First read size of a client; it grows while reads are cheap.
READ_BYTES_INITIAL = 4 * 1024

# Sinks in the results that are cached by subject number; then all of these are forgotten.
CACHED_SINKS_MAX = 256 * 1024
# Time and memory for each merged queue group, as a number of sinks in a result.
MERGED_GROUP_COST = 16

# Each message of a batch may need its own subject number.
assert MIXED_BATCH_MESSAGES_MAX <= SUBJECTS_MAX
# A failed search for a batch costs about as much as the messages parsed singly afterwards.
assert (
    UNIFORM_BATCH_MESSAGES_MIN
    <= MIXED_BATCH_MESSAGES_MIN
    <= SINGLE_MESSAGES_MAX
    <= BULK_PARSE_MESSAGES_MIN
)

# A client with more pending bytes is slow. Its publisher is read again when the client has caught
# up or after STALL_SECONDS_EXCLUSIVE; after STALL_SECONDS_MAX if it also published to a fast client
# within RECENT_DELIVERY_SECONDS.
SLOW_CLIENT_PENDING_BYTES = 8 * 1024 * 1024
STALL_SECONDS_EXCLUSIVE = 0.25
STALL_SECONDS_MAX = 0.01
RECENT_DELIVERY_SECONDS = 1.0
# Kept input above this size, such as an incomplete command, counts as memory held for the client.
KEPT_INPUT_BYTES_MIN = 4 * 1024
# Total time that publishers wait for a client that is about to be disconnected.
LAST_CHANCE_SECONDS = 0.1
# Publishers no longer wait for a client that has made no progress for this long. The progress of a
# slow reader is visible only in steps, because its system updates the TCP window in large steps.
STUCK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class NatsLimits:
    """Configurable limits of the NATS listener. Sizes are bytes, times are seconds.

    Raises:
        ValueError: A value is out of range; the message names the field and the bound.
    """

    max_payload: int = 1024 * 1024
    """Longest accepted message, including headers."""
    max_control_line: int = 4096
    """Longest accepted line of a verb and its arguments."""
    max_subs: int = 0
    """Subscriptions of one connection; 0 for no limit."""
    max_pending: int = 64 * 1024 * 1024
    """Pending bytes of one connection, above which it is closed as a slow consumer."""
    connections: int = 65_536
    """Open connections."""
    auth_seconds: float = 2.0
    """Time until CONNECT, if authentication is required."""
    tls_seconds: float = 2.0
    """Duration of a TLS handshake."""
    ping_seconds: float = 120.0
    """Silence of a connection after which it is sent a PING."""
    pings_max: int = 2
    """Unanswered PINGs; one more closes the connection."""
    write_seconds: float = 10.0
    """Time for which a connection may read nothing of its pending bytes."""
    lame_duck_grace_seconds: float = 10.0
    """Time for clients to leave by themselves after INFO with `ldm`."""
    lame_duck_seconds: float = 120.0
    """Time over which the remaining connections are closed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            minimum = 0 if field.name in ("max_subs", "lame_duck_grace_seconds") else 1e-9
            if not value >= minimum:
                raise ValueError(f"limit {field.name} must be above 0, got {value}")
        for name, low, high in (
            ("max_payload", 1, 10**SIZE_DIGITS_MAX - 1),
            ("max_control_line", 64, 1 << 24),
            ("max_pending", self.max_payload, 1 << 40),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"limit {name} must be from {low} to {high}, got {value}")
