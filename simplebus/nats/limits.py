"""What bounds the NATS door, and how the bounds relate.

Rule 1: what an operator may change is a field of `NatsLimits`; what the wire or the design fixes is
a constant. Defaults are those of the reference server, nats-server 2.15.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

# Digits of a size, leading zeros included.
SIZE_DIGITS_MAX = 9
# Subjects that are known by number at once; when there are more, all are forgotten.
SUBJECTS_MAX = 65_536
# Longer ones are not looked for by arrays.
BULK_SUBJECT_BYTES_MAX = 128
# Messages with the same line in front of each are looked for from so many on, and are compared in
# blocks from so many that grow, so that what is not found out of so many costs little.
UNIFORM_BATCH_MESSAGES_MIN = 8
UNIFORM_BLOCK_MESSAGES = 256
UNIFORM_BLOCK_MESSAGES_MAX = 8 * 1024
# Messages of many subjects and sizes are looked for by arrays where so many are likely, or in so
# many bytes, and not where one is longer than this: then, one line at a time is faster. One event
# has from so many to so many messages.
BULK_PARSE_MESSAGES_MIN = 48
BULK_PARSE_BYTES_MIN = 8 * 1024
BULK_PARSE_MESSAGE_BYTES_MAX = 2 * 1024
MIXED_BATCH_MESSAGES_MIN = 16
MIXED_BATCH_MESSAGES_MAX = 32 * 1024
# A stretch is dealt with message by message where more than this part of them are each for others
# than all before.
SCATTERED_FRACTION = 0.8
# Messages taken one by one, at most, after others were looked for in vain.
SINGLE_MESSAGES_MAX = 16
# Messages that a subscription with acknowledgements is sent and has not acknowledged, unless it
# asks for another number. More than that, and clients begin to drop what waits in them.
ACKED_IN_FLIGHT_MESSAGES = 1000
# Subjects of which it is remembered whether a user may do something with them; beyond, all are
# judged again.
CACHED_PERMISSIONS_MAX = 4096
# Messages that one client may answer at once who may answer nothing else: of more, the oldest are
# forgotten.
OPEN_REPLIES_MAX = 65_536
# How often a client is read from whose messages wait for room in a class.
BLOCKED_READ_INTERVAL_SECONDS = 0.5
# The first PING comes early: whoever never answers is known soon.
FIRST_PING_SECONDS = 2.0
# Pieces of output are joined up to this long: many small ones cost what they weigh.
OUTPUT_PIECE_BYTES = 64 * 1024

# What one read may make of output for all clients together, and how many things it may say, a batch
# of messages being one; where it is more, the next read of the same client is shorter, down to the
# least. Nobody waits long then for those who say much.
EVENTS_PER_READ = 2048
OUTPUT_PER_READ_BYTES = 8 * 1024 * 1024
# What is not done in batches counts as so many bytes of output: it takes as long.
EVENT_COST_BYTES = 4 * 1024
SUBSCRIBE_COST_BYTES = 16 * 1024
# So does it for each of those who are sent a message, or a part of a batch.
DELIVERY_COST_BYTES = 1024
# Of a client that leaves more than so many subscriptions, these are forgotten later, so many at a
# time: nobody else waits for that.
IMMEDIATE_REMOVALS_MAX = 512
REMOVALS_PER_TICK_MAX = 256
READ_BYTES_MIN = 4 * 1024
# What subscriptions take of memory, roughly: each, each byte of its subject, with a wildcard, for
# each step of that behind those that lead to its box, in a queue group. All together take no more
# than such a part of what classes may hold.
SUBSCRIPTION_MEMORY_BYTES = 512
SUBJECT_CHARACTER_MEMORY_BYTES = 3
PATTERN_MEMORY_BYTES = 768
PATTERN_TOKEN_MEMORY_BYTES = 320
QUEUE_MEMBER_MEMORY_BYTES = 512
SUBSCRIPTION_MEMORY_DIVISOR = 4
# And so much is for each client, if there is any.
CLIENT_SUBSCRIPTION_MEMORY_MIN_BYTES = 64 * 1024
# What an acknowledgement counts as of that; and a message that is kept in a class, if it is packed
# with others, or by itself.
ACK_COST_BYTES = 16 * 1024
BATCHED_STORE_COST_BYTES = 1024
SINGLE_STORE_COST_BYTES = 4 * 1024
# A fresh client is read in pieces of so many bytes; later ones are larger if little is made of
# them.
READ_BYTES_INITIAL = 16 * 1024

# Combinations of queue groups with one name that are remembered; beyond, all are found again.
MERGED_GROUPS_MAX = 1024

# One event may need a number for each of its messages.
assert MIXED_BATCH_MESSAGES_MAX <= SUBJECTS_MAX
# What is looked for in vain costs about as much as what is taken one by one afterwards.
assert (
    UNIFORM_BATCH_MESSAGES_MIN
    <= MIXED_BATCH_MESSAGES_MIN
    <= SINGLE_MESSAGES_MAX
    <= BULK_PARSE_MESSAGES_MIN
)

# A client for which more waits is behind, and who fills it is read from again after it has caught
# up or after this long: where nobody else waits with it, or where somebody does, who was sent
# something by the same client not longer ago than this.
SLOW_CLIENT_PENDING_BYTES = 8 * 1024 * 1024
STALL_SECONDS_EXCLUSIVE = 0.25
STALL_SECONDS_MAX = 0.01
RECENT_DELIVERY_SECONDS = 1.0
# A begun message that is longer counts as kept for its client.
PARTIAL_COMMAND_BYTES_MIN = 4 * 1024
# Others wait so long together for one that is about to be given up.
LAST_CHANCE_SECONDS = 0.1
# It is not waited for any more when it has taken nothing for so long. What a slow one reads is seen
# in steps: its system asks for more when a good part of what it keeps for it has been read.
STUCK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class NatsLimits:
    """What an operator may bound at the NATS door. Sizes are bytes, times are seconds.

    Raises ValueError, naming the field and the bound, when values contradict each other.
    """

    max_payload: int = 1024 * 1024
    """Longest message accepted, headers included."""
    max_control_line: int = 4096
    """Longest line of a verb and its arguments accepted."""
    max_subs: int = 0
    """Subscriptions of one connection; 0 for any number."""
    max_pending: int = 64 * 1024 * 1024
    """Bytes that wait for one connection, above which it is closed as a slow consumer."""
    connections: int = 65_536
    """Connections open at once."""
    auth_seconds: float = 2.0
    """How long a connection may take to say CONNECT, where authentication is asked for."""
    tls_seconds: float = 2.0
    """How long a TLS handshake may take."""
    ping_seconds: float = 120.0
    """How long a connection may be silent before it is sent a PING."""
    pings_max: int = 2
    """PINGs that may be unanswered; one more closes the connection."""
    write_seconds: float = 10.0
    """How long a connection may take nothing of what waits for it."""
    lame_duck_grace_seconds: float = 10.0
    """How long clients are given to leave by themselves after INFO said `ldm`."""
    lame_duck_seconds: float = 120.0
    """Over how long the others are closed then."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("max_subs", "lame_duck_grace_seconds") else 1e-9
            if not value >= least:
                raise ValueError(f"limit {field.name} must be above 0, got {value}")
        for name, low, high in (
            ("max_payload", 1, 10**SIZE_DIGITS_MAX - 1),
            ("max_control_line", 64, 1 << 24),
            ("max_pending", self.max_payload, 1 << 40),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"limit {name} must be from {low} to {high}, got {value}")
