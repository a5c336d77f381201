"""What a NATS server does not take of what is copied there: it is a dead letter, and the rest goes
on."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.nats_servers import nats_server

import simplebus
from simplebus.bridge.nats_wire import nats_wired
from simplebus.bridge.running import lanes
from simplebus.bridge.settings import Bridge, Copied

from .nats_lanes import (
    BusServer,
    NatsServer,
    copying,
    stored,
    stream,
    until,
    wired,
)

MAY_NOT = """authorization { users = [
    { user: lane, password: p, permissions: { publish: { deny: ["no.>"] } } }
] }"""


@pytest.mark.parametrize(("name", "most"), [("", 4094), ("LINES", 3968)])
async def test_a_channel_that_fits_into_no_line_is_refused_and_the_rest_goes_on(
    name: str, most: int, server: BusServer, nats: NatsServer
) -> None:
    """The server would close the connection, each time it comes."""
    class_ = f"{name}l"
    sizes = [9, *[most] * 20, *[4095] * 20, 4096, 10]
    async with wired(nats) as wire, simplebus.connect(server.address) as bus:
        if name:
            await stream(wire, name, f"{class_}.>")
        for size in sizes:
            channel = f"{class_}.".ljust(size, "x")
            await bus.publish(b"", class_id=class_, channel=channel)
        copied = Copied(class_, stream=name, start="earliest")
        (lane,) = lanes([Bridge("lines", server.address, nats.url, (copied,), path=False)])
        async with copying(lane):
            await until(lambda: lane.statistics().at == len(sizes))
        found = lane.statistics()
        assert (found.copied, found.refused, found.losses) == (22, 21, 0)
        if name:
            assert await stored(wire, name) == 22
        letters = await bus.fetch(f"dead.{class_}")
        assert len(letters) == 21
        assert dict(letters[0].headers)["dead-error"].startswith(
            "unfit: its subject has 4095 bytes, and its line 4"
        )


@pytest.mark.parametrize("name", ["", "DENIED"])
async def test_what_is_denied_is_refused_however_its_subject_is_shown(
    name: str, server: BusServer, tmp_path: Path
) -> None:
    channels = ["no.a", 'no."q"', "no.back\\slash", "no.zero\u200bwidth", "no.a'b'", "no.ö", "yes"]
    class_ = f"{name}d"
    with nats_server(tmp_path, MAY_NOT) as nats:
        url = nats.url.replace("//", "//lane:p@")
        async with (
            nats_wired(url, "test", {}) as wire,
            simplebus.connect(server.address) as bus,
        ):
            if name:
                await stream(wire, name, "no.>", subjects=["no.>", "yes"])
            for channel in channels:
                await bus.publish(b"", class_id=class_, channel=channel)
            copied = Copied(class_, stream=name, start="earliest")
            (lane,) = lanes([Bridge("denied", server.address, url, (copied,))])
            async with copying(lane):
                await until(lambda: lane.statistics().at == len(channels))
            found = lane.statistics()
            assert (found.copied, found.refused, found.losses) == (1, 6, 0)
            letters = await bus.fetch(f"dead.{class_}")
            assert [each.channel for each in letters] == channels[:-1]


async def test_a_subject_that_is_full_holds_up_no_other(
    server: BusServer, nats: NatsServer
) -> None:
    per_subject = {"discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 2}
    async with wired(nats) as wire, simplebus.connect(server.address) as bus:
        await stream(wire, "EACH", "each.>", **per_subject)
        for channel in "each.a", "each.a", "each.a", "each.b":
            await bus.publish(b"", class_id="each", channel=channel)
        copied = Copied("each", stream="EACH", start="earliest")
        (lane,) = lanes([Bridge("each", server.address, nats.url, (copied,))])
        async with copying(lane):
            await until(lambda: lane.statistics().at == 4)
        assert (lane.statistics().copied, lane.statistics().refused) == (3, 1)
        (letter,) = await bus.fetch("dead.each")
        assert "maximum messages per subject" in dict(letter.headers)["dead-error"]
