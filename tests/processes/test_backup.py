"""Backup of a server under load, and a server that is started with the restored copy."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import simplebus
from tests.support.programs import PATIENCE_SECONDS, run_program, run_server

BEFORE, BACKUPS = 3000, 3
ACKED = 100


def test_restored_server_delivers_what_was_confirmed_and_not_acknowledged(tmp_path: Path) -> None:
    data, backup, restored = (str(tmp_path / name) for name in ("data", "copy", "new"))
    with run_server("--no-nats", "--no-http", "--data-dir", data) as (program, url):
        with simplebus.connect_blocking(url, name="shop", timeout=PATIENCE_SECONDS) as bus:
            with bus.subscribe("orders", durable="billing", max_in_flight=ACKED) as messages:
                for number in range(BEFORE):
                    bus.publish(b"%d" % number, class_id="orders", confirm=False)
                bus.flush()
                acked = {int(messages.get(PATIENCE_SECONDS).payload) for _ in range(ACKED)}
            stopped = threading.Event()

            def publish() -> None:
                number = BEFORE
                while not stopped.is_set():
                    bus.publish(b"%d" % number, class_id="orders")
                    number += 1

            publishing = threading.Thread(target=publish)
            publishing.start()
            for _ in range(BACKUPS):
                status, output, errors = run_program("backup", backup, "--data-dir", data)
                assert (status, errors) == (0, "")
                assert "intact: bus" in output
            stopped.set()
            publishing.join(PATIENCE_SECONDS)
        program.signal(signal.SIGKILL)
    status, output, errors = run_program("restore", backup, "--data-dir", restored)
    assert (status, errors) == (0, "")
    assert output.startswith("restored: bus ")
    with (
        run_server("--no-nats", "--no-http", "--data-dir", restored) as (program, url),
        simplebus.connect_blocking(url, timeout=PATIENCE_SECONDS) as bus,
        bus.subscribe("orders", durable="billing") as messages,
    ):
        missing = set(range(BEFORE)) - acked
        while missing:
            missing.discard(int(messages.get(PATIENCE_SECONDS).payload))


def test_wrong_directory_is_reported_with_its_status(tmp_path: Path) -> None:
    status, output, errors = run_program("backup", "copy", "--data-dir", str(tmp_path))
    assert (status, output) == (74, "")
    assert errors == f"simplebus: {tmp_path} is not a journal: it contains no simplebus.json\n"
