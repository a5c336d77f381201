"""Publishers that come back to a bus that was gone, too: whose their numbers were is known."""

from __future__ import annotations

from pathlib import Path

from core.talk2 import Peer2, hello, peer2, publish

from storage.kept_bus import KeptBus


def greeted(at: KeptBus, **more: object) -> Peer2:
    peer = Peer2(at, at.broker.open())
    peer.say(hello(1, 2, name="till", **more))
    return peer


def after_a_gap(path: Path) -> KeptBus:
    """Of a program's numbers 0 to 2, the bus has 0 and 2."""
    bus = KeptBus(path)
    peer2(bus, publish(1, 0, b"a"), classes=(1, 2), name="till", instance="one")
    bus.sync()
    peer = greeted(bus, instance="one")
    peer.say(publish(2, 1, b"b"), publish(1, 2, b"c"))
    bus.sync()
    bus.crash()
    for segment in (path / "classes" / "00002").iterdir():
        segment.unlink()
    return KeptBus(path)


def test_another_program_is_told_apart_after_a_crash(tmp_path: Path) -> None:
    bus = after_a_gap(tmp_path)
    assert greeted(bus, instance="one").told()[0].content["next"] == 1
    bus.crash()
    bus = KeptBus(tmp_path)
    peer = greeted(bus, instance="two")
    assert peer.told()[0].content["next"] == 3
    peer.say(publish(1, 3, b"d"), publish(2, 4, b"e"))
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    reply = greeted(bus, instance="two").told()[0].content
    assert (reply["next"], reply["lost"]) == (5, 0)


def test_what_was_confirmed_and_is_gone_is_counted_and_its_number_not_used_again(
    tmp_path: Path,
) -> None:
    bus = after_a_gap(tmp_path)
    peer = greeted(bus, instance="one", unconfirmed=3, bus=bus.broker.answers.identity)
    reply = peer.told()[0].content
    assert (reply["next"], reply["lost"]) == (3, 1)


def test_a_refusal_that_was_not_heard_is_told_after_a_crash(tmp_path: Path) -> None:
    for keeps_all in (False, True):
        path = tmp_path / f"{keeps_all}"
        bus = KeptBus(path)
        peer = peer2(bus, publish(1, 0, b"a"), name="till", instance="one")
        peer.say(publish(9, 1, b"b", b"c"), publish(1, 3, b"d"))
        bus.sync()
        bus.keeper.wants_snapshot = keeps_all
        bus.broker.clock.now += 1
        bus.sync()
        bus.crash()
        bus = KeptBus(path)
        known = {"unconfirmed": 1, "bus": bus.broker.answers.identity}
        peer = greeted(bus, instance="one", **known)
        assert peer.told()[0].content["next"] == 1
        peer.say(publish(1, 1, b"b", b"c", b"d"))
        bus.sync()
        error, confirm = peer.told()
        assert (error.content["code"], error.message_id) == ("unknown_class", 1)
        assert error.content["count"] == 2
        assert (confirm.kind, confirm.message_id) == ("confirm", 4)
