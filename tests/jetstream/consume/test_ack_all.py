"""Consumer with ack policy `all`, compared with a simple model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simplebus.jetstream.consume.ack_all import AckAllConsumer
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.parser import ClientParser


def sent(*rows: tuple[int, int]) -> ReceivedMessages:
    """Build messages of a consumer from pairs of stream sequence and consumer sequence."""
    raw = b"".join(
        b"MSG s 2 $JS.ACK.S.c.1.%d.%d.1000000000.0 1\r\nx\r\n" % (sequence, count)
        for sequence, count in rows
    )
    (messages,) = ClientParser().receive(raw)
    assert isinstance(messages, ReceivedMessages)
    return messages


def admitted(consumer: AckAllConsumer, *rows: tuple[int, int]) -> list[int]:
    messages = sent(*rows)
    deliveries = jetstream_codec.parse_deliveries(messages)
    found: list[int] = deliveries.sequences[consumer.accept(deliveries, messages)].tolist()
    return found


def ack_sequence(consumer: AckAllConsumer, acked_until: int) -> int | None:
    found = consumer.ack_through(acked_until)
    if found is None:
        return None
    assert found.count == 1
    return int(jetstream_codec.parse_deliveries(found).sequences[0])


def test_one_ack_covers_all_earlier_messages() -> None:
    consumer = AckAllConsumer()
    assert admitted(consumer, (11, 1), (12, 2), (14, 3)) == [11, 12, 14]
    assert admitted(consumer, (15, 4)) == [15]
    assert ack_sequence(consumer, 12) == 12
    assert ack_sequence(consumer, 12) is None
    assert ack_sequence(consumer, 15) == 15
    assert consumer.unacked_messages() == []


def test_rejects_messages_after_a_gap() -> None:
    consumer = AckAllConsumer()
    assert admitted(consumer, (1, 1), (2, 2), (5, 4)) == [1, 2]
    assert consumer.has_gap
    assert admitted(consumer, (3, 3)) == []
    assert ack_sequence(consumer, 1) == 1
    consumer.restart()
    assert admitted(consumer, (2, 1), (3, 2), (4, 3)) == [3, 4]
    assert ack_sequence(consumer, 2) == 2
    assert ack_sequence(consumer, 4) == 4


def test_rejects_redelivered_messages() -> None:
    consumer = AckAllConsumer()
    assert admitted(consumer, (1, 1), (2, 2), (1, 3), (3, 4)) == [1, 2, 3]
    assert ack_sequence(consumer, 3) == 3


@given(st.lists(st.integers(1, 30), unique=True, max_size=20), st.data())
def test_ack_never_covers_unacked_messages(found: list[int], data: st.DataObject) -> None:
    sequences = sorted(found)
    consumer, index, last_ack = AckAllConsumer(), 0, 0
    while index < len(sequences):
        batch = sequences[index : index + data.draw(st.integers(1, 6))]
        rows = [(sequence, index + number + 1) for number, sequence in enumerate(batch)]
        assert admitted(consumer, *rows) == batch
        index += len(batch)
        acked_until = data.draw(st.integers(last_ack, batch[-1]))
        expected = [s for s in sequences[:index] if last_ack < s <= acked_until]
        deliveries = ack_sequence(consumer, acked_until)
        assert deliveries == (expected[-1] if expected else None)
        last_ack = deliveries or last_ack
        unacked = [
            s
            for m in consumer.unacked_messages()
            for s in jetstream_codec.parse_deliveries(m).sequences.tolist()
        ]
        assert unacked == [s for s in sequences[:index] if s > last_ack]
