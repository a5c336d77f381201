"""Tests of the split between collecting facts and formatting them."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType

import pytest

from simplebus.monitor import bus_metrics, bus_tables
from simplebus.server.http import server_metrics, server_monitor, varz

STATEFUL_CLASSES = {
    *("Broker", "Store", "MessageClass", "Position", "Session", "Server", "Connection"),
    *("NatsListener", "NatsServer", "NatsSession", "JetStreamBackend", "JournalPump"),
}


@pytest.mark.parametrize(
    "module", [bus_metrics, bus_tables, server_metrics, server_monitor, varz], ids=str
)
def test_modules_that_format_facts_do_not_reach_the_state(module: ModuleType) -> None:
    imported = {
        alias.name
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert not imported & STATEFUL_CLASSES
