"""Output of a NATS client."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simplebus.nats.limits import OUTPUT_PIECE_BYTES
from simplebus.nats.server.outbox import NatsOutbox

_SIZES = st.sampled_from([1, 30, 5000, 20_000, OUTPUT_PIECE_BYTES, 3 * OUTPUT_PIECE_BYTES + 7])
_ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["append", "append_shared"]), _SIZES),
    st.tuples(st.just("send"), _SIZES),
)


@given(st.lists(_ACTIONS, max_size=40))
def test_bytes_are_sent_in_order(actions: list[tuple[str, int]]) -> None:
    outbox, appended, sent = NatsOutbox(), bytearray(), bytearray()
    actions += [("send", OUTPUT_PIECE_BYTES)] * (200 * len(actions))
    for number, (kind, size) in enumerate(actions):
        if kind == "send":
            data = outbox.peek(0)[:size]
            if data:
                sent += data
                outbox.mark_sent(len(data), 0)
        else:
            piece = bytes([number % 251]) * size
            appended += piece
            if kind == "append":
                outbox.append(piece)
            else:
                outbox.append_shared(memoryview(piece))
        assert outbox.pending_bytes == len(appended) - len(sent)
    assert outbox.is_idle
    assert sent == appended


def test_line_and_shared_body_are_sent_together() -> None:
    outbox, body = NatsOutbox(), bytes(20_000)
    for _ in range(3):
        outbox.append(b"line\r\n")
        outbox.append_shared(memoryview(body))
    assert len(outbox.peek(0)) == 3 * (6 + 20_000)


def test_shared_body_is_not_copied_until_it_is_sent() -> None:
    body = memoryview(bytes(20_000))
    outboxes = [NatsOutbox() for _ in range(3)]
    for outbox in outboxes:
        outbox.append(b"line\r\n")
        outbox.append_shared(body)
    sizes = dict(pair for outbox in outboxes for pair in outbox.iter_buffers())
    assert sum(sizes.values()) == 20_000 + 3 * 6
