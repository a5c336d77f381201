"""A query's reader, asked as Spark asks it: nothing lost, nothing twice, and the buses keep no more
than they should."""

from __future__ import annotations

import json

import pytest

import simplebus
from simplebus.core.settings import Keep, Settings
from simplebus.spark.offsets import OffsetError
from simplebus.testing.server import BusServer, bus_server, until
from spark.driving import Driven


def publish(server: BusServer, count: int, class_id: int | str = 1) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many([b"x"] * count, class_id=class_id)


def take(server: BusServer, count: int) -> None:
    """Somebody who is no query is done with what was there before anybody asked for it."""
    with simplebus.connect_blocking(server.address) as bus, bus.subscribe(1) as messages:
        assert len(messages.take(count, timeout=10)) == count


def place(server: BusServer) -> str:
    return server.address.removeprefix("simplebus://")


def query(server: BusServer, **options: object) -> Driven:
    return Driven(servers=server.address, subscribe="1", **options)


def offsets_of(found: list[tuple[str, str, int]]) -> list[int]:
    return [offset for _, _, offset in found]


def durables(server: BusServer, class_id: int = 1) -> dict[str, int]:
    """Where each durable stands."""
    return {s.durable: s.floor for s in server.statistics(class_id).subscriptions if s.durable}


def test_a_query_keeps_its_place_at_the_bus_under_a_name_that_its_checkpoint_knows(
    server: BusServer,
) -> None:
    publish(server, 5)
    one, other = query(server, startingOffsets="earliest"), query(server)
    assert offsets_of(one.run()) == [0, 1, 2, 3, 4]
    assert other.run() == []
    said = one.offsets["query"]
    assert durables(server) == {
        said["durable"]: 5,
        other.offsets["query"]["durable"]: 5,
    }
    publish(server, 3)
    take(server, 5)
    until(lambda: server.statistics().ring.floor == 5)  # They lie there for the queries.
    assert offsets_of(one.run()) == offsets_of(other.run()) == [5, 6, 7]
    assert one.offsets["query"] == said
    assert set(durables(server).values()) == {8}
    assert server.statistics().ring.floor == 8


@pytest.mark.parametrize("crash", ["logged", "planned", "read", "sunk"])
@pytest.mark.parametrize("starting", ["latest", "earliest"])
@pytest.mark.parametrize("durable", [None, "mine"])
def test_a_first_batch_that_is_repeated_begins_where_it_began(
    server: BusServer, crash: str, starting: str, durable: str | None
) -> None:
    publish(server, 5)
    named = {} if durable is None else {"durable": durable}
    one = query(server, startingOffsets=starting, **named)
    with one.running() as run:
        publish(server, 4)  # After it was asked where to begin.
        with pytest.raises(Exception, match=r"^$"):
            run.batch(crash)
    take(server, 5)
    publish(server, 2)
    first = 5 if starting == "latest" else 0
    one.run()
    assert offsets_of(one.rows) == list(range(first, 11))
    assert len(durables(server)) == 1


def test_a_query_that_found_nothing_yet_still_knows_where_it_began(server: BusServer) -> None:
    publish(server, 5)
    one = query(server)
    assert one.run() == []
    publish(server, 2)
    take(server, 5)
    assert offsets_of(one.run()) == [5, 6]
    assert one.run() == []
    assert len(one.logged) == 2  # What is there is told once.


def test_a_query_may_have_nothing_kept(server: BusServer) -> None:
    publish(server, 5)
    one = query(server, startingOffsets="earliest", durable="None")
    assert len(one.run()) == 5
    until(lambda: not server.statistics().subscriptions)
    assert "durable" not in one.offsets["query"]
    publish(server, 2)
    assert offsets_of(one.run()) == [5, 6]


def test_another_name_takes_the_place_of_the_one_before(server: BusServer) -> None:
    publish(server, 5)
    one = query(server, startingOffsets="earliest")
    one.run()
    assert [name[:6] for name in durables(server)] == ["spark "]
    one.run(durable="archive")
    assert durables(server) == {"archive": 5}
    one.run(durable="none")
    assert durables(server) == {}
    one.run()
    assert durables(server) == {one.offsets["query"]["durable"]: 5}


def test_what_is_not_read_any_more_is_let_go_of(server: BusServer) -> None:
    with bus_server() as gone:
        for class_id in (1, 2):
            publish(server, 5, class_id)
            publish(gone, 5, class_id)
        both = f"{server.address},{gone.address}"
        one = Driven(servers=both, subscribe="1,2", startingOffsets="earliest")
        assert len(one.run()) == 20
        publish(server, 1)
        found = one.run(servers=server.address, subscribe="1")
        assert found == [(place(server), "1", 5)]
        assert durables(server, 1) == {one.offsets["query"]["durable"]: 6}
        assert not durables(server, 2)
        assert not durables(gone, 1)
        assert not durables(gone, 2)
        assert set(one.offsets) == {place(server), "query"}
        assert set(one.offsets[place(server)]) == {"1", ""}


def test_what_is_added_begins_with_the_earliest_that_is_there(server: BusServer) -> None:
    publish(server, 3)
    one = query(server)
    assert one.run() == []
    with bus_server() as other:
        publish(server, 2, "orders")
        publish(other, 4)
        both = f"{server.address},{other.address}"
        found = one.run(servers=both, subscribe="1,orders")
        assert sorted(found) == sorted(
            [(place(server), "orders", n) for n in range(2)]
            + [(place(other), "1", n) for n in range(4)]
        )


def test_a_class_that_comes_later_is_read_from_its_first_message(server: BusServer) -> None:
    one = query(server)
    with one.running(to_end=False, subscribe="orders") as run:
        run.batch()
        publish(server, 3, "orders")
        assert run.batch()
        assert offsets_of(one.rows) == [0, 1, 2]


def test_a_checkpoint_of_before_there_were_names_is_gone_on_from(server: BusServer) -> None:
    publish(server, 5)
    one = query(server, startingOffsets="earliest")
    one.run()
    old = one.offsets
    old.pop("query")
    one.logged[-1] = json.dumps(old)
    publish(server, 2)
    with one.running() as run, pytest.raises(Exception, match=r"^$"):
        run.batch("planned")
    assert offsets_of(one.run()) == [5, 6]
    assert one.offsets["query"]["durable"] in durables(server)


# Where to begin ----------------------------------------------------------------------------------


def test_a_query_begins_at_a_time(server: BusServer) -> None:
    publish(server, 3)
    one = query(server, startingTimestamp=1000, startingOffsets="latest")
    assert offsets_of(one.run()) == [0, 1, 2]
    late = 4_000_000_000_000
    given = json.dumps({place(server): {"1": late}})
    for options in ({"startingTimestamp": late}, {"startingOffsetsByTimestamp": given}):
        with pytest.raises(
            OffsetError, match=rf"is {late} \(2096-.*\) for class 1 at .*accepted nothing since"
        ):
            query(server, **options).run()
        assert query(server, **options, startingOffsetsByTimestampStrategy="latest").run() == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"startingOffsets": {"1": 9}}, "startingOffsets is 9 for class 1 at .*, beyond its end"),
        ({"startingOffsets": {"2": 0}}, "class 2 at .*, which is not subscribed to"),
        ({"startingOffsetsByTimestamp": {"2": 0}}, "class 2 at .*, which is not subscribed to"),
        ({"startingOffsets": {"orders": 0, "1": 0}}, "class orders at"),
    ],
)
def test_what_is_wrong_with_the_beginning_is_told(
    server: BusServer, options: dict[str, dict[str, int]], sentence: str
) -> None:
    publish(server, 5)
    given = {name: json.dumps({place(server): said}) for name, said in options.items()}
    with pytest.raises(OffsetError, match=sentence):
        query(server, **given).run()
    one = query(server, startingOffsets="earliest")
    one.run()
    publish(server, 1)
    assert offsets_of(one.run(**given)) == [5]  # Who has begun is not asked any more.


def test_a_class_that_does_not_exist_is_told_and_not_made(server: BusServer) -> None:
    with pytest.raises(ValueError, match="no Connect has named class 1, so there is nothing to"):
        query(server).run()
    assert server.ask(lambda up: 1 not in up.engine.broker.classes)


@pytest.mark.parametrize("strict", [True, False])
def test_offsets_before_the_floor_are_a_loss(strict: bool) -> None:
    with bus_server(Settings(keep=Keep(messages=2))) as server:
        publish(server, 5)
        take(server, 5)
        given = json.dumps({place(server): {"1": 1}})
        one = query(server, startingOffsets=given, failOnDataLoss=strict)
        if strict:
            with pytest.raises(Exception, match=r"messages 1 to 2 of class 1 at .* are lost: the"):
                one.run()
        else:
            assert offsets_of(one.run()) == [3, 4]


def test_a_batch_waits_for_enough_but_not_for_ever(
    server: BusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("simplebus.spark.stream.monotonic", lambda: now[0])
    publish(server, 2)
    one = query(server, startingOffsets="earliest", minOffsetsPerTrigger=3, maxTriggerDelay="90s")
    with one.running(to_end=False) as run:
        assert run.batch()
        publish(server, 2)
        assert not run.batch()
        publish(server, 1)
        assert run.batch()
        publish(server, 1)
        now[0] += 89
        assert not run.batch()
        now[0] += 1
        assert run.batch()
        publish(server, 1)
        assert not run.batch()
    assert offsets_of(one.rows) == list(range(6))
    assert offsets_of(one.run()) == [6]  # Who is to end waits for nothing.
