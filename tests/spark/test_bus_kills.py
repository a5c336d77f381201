"""A bus with a journal is killed and restarted during two queries: no row is duplicated.

One query reads from the bus and is within a batch; the other query reads the journal files.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import simplebus
from load.ports import free_port
from simplebus.spark.jobs.archive import archive, messages
from tests.client.faulty_server import faulty_proxy
from tests.support.programs import running_program

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.xdist_group("spark")]

CONFIRMED = [b"%d %s" % (n, b"x" * 2000) for n in range(1500)]
UNDER_WAY = [b"%d" % n for n in range(1500, 2500)]
LATER = [b"%d" % n for n in range(2500, 2600)]
STALL_BYTES = 1_500_000
"""More than one answer of a bus, and less than the first batch."""


def test_killed_server_is_archived_once(spark: Any, tmp_path: Path) -> None:
    import pyarrow.dataset as ds  # Slow: imports pandas.

    data = tmp_path / "bus"
    arguments = ["serve", "--host", "127.0.0.1", "--no-nats", "--no-http"]
    arguments += ["--data-dir", str(data), "--port", str(port := free_port())]
    # The query that reads files retains no messages at the bus.
    arguments += ["--keep-messages", "10000"]
    with running_program(*arguments) as killed:
        killed.read_line()
        address = f"simplebus://127.0.0.1:{port}"
        with simplebus.connect_blocking(address, name="till") as bus, faulty_proxy(address) as way:
            bus.publish_many(CONFIRMED, class_id="orders")
            sources = {"delta": {"servers": way.address}, "parquet": {"path": str(data)}}
            way.stall_after_bytes = STALL_BYTES
            queries = {
                name: archive(
                    messages(spark, subscribe="orders", maxOffsetsPerTrigger=1600, **source),
                    str(tmp_path / name),
                    format=name,
                    every=0.1,
                )
                for name, source in sources.items()
            }
            try:
                wait(queries["delta"], lambda: bool(way.stalled_ports))
                for payload in UNDER_WAY:
                    bus.publish(payload, class_id="orders", confirm=False)
                killed.signal(signal.SIGKILL)
                killed.wait()
                way.stall_after_bytes = None
                way.disconnect_all()
                with running_program(*arguments) as restarted:
                    restarted.read_line()
                    bus.flush()
                    bus.publish_many(LATER, class_id="orders")
                    for query in queries.values():
                        query.processAllAvailable()
                        query.stop()  # The bus still runs, because a request is not interrupted.
            finally:
                for query in queries.values():
                    query.stop()
    tables = {
        "delta": DeltaTable(tmp_path / "delta").to_pyarrow_table(),
        "parquet": ds.dataset(tmp_path / "parquet", format="parquet").to_table(),
    }
    for name, table in tables.items():
        rows = sorted(zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True))
        assert rows == list(enumerate(CONFIRMED + UNDER_WAY + LATER)), name
        assert len(set(table["memory"].to_pylist())) == 1


def wait(query: Any, condition: Callable[[], bool]) -> None:
    """Wait for a condition while the query runs."""
    for _ in range(2000):
        if condition() or query.awaitTermination(0.05):
            break
    assert condition(), query.exception()
