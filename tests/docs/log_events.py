"""Log events of the source code, for the reference page and for the test of log calls."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from string import Formatter
from typing import NamedTuple

from tests.support.sources import ROOT, SOURCES, source_nodes

_METHODS = {"debug", "info", "warning", "error", "exception", "log"}
_NO_FIELDS = {"exc_info", "is_unlimited"}

SECTIONS = {
    "Server": ("simplebus/server", "simplebus/commands/serve", "simplebus/storage"),
    "JetStream cluster": ("simplebus/jetstream", "simplebus/net"),
    "Bridges": ("simplebus/bridge", "simplebus/commands/bridge.py"),
    "Gateways": ("simplebus/gateway", "simplebus/commands/gateway.py"),
    "Python client": ("simplebus/client",),
    "Spark": ("simplebus/spark",),
}
"""Sections of the reference page, by the beginnings of the paths of their modules."""

FIELD_MEANINGS = {
    "action": "Requested operation, as in the [HTTP API](http-api.md).",
    "acks": "Number of acks, as text: `3 acks`.",
    "address": "Addresses that a listener has, as text.",
    "alteration": "Difference between the copy of a message and the original.",
    "attempt": "Number of the attempt.",
    "change": "A changed setting: its name, the old and the new value.",
    "changes": "Changes, as text.",
    "class_id": "Id of a class.",
    "class_name": "Name of the class, or its id if it has none.",
    "classes": "Number of classes, as text: `3 further classes`.",
    "connection": "Kind and number of the connection: `session 7`.",
    "consumer": "Name of a JetStream consumer.",
    "content": "Content of a message, as the settings of the module `logger` show it.",
    "copied": "Messages copied since the start.",
    "copier": "Name of the copier, as in the metrics of bridges.",
    "count": "Number of messages, frames, acks, classes or events.",
    "creator": "Client that created a class: `session 4 'shop' (127.0.0.1:5000)`.",
    "durable": "Name of a durable.",
    "error": "Error message.",
    "failure_count": "Number of the failure, counted for one handler or module.",
    "frame_bytes": "Largest accepted frame, in bytes.",
    "frames": "Number of frames, as text: `3 frames`.",
    "handler": "Function that raised an exception.",
    "identity": "Identity of a bus.",
    "lag": "Messages that are not copied yet; null if unknown.",
    "limit": "Size limit of a stream, as text.",
    "listener": "Function that a program has registered at a gateway.",
    "losses": "Lost connections and failed attempts since the start.",
    "messages": "Number of messages, as text: `3 messages`.",
    "missed": "Messages that the source dropped before they were copied.",
    "module_name": "Name of a gateway's module.",
    "notice": "Error message of the server that belongs to no request.",
    "outcome": "What happens next, or what did not happen.",
    "path": "Path of a file, or of an HTTP request.",
    "payload_bytes": "Largest message that the NATS servers accept, in bytes.",
    "peer": "Address of a client, with its name if it has one.",
    "previous": "Previous value of a setting, as in the file; empty if there was none.",
    "problem": "Sentence about a file or a setting.",
    "properties": "Properties of a message, as text.",
    "range": "Range of sequences of a class, as text.",
    "range_count": "Number of ranges.",
    "read_bytes": "Bytes that were read.",
    "reason": "[Reason code](errors.md#reason-codes), or a text about the cause.",
    "received": "Message that a handler received.",
    "refused": "Messages that the target refused for good since the start: dead letters.",
    "seconds": "Duration or time limit, in seconds.",
    "sentence": "Error message that belongs to the reason code.",
    "sequence": "Sequence of the first message concerned.",
    "server": "Address of the server.",
    "setting": "Key of a setting in the file.",
    "signal": "Name of a Unix signal.",
    "source": "Bus from which messages are copied.",
    "stack": "Functions that the event loop is executing.",
    "state": "State of a module, or the state sent to systemd.",
    "status": "Counters of a process, as text.",
    "stream": "Name of a JetStream stream.",
    "streams": "Names of streams, as text.",
    "suppressed_event": "Event that was suppressed.",
    "target": "Bus to which messages are copied.",
    "uplink": "Name of an uplink at its target.",
    "url": "URL of a module bus.",
    "user": "Name of a user; empty without users.",
    "value": "New value of a setting, as in the file; empty if it is not set, or a secret.",
    "wanted_limit": "Size limit that the options ask for, as text.",
}
"""Meaning of each field, as Markdown."""


class EventCall(NamedTuple):
    """Call of an `EventLogger`."""

    event: str
    level: str
    """Empty if the call decides it."""
    sentence: str
    fields: tuple[str, ...]
    path: str

    @property
    def sentence_fields(self) -> list[str]:
        """Names of the values in the sentence."""
        return [name for _, name, _, _ in Formatter().parse(self.sentence) if name is not None]


@cache
def find_event_calls() -> tuple[EventCall, ...]:
    """Return the calls of event loggers in the package, by file and line."""
    calls: list[EventCall] = []
    for path in SOURCES:
        if path.name != "event_logger.py":
            location = str(path.relative_to(ROOT))
            calls += log_calls_of(source_nodes(path), location)
    return tuple(calls)


def find_section(path: str) -> str:
    """Return the section of the reference page for a module. Raises KeyError without one."""
    for section, beginnings in SECTIONS.items():
        if path.startswith(beginnings):
            return section
    raise KeyError(path)


def log_calls_of(nodes: Iterable[ast.AST], path: str) -> list[EventCall]:
    """Return the log calls among syntax nodes. Raises ValueError if one has no names."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and _is_log_call(node)]
    return [_parse_call(call, path) for call in sorted(calls, key=lambda call: call.lineno)]


def _is_log_call(call: ast.Call) -> bool:
    """Return True for `log.info(...)`, `self._log.info(...)` and `EventLogger(...).info(...)`."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS):
        return False
    receiver = call.func.value
    if isinstance(receiver, ast.Call):
        receiver = receiver.func
    name = receiver.attr if isinstance(receiver, ast.Attribute) else ast.unparse(receiver)
    return name in ("log", "_log", "logger", "_logger", "EventLogger", "getLogger")


def _parse_call(call: ast.Call, path: str) -> EventCall:
    assert isinstance(call.func, ast.Attribute)
    method = call.func.attr
    texts = call.args[1:] if method == "log" else call.args
    values = [text.value for text in texts if isinstance(text, ast.Constant)]
    names = [keyword.arg or "" for keyword in call.keywords]
    if len(texts) != 2 or [type(value) for value in values] != [str, str] or "" in names:
        raise ValueError(
            f"{path}:{call.lineno}: expected an event, a sentence and named values, "
            f"got {ast.unparse(call)}"
        )
    event, sentence = map(str, values)
    level = {"exception": "error", "log": ""}.get(method, method)
    return EventCall(
        event, level, sentence, tuple(name for name in names if name not in _NO_FIELDS), path
    )
