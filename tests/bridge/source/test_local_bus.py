"""A copier of a bridge in the server reads the same messages from memory as by requests."""

from __future__ import annotations

import inspect
import random

import numpy as np
import pytest
import trio

from simplebus.bridge.bus_connection import connect_source
from simplebus.bridge.interfaces import SourceBatch
from simplebus.bridge.source.bus import BusSource, InProcessBus
from simplebus.client.aio.connect import open_bus
from simplebus.core.settings import ClassSettings, FullPolicy, Settings
from simplebus.server.local_client import LocalEndpoint
from tests.support.running_server import serving

PATIENCE_SECONDS = 120.0
COUNT = 600


def comparable(batch: SourceBatch) -> list[object]:
    """Return the parts of a batch that a copier uses, without the part of headers that only a
    session uses.
    """
    frames = []
    for run in batch.runs:
        raw, bounds = bytes(run.raw), run.bounds.tolist()
        frames += [
            (number, raw[a : a + 1] + raw[a + 9 : b])
            for number, a, b in zip(run.sequences.tolist(), bounds, bounds[1:], strict=False)
        ]
    fingerprints = [batch.fingerprint(number) for number, _ in frames[:3]]
    return [
        frames,
        fingerprints,
        batch.first_sequence,
        batch.next_sequence,
        batch.head,
        batch.missed_count,
    ]


def test_local_endpoint_is_an_in_process_bus() -> None:
    """The protocol is matched by method name at run time: another name would only be slower."""
    assert issubclass(LocalEndpoint, InProcessBus)
    of_endpoint, of_protocol = (
        list(inspect.signature(each.fetch_from_memory).parameters)
        for each in (LocalEndpoint, InProcessBus)
    )
    assert of_endpoint == of_protocol


@pytest.mark.parametrize("seed", range(3))
async def test_in_place_read_equals_fetch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have several types and lengths, and fill several segments; some are purged or
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
                connect_source(
                    endpoint, "seen", target_id="x", heartbeat=10, auth=None
                ) as session_source,
            ):
                sources = [
                    BusSource(connection, class_="orders", durable="a"),
                    BusSource(session_source, class_="orders", durable="b", endpoint=endpoint),
                ]
                for source in sources:
                    await source.open()
                for number in range(COUNT):
                    options = {"channel": rng.choice("xy")} if rng.random() < 0.5 else {}
                    payload = bytes(rng.choice([3, 3, 3, 400, 4000]))
                    await bus.publish(payload, class_id="orders", confirm=False, **options)
                    if rng.random() < 0.02:
                        await bus.flush()
                        sequence = number - rng.randrange(20)
                        await bus.purge(
                            "orders", max(0, sequence), max(1, sequence + rng.randrange(9))
                        )
                await bus.flush()
                sequence, message_count = 0, 0
                while sequence < COUNT:
                    fetched, in_place = [await source.read(sequence) for source in sources]
                    assert comparable(in_place) == comparable(fetched)
                    # Runs read in place also end with a segment, so only all runs are compared.
                    accepted_at = [
                        batch.read_at - np.concatenate([[0.0], *(run.ages for run in batch.runs)])
                        for batch in (in_place, fetched)
                    ]
                    assert np.allclose(accepted_at[0][1:], accepted_at[1][1:], rtol=0, atol=1e-5)
                    message_count += sum(run.count for run in in_place.runs)
                    sequence = in_place.next_sequence
                assert 0 < message_count < COUNT
