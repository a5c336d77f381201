"""Logs received messages.

module = "logger"
settings = { level = "info", content = "text", length = 200 }
"""

from __future__ import annotations

import logging
from typing import Annotated, Literal

import msgspec

from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import Module
from simplebus.logs.event_logger import EventLogger


class LoggerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the logger."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    content: Literal["text", "hex", "size"] = "text"
    """Representation of the content."""
    length: Annotated[int, msgspec.Meta(ge=0)] = 200
    """Number of bytes to show."""


class Logger(Module):
    """Logger module."""

    Settings = LoggerSettings

    async def receive(self, message: ModuleMessage) -> None:
        settings: LoggerSettings = self.settings
        level = logging.getLevelNamesMapping()[settings.level.upper()]
        shown = message.content[: settings.length]
        if settings.content == "size":
            text = f"{len(message.content):,} bytes"
        elif settings.content == "hex":
            text = shown.hex(" ")
        else:
            text = repr(shown.decode(errors="replace"))[1:-1]
        if settings.content != "size" and len(shown) < len(message.content):
            text += f"… ({len(message.content):,} bytes)"
        properties = "".join(f" {name}={value!r}" for name, value in message.properties.items())
        EventLogger(self.bus.log).log(
            level,
            "module_message.logged",
            "{content}{properties}",
            content=text,
            properties=properties,
            is_unlimited=True,
        )
