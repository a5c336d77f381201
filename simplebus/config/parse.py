"""Parsers and declarations of command-line options: sizes, times, addresses, classes.

A parser raises typer.BadParameter for an invalid text. Heavy modules are imported inside functions,
so that `--help` is fast.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer

from simplebus.core.channel.pattern import check_name, check_pattern
from simplebus.core.limits import (
    BACKOFF_SECONDS_MAX,
    BACKOFF_STEPS_MAX,
    CLASS_ID_MAX,
    NAME_CHARACTERS_MAX,
    SEQUENCE_MAX,
)

if TYPE_CHECKING:
    from simplebus.core.protocol.requests import NamedClass

HOSTS = ("127.0.0.1", "::1")
URL = "simplebus://127.0.0.1:8888"


class LogLevel(enum.StrEnum):
    """Lowest level of logged events."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """Format of log lines."""

    CONSOLE = "console"
    JSON = "json"
    TEXT = "text"
    """Old name of CONSOLE."""


PORT_MAX = 65_535


# Parsers -----------------------------------------------------------------------------------------

_BYTES_MAX = (1 << 63) - 1


def parse_digits(text: str, maximum: int) -> int | None:
    """Return the number that ASCII digits stand for; None for other text and larger numbers."""
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"  # Python converts a limited number of digits only.
    if len(digits) > len(str(maximum)) or (number := int(digits)) > maximum:
        return None
    return number


_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_size(text: str | int) -> int:
    """Return the bytes of "65536", "64KiB", "16 MiB" or "1GiB". Raises typer.BadParameter."""
    normalized = str(text).strip().lower()
    digits = normalized.rstrip("bkmgi ")
    unit = normalized[len(digits) :].strip()
    size = parse_digits(digits, _BYTES_MAX)
    if size is None or unit not in _UNITS:
        unit_hint = f"{unit[:1].upper()}iB"
        has_hint = unit_hint.lower() in _UNITS and size is not None
        hint = f"did you mean {digits}{unit_hint}? " if has_hint else ""
        raise typer.BadParameter(
            f"{text!r} is not a size; {hint}write a whole number of bytes, or a number with KiB, "
            "MiB or GiB, such as 64MiB"
        )
    return size * _UNITS[unit]


def parse_host(text: str | int) -> str:
    """Return an address or host name to listen on. Raises typer.BadParameter."""
    if not isinstance(text, str):
        raise typer.BadParameter(f"expected a text, got {text!r}")
    if not (host := text.strip()):
        raise typer.BadParameter(
            f"{text!r} is not an address; expected an address to listen on, such as 0.0.0.0 or :: "
            "for all addresses of this machine"
        )
    if ":" in host and not _is_ipv6(host):
        raise typer.BadParameter(
            f"{text!r} is not an address; expected an address to listen on, without port and "
            "brackets"
        )
    return host


def _is_ipv6(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def parse_port(text: str | int) -> int:
    """Return a port number from 0 to 65535. Raises typer.BadParameter."""
    word = str(text).strip()
    if (port := parse_digits(word, PORT_MAX)) is not None:
        return port
    raise typer.BadParameter(f"{word!r} is not a port; expected a number from 0 to {PORT_MAX}")


_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_seconds(text: str | float) -> float:
    """Return the seconds of "10", "0.5", "500ms", "5min", "2h" or "7d".

    Raises:
        typer.BadParameter: If the text is not a finite, non-negative time.
    """
    normalized = str(text).strip().lower()
    digits = normalized.rstrip("dhimns ")
    unit = normalized[len(digits) :].strip()
    try:
        seconds = float(digits) * _SECONDS[unit] if digits.isascii() else math.nan
    except (ValueError, KeyError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise typer.BadParameter(
            f"{text!r} is not a time; write seconds such as 10 or 0.5, or a number with ms, s, "
            "min, h or d, such as 5min"
        )
    return seconds


def parse_pauses(text: str | tuple[float, ...]) -> tuple[float, ...]:
    """Return the times of a comma-separated list. Raises typer.BadParameter."""
    if isinstance(text, tuple):
        return text
    pauses = tuple(parse_seconds(part) for part in text.split(","))
    for pause in pauses:
        if not 0 < pause <= BACKOFF_SECONDS_MAX:
            raise typer.BadParameter(
                f"{pause:g} in {text!r} is not a delay: expected above 0 and up to "
                f"{BACKOFF_SECONDS_MAX:g} seconds"
            )
    if len(pauses) > BACKOFF_STEPS_MAX:
        raise typer.BadParameter(
            f"{len(pauses)} delays are too many: expected at most {BACKOFF_STEPS_MAX}"
        )
    return pauses


def parse_class(text: int | str) -> int | str:
    """Return a class id or class name. Raises typer.BadParameter."""
    if isinstance(text, int) or (text.isascii() and text.isdigit()):
        class_id = parse_digits(str(text), CLASS_ID_MAX)
        if class_id is None:
            raise typer.BadParameter(f"a class id is from 0 to {CLASS_ID_MAX}, got {text}")
        return class_id
    if not text.isprintable() or " " in text or not 0 < len(text) <= NAME_CHARACTERS_MAX:
        raise typer.BadParameter(
            f"{text!r} is not a class; write its id, from 0 to {CLASS_ID_MAX}, or its name, 1 to "
            f"{NAME_CHARACTERS_MAX} characters without spaces"
        )
    return text


def parse_last_values(text: str | NamedClass) -> NamedClass:
    """Return a class that keeps the last message of each channel. Raises typer.BadParameter."""
    from simplebus.core.protocol.requests import NamedClass

    if isinstance(text, NamedClass):
        return text
    class_id_or_name = parse_class(text)
    if isinstance(class_id_or_name, int):
        return NamedClass(id=class_id_or_name, last_values=True)
    return NamedClass(name=class_id_or_name, last_values=True)


def parse_binding(text: str | NamedClass) -> NamedClass:
    """Return the class and its bound subject from "orders.>=7" or "orders.>=orders".

    Raises:
        typer.BadParameter: If the text is not a binding.
    """
    from simplebus.core.errors import RemoteProtocolError
    from simplebus.core.message_class.subject_bindings import check_subject
    from simplebus.core.protocol.requests import NamedClass

    if isinstance(text, NamedClass):
        return text
    subject, equals, class_ = text.rpartition("=")
    if not equals:
        raise typer.BadParameter(
            f"{text!r} is not a binding; write a subject, = and a class, such as orders.>=7"
        )
    try:
        check_subject(subject)
    except RemoteProtocolError as error:
        raise typer.BadParameter(error.sentence) from None
    class_id_or_name = parse_class(class_)
    if isinstance(class_id_or_name, int):
        return NamedClass(id=class_id_or_name, subjects=[subject])
    return NamedClass(name=class_id_or_name, subjects=[subject])


def parse_servers(text: Any) -> Any:
    """Parse a comma-separated list of NATS servers. Raises typer.BadParameter."""
    from simplebus.net.nats_connection import NatsAddress

    if not isinstance(text, str):
        return text
    try:
        return tuple(NatsAddress.parse(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_server(text: str) -> str:
    """Return a valid HOST:PORT. Raises typer.BadParameter."""
    host, colon, port = str(text).rpartition(":")
    is_valid = bool(colon and host) and port.isascii() and port.isdigit() and len(port) <= 5
    if not (is_valid and 0 < int(port) <= PORT_MAX) or re.search(r"[\s/@]", host):
        raise typer.BadParameter(f"{text!r} is no HOST:PORT, such as nats-2.example.com:4222")
    return str(text)


def parse_start(text: str) -> str | int | datetime:
    """Return a start position: a keyword, a sequence or a time. Raises typer.BadParameter."""
    from simplebus.core.protocol.requests import START_KEYWORDS

    if text in START_KEYWORDS:
        return text
    if (sequence := parse_digits(text, SEQUENCE_MAX)) is not None:
        return sequence
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a start position; write {', '.join(START_KEYWORDS)}, a sequence, or "
            "a time such as 2026-01-31T08:00"
        ) from None


def parse_channel(text: str) -> str:
    """Return a valid channel. Raises typer.BadParameter."""
    return _checked(check_name, text)


def parse_pattern(text: str) -> str:
    """Return a valid pattern. Raises typer.BadParameter."""
    return _checked(check_pattern, text)


def _checked(check: Callable[[str], str], text: str) -> str:
    try:
        return check(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_header(text: str | tuple[str, str]) -> tuple[str, str]:
    """Return the header name and value of NAME=VALUE. Raises typer.BadParameter."""
    if isinstance(text, tuple):
        return text
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise typer.BadParameter(f"{text!r} is not a header; write NAME=VALUE")
    return name, value


def parse_url(text: str) -> str:
    """Return a valid server address. Raises typer.BadParameter."""
    from simplebus.client.addresses import Address

    try:
        return str(Address.parse(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def format_size(size: int) -> str:
    """Return bytes as `parse_size` reads them, in the largest unit that gives a whole number."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0 and size:
            return f"{size // factor}{unit}"
    return str(size)


# Option declarations -----------------------------------------------------------------------------


def option(flag: str, help_text: str, *, panel: str | None = None, **settings: Any) -> Any:
    """Return a typer option with its environment variable, SIMPLEBUS_ and the option's name."""
    variable = "SIMPLEBUS_" + flag.removeprefix("--").replace("-", "_").upper()
    return typer.Option(
        flag, help=help_text, envvar=variable, show_envvar=False, rich_help_panel=panel, **settings
    )


URL_OPTION = option(
    "--url",
    "Address of the server, as simplebus://HOST:PORT, with the host and port of `serve`.",
    metavar="URL",
    parser=parse_url,
    show_default=URL,
)
