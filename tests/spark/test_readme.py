"""Tests of the Spark commands and examples in the README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import simplebus
from simplebus.spark.commands import MODULES
from simplebus.spark.jobs import session as sessions
from simplebus.testing.server import BusServer

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_every_command_is_documented() -> None:
    assert re.findall(r"^simplebus pipeline (\S+) .* #", README, re.MULTILINE) == list(MODULES)


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_the_example_copies_each_message_once(
    spark: Any, server: BusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "session", lambda name: spark)
    examples = re.findall(r"^```py\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (code,) = (example for example in examples if "readStream" in example)
    code = code.replace("/data/copies", str(tmp_path))
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many([b"before"] * 2, class_id="orders")
        bus.publish(b"before", class_id=7)
        names: dict[str, Any] = {}
        exec(code.replace("127.0.0.1:8888", server.address), names)
        try:
            names["query"].processAllAvailable()
            bus.publish(b"one", class_id="orders", channel="eu.paid", key=b"k")
            bus.publish(b"two", class_id=7)
            names["query"].processAllAvailable()
        finally:
            names["query"].stop()
        copies = {(m.payload, m.channel, m.key) for m in bus.fetch("copies")}
        assert copies == {(b"one", "eu.paid", b"k"), (b"two", "", b"")}
        assert len(list(bus.fetch("copies"))) == 2
