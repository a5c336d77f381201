"""Conversion between frames and JetStream messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simplebus.jetstream.publish import codec
from tests.jetstream.consume.test_feed import ENVELOPE, arrived, message

PLAIN = b"NATS/1.0\r\nNats-Msg-Id: :d:0000000032\r\n\r\n"
BLOCKS = [
    PLAIN,
    ENVELOPE,
    ENVELOPE[:-4] + b"0\r\n\r\n",
    PLAIN[:-2] + ENVELOPE[len(b"NATS/1.0\r\n") :],
    ENVELOPE[:-2] + b"Others: x\r\n\r\n",
    ENVELOPE.replace(b": 5", b": 6"),
]


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(BLOCKS)), min_size=1, max_size=20))
def test_finds_envelopes_among_few_and_many_headers(
    drawn: list[tuple[int, bytes]],
) -> None:
    # Each message with headers follows some without, whose payloads look like headers. Few of them
    # among many take the path per message, many take the array path.
    blocks = [each for bare_count, block in drawn for each in (*[b""] * bare_count, block)]
    messages = arrived(*(message(n + 1, ENVELOPE, head=h) for n, h in enumerate(blocks)))
    expected = [codec.ENVELOPE_HEADER in block for block in blocks]
    assert codec.are_envelopes(messages).tolist() == expected
    assert not codec.are_envelopes(messages.pick(slice(0, 0))).size
