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


def admitted(sole: AckAllConsumer, *rows: tuple[int, int]) -> list[int]:
    messages = sent(*rows)
    told = jetstream_codec.parse_deliveries(messages)
    found: list[int] = told.sequences[sole.accept(told, messages)].tolist()
    return found


def word(sole: AckAllConsumer, done: int) -> int | None:
    found = sole.ack_through(done)
    if found is None:
        return None
    assert found.count == 1
    return int(jetstream_codec.parse_deliveries(found).sequences[0])


def test_one_ack_covers_all_earlier_messages() -> None:
    sole = AckAllConsumer()
    assert admitted(sole, (11, 1), (12, 2), (14, 3)) == [11, 12, 14]
    assert admitted(sole, (15, 4)) == [15]
    assert word(sole, 12) == 12
    assert word(sole, 12) is None
    assert word(sole, 15) == 15
    assert sole.unacked_messages() == []


def test_rejects_messages_after_a_gap() -> None:
    sole = AckAllConsumer()
    assert admitted(sole, (1, 1), (2, 2), (5, 4)) == [1, 2]
    assert sole.has_gap
    assert admitted(sole, (3, 3)) == []
    assert word(sole, 1) == 1
    sole.restart()
    assert admitted(sole, (2, 1), (3, 2), (4, 3)) == [3, 4]
    assert word(sole, 2) == 2
    assert word(sole, 4) == 4


def test_rejects_redelivered_messages() -> None:
    sole = AckAllConsumer()
    assert admitted(sole, (1, 1), (2, 2), (1, 3), (3, 4)) == [1, 2, 3]
    assert word(sole, 3) == 3


@given(st.lists(st.integers(1, 30), unique=True, max_size=20), st.data())
def test_ack_never_covers_unacked_messages(found: list[int], data: st.DataObject) -> None:
    sequences = sorted(found)
    sole, at, said = AckAllConsumer(), 0, 0
    while at < len(sequences):
        some = sequences[at : at + data.draw(st.integers(1, 6))]
        rows = [(sequence, at + number + 1) for number, sequence in enumerate(some)]
        assert admitted(sole, *rows) == some
        at += len(some)
        done = data.draw(st.integers(said, some[-1]))
        expected = [s for s in sequences[:at] if said < s <= done]
        told = word(sole, done)
        assert told == (expected[-1] if expected else None)
        said = told or said
        left = [
            s
            for m in sole.unacked_messages()
            for s in jetstream_codec.parse_deliveries(m).sequences.tolist()
        ]
        assert left == [s for s in sequences[:at] if s > said]
