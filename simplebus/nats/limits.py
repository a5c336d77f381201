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
SUBJECT_BYTES_FAST = 128
# Messages with the same line in front of each are looked for from so many on, and are compared in
# blocks from so many that grow, so that what is not found out of so many costs little.
RUN_MESSAGES_MIN = 8
RUN_BLOCK_MESSAGES = 256
RUN_BLOCK_MESSAGES_MAX = 8 * 1024
# Messages of many subjects and sizes are looked for by arrays where so many are likely, or in so
# many bytes, and not where one is longer than this: then, one line at a time is faster. One event
# has from so many to so many messages.
MIX_MESSAGES_MIN = 48
MIX_BYTES_MIN = 8 * 1024
MIX_MESSAGE_BYTES_MAX = 2 * 1024
MIX_MESSAGES_LEAST = 16
MIX_MESSAGES_MAX = 32 * 1024
# A stretch is dealt with message by message where more than this part of them are each for others
# than all before.
SCATTERED_PART = 0.8
# Messages taken one by one, at most, after others were looked for in vain.
PLAIN_MESSAGES = 16
# Messages that a subscription with acknowledgements is sent and has not acknowledged, unless it
# asks for another number. More than that, and clients begin to drop what waits in them.
ACKED_IN_FLIGHT_MESSAGES = 1000
# Subjects of which it is remembered whether a user may do something with them; beyond, all are
# judged again.
VERDICTS_MAX = 4096
# Messages that one client may answer at once who may answer nothing else: of more, the oldest are
# forgotten.
REPLIES_MAX = 65_536
# How often a client is read from whose messages wait for room in a class.
HELD_SECONDS = 0.5
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
EVENT_BYTES = 4 * 1024
SUBSCRIPTION_BYTES = 16 * 1024
# So does it for each of those who are sent a message, or a part of a batch.
TAKER_BYTES = 1024
# Of a client that leaves more than so many subscriptions, these are forgotten later, so many at a
# time: nobody else waits for that.
DROPPED_AT_ONCE = 512
TIDIED_AT_ONCE = 256
READ_BYTES_MIN = 4 * 1024
# What subscriptions take of memory, roughly: each, each byte of its subject, with a wildcard, for
# each step of that behind those that lead to its box, in a queue group. All together take no more
# than such a part of what classes may hold.
KEPT_BYTES_OF_SUBSCRIPTION = 512
KEPT_BYTES_OF_BYTE = 3
KEPT_BYTES_OF_PATTERN = 768
KEPT_BYTES_OF_STEP = 320
KEPT_BYTES_OF_QUEUE = 512
INTEREST_PART = 4
# And so much is for each client, if there is any.
INTEREST_LITTLE_BYTES = 64 * 1024
# What an acknowledgement counts as of that; and a message that is kept in a class, if it is packed
# with others, or by itself.
ACK_BYTES = 16 * 1024
PACKED_BYTES = 1024
PACKED_ALONE_BYTES = 4 * 1024
# A fresh client is read in pieces of so many bytes; later ones are larger if little is made of
# them.
READ_BYTES_FIRST = 16 * 1024

# Combinations of queue groups with one name that are remembered; beyond, all are found again.
JOINED_MAX = 1024

# One event may need a number for each of its messages.
assert MIX_MESSAGES_MAX <= SUBJECTS_MAX
# What is looked for in vain costs about as much as what is taken one by one afterwards.
assert RUN_MESSAGES_MIN <= MIX_MESSAGES_LEAST <= PLAIN_MESSAGES <= MIX_MESSAGES_MIN

# A client for which more waits is behind, and who fills it is read from again after it has caught
# up or after this long: where nobody else waits with it, or where somebody does, who was sent
# something by the same client not longer ago than this.
BACKLOG_BYTES = 8 * 1024 * 1024
STALL_SECONDS_ALONE = 0.25
STALL_SECONDS_MAX = 0.01
FED_SECONDS = 1.0
# A begun message that is longer counts as kept for its client.
KEPT_BYTES_MIN = 4 * 1024
# Others wait so long together for one that is about to be given up.
CHANCE_SECONDS = 0.1
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
