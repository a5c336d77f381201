"""A copier of a bridge in the server reads the same messages from memory as by requests."""

from __future__ import annotations

import random

import numpy as np
import pytest
import trio

from simplebus.bridge.bus_connection import connect_source
from simplebus.bridge.interfaces import SourceBatch
from simplebus.bridge.source.bus import BusSource
from simplebus.client.aio.connect import open_bus
from simplebus.core.settings import ClassSettings, FullPolicy, Settings
from simplebus.server.local_client import LocalEndpoint
from tests.support.running_server import serving

PATIENCE_SECONDS = 120.0
COUNT = 600


def comparable(found: SourceBatch) -> list[object]:
    """Return the parts of a batch that a copier uses, without the part of headers that only a
    session uses.
    """
    frames = []
    for piece in found.runs:
        raw, bounds = bytes(piece.raw), piece.bounds.tolist()
        frames += [
            (sequence, raw[a : a + 1] + raw[a + 9 : b])
            for sequence, a, b in zip(piece.sequences.tolist(), bounds, bounds[1:], strict=False)
        ]
    marks = [found.fingerprint(sequence) for sequence, _ in frames[:3]]
    return [
        frames,
        marks,
        found.first_sequence,
        found.next_sequence,
        found.head,
        found.missed_count,
    ]


@pytest.mark.parametrize("seed", range(3))
async def test_in_place_read_equals_fetch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have several types and lengths and wrap around the arena; some are purged or
    dropped.
    """
    monkeypatch.setattr("simplebus.core.broker.fetch.FETCH_BYTES_MAX", 4096)
    monkeypatch.setattr("simplebus.bridge.source.bus._REPLIES_PER_READ_MAX", 1)
    rng = random.Random(seed)
    orders = ClassSettings(full_policy=FullPolicy.DROP_OLDEST, bytes_max=262_144)
    settings = Settings(classes={"orders": orders})
    async with serving(settings) as server:
        endpoint = LocalEndpoint(server.server, "a test")
        with trio.fail_after(PATIENCE_SECONDS):
            async with (
                open_bus([endpoint]) as bus,
                connect_source(
                    endpoint, "told", target_id="x", heartbeat=10, auth=None
                ) as connection,
                connect_source(endpoint, "seen", target_id="x", heartbeat=10, auth=None) as other,
            ):
                ends = [
                    BusSource(connection, class_="orders", durable="a"),
                    BusSource(other, class_="orders", durable="b", endpoint=endpoint),
                ]
                for end in ends:
                    await end.open()
                for number in range(COUNT):
                    more = {"channel": rng.choice("xy")} if rng.random() < 0.5 else {}
                    payload = bytes(rng.choice([3, 3, 3, 400, 4000]))
                    await bus.publish(payload, class_id="orders", confirm=False, **more)
                    if rng.random() < 0.02:
                        await bus.flush()
                        at = number - rng.randrange(20)
                        await bus.purge("orders", max(0, at), max(1, at + rng.randrange(9)))
                await bus.flush()
                at, seen = 0, 0
                while at < COUNT:
                    asked, looked = [await end.read(at) for end in ends]
                    assert comparable(looked) == comparable(asked)
                    for mine, theirs in zip(looked.runs, asked.runs, strict=False):
                        when = asked.read_at - theirs.ages[: mine.count]
                        assert np.allclose(looked.read_at - mine.ages, when, rtol=0, atol=1e-5)
                    seen += sum(piece.count for piece in looked.runs)
                    at = looked.next_sequence
                assert 0 < seen < COUNT
