"""Tests of `simplebus explain`, `dlq`, `forget`, `peek` and `purge`."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import trio
from typer.testing import CliRunner, Result

import simplebus
from simplebus.cli import app
from simplebus.client import dead_letters
from simplebus.client.aio.bus import Bus
from simplebus.commands.operate.explain import describe_reply
from simplebus.core.errors import BusError
from simplebus.core.settings import Settings
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import AdminRight, Permissions
from simplebus.core.users.users import User, Users
from simplebus.testing.server import BusServer, bus_server

SETTINGS = Settings(ack_timeout=1, tick_seconds=86_400.0)
HEADERS = (("by", "ada"), ("dead-line", "monday"))


@pytest.fixture(scope="module")
def server() -> Iterator[BusServer]:
    with bus_server(SETTINGS) as server:
        yield server


def run(server: BusServer, *arguments: object, status: int = 0) -> Result:
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app, [*words, "--url", server.address])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def output_lines(server: BusServer, *arguments: object, status: int = 0) -> list[str]:
    return run(server, *arguments, status=status).output.splitlines()


def json_objects(server: BusServer, *arguments: object) -> list[Any]:
    return [json.loads(line) for line in output_lines(server, *arguments, "--json")]


def with_bus(server: BusServer, work: Callable[[Bus], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(240):
            async with simplebus.connect(server.address, name="till", reconnect=None) as bus:
                await work(bus)

    trio.run(main)


async def wait_for_dead_letters(bus: Bus, class_: str, count: int) -> None:
    while (await bus.explain(class_)).dead_letters < count:  # noqa: ASYNC110 - it has no event.
        await trio.sleep(0.005)


def create_dead_letters(server: BusServer, class_: str, count: int, **about: Any) -> None:
    """Publish `count` messages that a durable never acks, and wait until they are dead letters."""

    async def work(bus: Bus) -> None:
        async with bus.subscribe(
            class_, auto_ack=False, max_deliveries=1, durable="billing"
        ) as orders:
            for n in range(count):
                await bus.publish(b"%d\x1b[2J\n" % n, class_id=class_, **about)
            for _ in range(count):
                await orders.get(60)
            server.tick(2)
            await wait_for_dead_letters(bus, class_, count)

    with_bus(server, work)


# Explain -----------------------------------------------------------------------------------------


def test_explain_describes_class_channel_and_session(server: BusServer) -> None:
    async def work(bus: Bus) -> None:
        await bus.publish_many([b"x"] * 5, class_id="shops", channel="shops")
        async with (
            bus.subscribe("shops", "shops", max_in_flight=2, auto_ack=False) as messages_of_shops,
            bus.subscribe("shops", "Shops"),
        ):
            await messages_of_shops.get(60)
            number = bus.connection.core.session_id
            shown = await trio.to_thread.run_sync(output_lines, server, "explain", "shops")
            text = "\n".join(shown)
            assert shown[0].startswith("class ")
            assert "    it waits for its acknowledgements: 2 of 2 in flight" in text
            assert "channel shops" in text
            assert f"goes to session {number} 'till'" in text
            assert "upper and lower case differ" in text
            for words in (["session", number], [f"session {number}"], ["--session", number]):
                shown = await trio.to_thread.run_sync(output_lines, server, "explain", *words)
                assert shown[0].startswith(f"session {number} 'till' (127.0.0.1:")
            found = await trio.to_thread.run_sync(json_objects, server, "explain", "shops")
            assert [row["about"] for row in found] == ["class", "channel"]
            assert found[0]["positions"][0]["waits"] == "acks"
            [found] = await trio.to_thread.run_sync(json_objects, server, "explain")
            assert "till" in [row["name"] for row in found["sessions"]]
            shown = await trio.to_thread.run_sync(output_lines, server, "explain")
            assert any("'shops': 5 messages, 2 subscriptions" in line for line in shown)

    with_bus(server, work)


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["shop"], 1, "did you mean shops?"),
        (["nothing.like.it"], 1, "no class is called 'nothing.like.it'"),
        (["a..b"], 1, "'a..b' is no class, and no channel"),
        (["session", "999"], 1, "session 999 is not open"),
        (["one", "two"], 2, "expected one class, channel or session"),
        (["session", "1", "--session", "2"], 2, "expected one session, got 1 and 2"),
    ],
)
def test_explain_reports_missing_things(
    server: BusServer, words: list[str], status: int, expected: str
) -> None:
    async def work(bus: Bus) -> None:
        await bus.publish(b"x", class_id="shops")

    with_bus(server, work)
    assert expected in run(server, "explain", *words, status=status).output
    [found] = json_objects(server, "explain")
    assert "shop" not in [row["name"] for row in found["classes"]]


def test_explain_prints_every_part() -> None:
    from simplebus.core.protocol.inquiry import (
        BusInfo,
        ChannelClassInfo,
        ChannelInfo,
        ClassInfo,
        ClassOverview,
        InFlightInfo,
        ListenerInfo,
        MatchInfo,
        MemberInfo,
        PositionInfo,
        PublisherInfo,
        SessionInfo,
        SessionOverview,
    )

    position = PositionInfo(
        durable="d",
        group="g",
        session=4,
        patterns=["a"],
        patterns_left_out=3,
        to_redeliver=1,
        unsent=2,
        delayed=3,
        blocked_by_key=4,
        in_flight=5,
        in_flight_max=6,
        oldest=InFlightInfo(),
        undelivered={"expired": 7},
        members=[MemberInfo(in_flight_max=8, waits_for="nothing to send")],
        members_left_out=1,
        waits="acks",
        waits_for="its acknowledgements",
    )
    whole = ClassInfo(
        stored=3,
        head=3,
        newest_seconds=1.0,
        oldest_seconds=2.0,
        backlog=1,
        retention="60 s",
        subjects=["orders.>"],
        level="disk",
        purged=1,
        dropped={"expired": 1},
        dead_letters=2,
        positions=[position],
        positions_left_out=5,
        publishers=[PublisherInfo(is_gone=True)],
        publishers_left_out=6,
        waits_for="nothing is stored",
    )
    for found, count in (
        (whole, 22),
        (
            BusInfo(
                failure="disk_full",
                refused={"bad_ack": 1},
                classes=[ClassOverview(publishers=1, dropped=2, warning="nobody reads it")],
                sessions=[SessionOverview(version=-1), SessionOverview()],
            ),
            10,
        ),
        (
            ChannelInfo(
                classes=[
                    ChannelClassInfo(
                        subjects=["a.>"],
                        matches=[MatchInfo(who="x"), MatchInfo(who="y", pattern="a")],
                        near=[MatchInfo(who="z", pattern="b", why_not="no")],
                        left_out=1,
                    )
                ],
                classes_left_out=1,
                listeners=[ListenerInfo(queue="q"), ListenerInfo()],
                listeners_left_out=1,
            ),
            11,
        ),
        (
            SessionInfo(
                waits_for="x",
                parked=1,
                pending_bytes=1,
                heartbeat=1.0,
                refused={"a": 1},
                positions=[position],
            ),
            15,
        ),
    ):
        shown = describe_reply(found)
        assert len(shown) == count, "\n".join(text for _, text in shown)
        assert all(text for _, text in shown)
    exact, at_most = (
        describe_reply(SessionInfo(unconfirmed=7, leaves_out=leaves_out))
        for leaves_out in (False, True)
    )
    assert (1, "7 messages unconfirmed") in exact
    assert (1, "at most 7 messages unconfirmed") in at_most


def test_explain_begins_with_a_class_that_grows_without_a_subscription(server: BusServer) -> None:
    async def work(bus: Bus) -> None:
        for _ in range(20):
            await bus.publish(b"x", class_id="ordres")

    with_bus(server, work)
    _, first, *_ = output_lines(server, "explain")
    sentence = "nobody subscribes to it, and it grows: 20 messages wait for a first subscription"
    assert re.fullmatch(rf"  class \d+ 'ordres': {sentence}; session .* has created it", first)


# Dead letters ------------------------------------------------------------------------------------


def test_dlq_lists_and_shows_dead_letters(server: BusServer) -> None:
    create_dead_letters(server, "orders", 3, channel="eu", key=b"\xffk", headers=HEADERS)
    [listed] = [
        line for line in output_lines(server, "dlq", "ls") if line.startswith("dead.orders:")
    ]
    assert listed.startswith("dead.orders: 3 dead letters, the oldest of 20")
    assert listed.endswith(": max_deliveries 3")
    [pile] = json_objects(server, "dlq", "ls", "orders")
    assert (pile["letters"], pile["reasons"]) == (3, {"max_deliveries": 3})
    shown = output_lines(server, "dlq", "show", "orders", "--limit", 1)
    assert shown[0].startswith("#0  max_deliveries after 1 delivery to billing, 20")
    assert shown[1:] == [
        "    was orders#0  eu  key=\\xffk",
        "    by=ada",
        "    dead-line=monday",
        "    0\\x1b[2J\\n",
    ]
    assert [row["sequence"] for row in json_objects(server, "dlq", "show", "dead.orders")] == [
        0,
        1,
        2,
    ]
    [row] = json_objects(server, "dlq", "show", "orders", "--limit", 1)
    assert (row["key_base64"], row["payload"], row["class"]) == ("/2s=", "0\x1b[2J\n", "orders")
    assert output_lines(server, "dlq", "show", "orders", "--reason", "uncarriable") == [
        "no such dead letters"
    ]


def test_dlq_requeue_publishes_and_purges(server: BusServer) -> None:
    create_dead_letters(server, "again", 5, channel="eu", key=b"k", headers=HEADERS)
    assert output_lines(server, "dlq", "requeue", "again", "--sequence", 1, "--sequence", 3) == [
        "2 dead letters published again"
    ]
    remaining = json_objects(server, "dlq", "show", "again")
    assert [row["sequence"] for row in remaining] == [0, 2, 4]
    explained = output_lines(server, "explain", "again")
    assert any("dead letters: 3, see" in line for line in explained)
    assert any("moved to dead letters: max_deliveries 5" in line for line in explained)
    assert not any("dropped" in line for line in explained)
    [pile] = json_objects(server, "dlq", "ls", "again")
    assert pile["letters"] == 3
    requeued = json_objects(server, "dlq", "requeue", "again", "--subscription", "billing")
    assert requeued[0] == {"sequence": 0, "class": "again", "requeued": True}
    assert output_lines(server, "dlq", "show", "again") == ["no such dead letters"]

    async def work(bus: Bus) -> None:
        async with bus.subscribe("again", durable="billing") as messages:
            received = [await messages.get(60) for _ in range(5)]
        assert [message.payload[:1] for message in received] == [b"1", b"3", b"0", b"2", b"4"]
        assert {(message.channel, message.key) for message in received} == {("eu", b"k")}
        assert received[0].headers == (
            *HEADERS,
            ("requeued-from", "dead.again#1"),
            ("requeued-count", "1"),
        )

    with_bus(server, work)


def test_repeated_dead_letter_counts_requeues(server: BusServer) -> None:
    create_dead_letters(server, "loop", 1)
    run(server, "dlq", "requeue", "loop", "--all")

    async def work(bus: Bus) -> None:
        async with bus.subscribe(
            "loop", durable="billing", max_deliveries=1, auto_ack=False
        ) as loop:
            await loop.get(60)
            server.tick(2)
            await wait_for_dead_letters(bus, "loop", 1)

    with_bus(server, work)
    run(server, "dlq", "requeue", "loop", "--all")

    async def check_bus(bus: Bus) -> None:
        [message] = await bus.fetch("loop")
        assert message.headers == (("requeued-from", "dead.loop#1"), ("requeued-count", "2"))

    with_bus(server, check_bus)


def test_requeue_without_the_right_to_purge_publishes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admin = tuple((AdminRight(each), "*") for each in ("inquire", "fetch"))
    users = Users(
        (
            User("boss", token=hash_token("b")),
            User("till", token=hash_token("t"), permissions=Permissions(admin=admin)),
        )
    )
    monkeypatch.setenv("SIMPLEBUS_TOKEN", "b")
    with bus_server(SETTINGS, users=users) as server:
        create_dead_letters(server, "orders", 3)
        monkeypatch.setenv("SIMPLEBUS_TOKEN", "t")
        with pytest.raises(BusError, match="unauthorized"):
            run(server, "dlq", "requeue", "orders", "--all")

        async def check_bus(bus: Bus) -> None:
            assert (await bus.explain("orders")).head == 3
            assert (await bus.explain("dead.orders")).stored == 3

        with_bus(server, check_bus)


def test_interrupted_requeue_loses_nothing(
    server: BusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_dead_letters(server, "stopped", 3)

    async def killed(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dead_letters, "purge_letters", killed)
        with pytest.raises(BaseException):  # noqa: B017, PT011 - in a group, or alone.
            run(server, "dlq", "requeue", "stopped", "--all")
    assert len(json_objects(server, "dlq", "show", "stopped")) == 3
    assert output_lines(server, "dlq", "requeue", "stopped", "--all") == [
        "3 dead letters published again"
    ]

    async def work(bus: Bus) -> None:
        found = [message.payload[:1] for message in await bus.fetch("stopped")]
        assert found == [b"0", b"1", b"2"] * 2

    with_bus(server, work)


def test_dlq_purge_requires_confirmation(server: BusServer) -> None:
    create_dead_letters(server, "trash", 4)
    result = run(server, "dlq", "purge", "trash", "--all", status=2)
    assert "4 dead letters would be purged; add --yes" in result.output
    assert output_lines(server, "dlq", "purge", "trash", "--sequence", 2, "--yes") == [
        "1 dead letter purged"
    ]
    missing = run(server, "dlq", "purge", "trash", "--sequence", 2, "--yes", status=1)
    assert "1 of the 1 sequences were not found" in missing.output
    purged = json_objects(server, "dlq", "purge", "trash", "--all", "--yes")
    assert [row["sequence"] for row in purged] == [0, 1, 3]
    assert json_objects(server, "dlq", "show", "trash") == []


def test_dlq_commands_require_a_selection(server: BusServer) -> None:
    create_dead_letters(server, "which", 1)
    for words in ([], ["--all", "--reason", "terminated"]):
        assert "expected --all" in run(server, "dlq", "requeue", "which", *words, status=2).output
    with pytest.raises(BusError, match="there is no class 'nowhere'"):
        run(server, "dlq", "show", "nowhere")
    run(server, "pub", "somewhere", "x")
    with pytest.raises(BusError, match="class somewhere has no dead letters"):
        run(server, "dlq", "show", "somewhere")


def test_dead_letter_without_origin_is_kept(server: BusServer) -> None:
    async def work(bus: Bus) -> None:
        await bus.publish(b"x", class_id="dead.odd")
        await bus.publish(b"y", class_id="dead.odd", headers={"dead-error": "no \x1b"})
        await bus.publish(
            b"z", class_id="dead.odd", headers={"dead-class": "9" * 30, "dead-since": "1e99"}
        )

    with_bus(server, work)
    refused = run(server, "dlq", "requeue", "odd", "--all", status=1)
    assert (
        "dead.odd#0 was refused: the dead letter has no dead-class header with its original class"
        in refused.output
    )
    assert run(server, "dlq", "requeue", "odd", "--sequence", 2, status=1)
    assert len(json_objects(server, "dlq", "show", "odd")) == 3
    shown = output_lines(server, "dlq", "show", "odd")
    assert len(shown) == 10
    assert "    error: no \\x1b" in shown
    [pile] = json_objects(server, "dlq", "ls", "dead.odd")
    assert pile["reasons"] == {"": 3}


def test_requeue_rejects_other_origin_class(server: BusServer) -> None:
    """Refuse to requeue a forged dead letter into a class that its publisher may not publish to."""

    async def forge(bus: Bus) -> None:
        for class_ in ("secret", "forged.eu", "dead.forged", "9"):
            about = {"dead-class": class_, "dead-reason": "max_deliveries"}
            await bus.publish(b"forged", class_id="dead.forged", headers=about)

    with_bus(server, forge)
    refused = run(server, "dlq", "requeue", "forged", "--all", status=1).output
    assert "its original class is 'secret', whose dead letters are not stored in" in refused
    [pile] = json_objects(server, "dlq", "ls", "dead.forged")
    assert pile["letters"] == 4


def test_refused_requeue_does_not_block_others(server: BusServer) -> None:
    async def work(bus: Bus) -> None:
        for _ in range(2):
            await bus.publish(b"by hand", class_id="dead.mixed")

    with_bus(server, work)
    create_dead_letters(server, "mixed", 2)
    output = run(server, "dlq", "requeue", "mixed", "--all", status=1).output
    assert "2 dead letters published again" in output
    assert "dead.mixed#0 was refused" in output
    assert "2 were refused in all" in output
    assert [row["sequence"] for row in json_objects(server, "dlq", "show", "mixed")] == [0, 1]


# Durables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "more"),
    [((), {}), (("a.*", "b"), {}), ((), {"group": "g"}), (("b",), {"group": "g", "by_key": True})],
)
def test_forget_removes_unused_durable(
    server: BusServer, channels: tuple[str, ...], more: dict[str, Any]
) -> None:
    class_ = f"left-{len(channels)}-{len(more)}"

    async def leave(bus: Bus) -> None:
        async with (
            bus.subscribe(class_, *channels, durable="old", **more),
            bus.subscribe(class_, durable="new") as needed,
        ):
            await bus.publish_many([b"1", b"2"], class_id=class_, channel="b")
            with pytest.raises(BusError, match="a client is connected to the durable 'old'"):
                await trio.to_thread.run_sync(run, server, "forget", class_, "old", "--yes")
            await needed.take(2)

    with_bus(server, leave)
    (line,) = output_lines(server, "forget", class_, "old", status=2)
    assert line.endswith("; add --yes to remove it")
    with pytest.raises(BusError, match="has no durable 'other'; there are 'old', 'new'"):
        run(server, "forget", class_, "other", "--yes")
    (line,) = output_lines(server, "forget", class_, "old", "--yes")
    assert line.startswith("removed the durable 'old', which had 2 messages")

    async def check_bus(bus: Bus) -> None:
        found = await bus.explain(class_)
        assert [(position.durable, position.lag) for position in found.positions] == [("new", 0)]
        assert found.stored == 0

    with_bus(server, check_bus)


# Messages ----------------------------------------------------------------------------------------


def publish(server: BusServer, class_: str, *payloads: bytes) -> None:
    async def work(bus: Bus) -> None:
        for payload in payloads:
            await bus.publish(
                payload, class_id=class_, channel="eu.paid", key=b"7", headers={"by": "ada"}
            )

    with_bus(server, work)


def test_peek_prints_stored_messages(server: BusServer) -> None:
    publish(server, "peeked", b"\x1b[2Jone", b"\xff", b"x" * 100)
    lines = output_lines(server, "peek", "peeked", "--count", 1)
    assert lines == ["#0  eu.paid  key=7", "    by=ada", "    \\x1b[2Jone"]
    assert output_lines(server, "peek", "peeked", "--first", 2)[-1].endswith("x… and 20 bytes")
    first_row, second_row, _ = json_objects(server, "peek", "peeked")
    assert first_row == {
        "sequence": 0,
        "channel": "eu.paid",
        "headers": [["by", "ada"]],
        "key": "7",
        "payload": "\x1b[2Jone",
    }
    assert second_row["payload_base64"] == "/w=="
    assert output_lines(server, "peek", "peeked", "--first", 3) == ["no such messages"]
    with pytest.raises(BusError, match="class"):
        run(server, "peek", "unknown-class")
    with pytest.raises(BusError, match="class"):
        run(server, "purge", "unknown-class", "--yes")


def test_purge_requires_confirmation(server: BusServer) -> None:
    publish(server, "full", *[b"x"] * 5)
    output = run(server, "purge", "full", "--last", 3, status=2).output
    assert "up to 3 messages, from 0 to 2, would be discarded; add --yes" in output
    assert len(json_objects(server, "peek", "full")) == 5
    assert output_lines(server, "purge", "full", "--first", 1, "--last", 3, "--yes") == [
        "discarded 2 messages"
    ]
    assert [json_object["sequence"] for json_object in json_objects(server, "peek", "full")] == [
        0,
        3,
        4,
    ]
    assert "up to 3 messages, from 0 to 4" in run(server, "purge", "full", status=2).output
    assert output_lines(server, "purge", "full", "--yes") == ["discarded 3 messages"]
    assert output_lines(server, "purge", "full", "--yes") == ["no such messages"]


def test_session_id_of_many_digits_is_no_session(server: BusServer) -> None:
    output = run(server, "explain", "session", "9" * 5000, status=2).output
    assert "expected one class, channel or session" in output
