"""What the words of the command line mean: sizes, times, addresses, and the settings of a server.

Rule 1: nothing heavy is imported here, so that help is instant.
Rule 2: a word that makes no sense raises typer.BadParameter; words that contradict each other raise
ValueError. Both say it in a sentence, by the names of the options.
"""

from __future__ import annotations

import enum
import math
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
    RING_BYTES_MIN,
    SEQUENCE_MAX,
    Limits,
)

if TYPE_CHECKING:
    from simplebus.core.protocol.requests import NamedClass

HOSTS = ("127.0.0.1", "::1")
NATS_PORT = 4222
URL = "simplebus://127.0.0.1:8888"
DRAIN_SECONDS = 10.0
CLASS_MEMORY_MIN = 4 * RING_BYTES_MIN

DEFAULT = Limits()

MEMORY, PATIENCE, ACKNOWLEDGEMENT = "Memory", "Patience", "Acknowledgement"
DURABILITY = "Durability"
"""Under which headings the help lists options."""


class FullPolicyChoice(enum.StrEnum):
    """What happens to a message for a class that is at its limit."""

    BLOCK = "block"
    DROP_OLDEST = "drop_oldest"
    DROP_NEWEST = "drop_newest"
    SPILL = "spill"


class DurabilityChoice(enum.StrEnum):
    """Where a message is when its publisher is told that it is stored."""

    MEMORY = "memory"
    OS = "os"
    DISK = "disk"


class LogLevel(enum.StrEnum):
    """How much the server says of itself."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """How it says it."""

    TEXT = "text"
    JSON = "json"


PORT_MAX = 65_535


# Words -------------------------------------------------------------------------------------------

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_size(text: str | int) -> int:
    """Bytes, from "65536", "64KiB", "16 MiB" or "1GiB". Raises typer.BadParameter."""
    word = str(text).strip().lower()
    digits = word.rstrip("bkmgi ")
    unit = word[len(digits) :].strip()
    if not (digits.isascii() and digits.isdigit()) or unit not in _UNITS:
        near = f"{unit[:1].upper()}iB"
        is_near = near.lower() in _UNITS and digits.isascii() and digits.isdigit()
        meant = f"did you mean {digits}{near}? " if is_near else ""
        raise typer.BadParameter(
            f"{text!r} is no size; {meant}write a whole number of bytes, or one with KiB, MiB or "
            "GiB behind it, such as 64MiB"
        )
    return int(digits) * _UNITS[unit]


def parse_host(text: str | int) -> str:
    """An address or a name to listen on. Raises typer.BadParameter."""
    if not isinstance(text, str):
        raise typer.BadParameter(f"expected a text, got {text!r}")
    if not (host := text.strip()):
        raise typer.BadParameter(
            f"{text!r} is no address, expected one to listen on; 0.0.0.0 and :: are all of this "
            "machine's"
        )
    if ":" in host and not _is_ipv6(host):
        raise typer.BadParameter(
            f"{text!r} is no address, expected one to listen on, without a port and brackets"
        )
    return host


def _is_ipv6(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def parse_port(text: str | int) -> int:
    """The number of a port, or 0. Raises typer.BadParameter."""
    word = str(text).strip()
    if word.isascii() and word.isdigit() and int(word) <= PORT_MAX:
        return int(word)
    hint = ""
    if "://" in word:
        hint = (
            "; Kubernetes sets a variable to that for a service whose name makes it, such "
            "as SIMPLEBUS_PORT: name the port by the option, which wins"
        )
    raise typer.BadParameter(f"{word!r} is no port, expected a number from 0 to {PORT_MAX}{hint}")


_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_seconds(text: str | float) -> float:
    """Seconds, from "10", "0.5", "500ms", "5min", "2h" or "7d". Raises typer.BadParameter for
    anything else, and for what is not finite."""
    word = str(text).strip().lower()
    digits = word.rstrip("dhimns ")
    unit = word[len(digits) :].strip()
    try:
        seconds = float(digits) * _SECONDS[unit] if digits.isascii() else math.nan
    except (ValueError, KeyError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise typer.BadParameter(
            f"{text!r} is no number of seconds, such as 10 or 0.5, nor one with ms, s, min, h or d "
            "behind it, such as 5min"
        )
    return seconds


def parse_pauses(text: str | tuple[float, ...]) -> tuple[float, ...]:
    """Spans of time with commas between them. Raises BadParameter."""
    if isinstance(text, tuple):
        return text
    pauses = tuple(parse_seconds(each) for each in text.split(","))
    for each in pauses:
        if not 0 < each <= BACKOFF_SECONDS_MAX:
            raise typer.BadParameter(
                f"{each:g} in {text!r} is no pause: expected above 0 and up to "
                f"{BACKOFF_SECONDS_MAX:g} seconds"
            )
    if len(pauses) > BACKOFF_STEPS_MAX:
        raise typer.BadParameter(f"{len(pauses)} pauses are too many: expected {BACKOFF_STEPS_MAX}")
    return pauses


def parse_class(text: int | str) -> int | str:
    """A class by its id or its name. Raises typer.BadParameter."""
    if isinstance(text, int):
        return text
    if text.isascii() and text.isdigit():
        if int(text) > CLASS_ID_MAX:
            raise typer.BadParameter(f"a class id is from 0 to {CLASS_ID_MAX}, got {text}")
        return int(text)
    if not text.isprintable() or " " in text or not 0 < len(text) <= NAME_CHARACTERS_MAX:
        raise typer.BadParameter(
            f"{text!r} is no class; write its id, from 0 to {CLASS_ID_MAX}, or its name, 1 to "
            f"{NAME_CHARACTERS_MAX} characters without spaces"
        )
    return text


def parse_last_values(text: str | NamedClass) -> NamedClass:
    """A class that keeps the last message of each channel. Raises typer.BadParameter."""
    from simplebus.core.protocol.requests import NamedClass

    if isinstance(text, NamedClass):
        return text
    found = parse_class(text)
    if isinstance(found, int):
        return NamedClass(id=found, last_values=True)
    return NamedClass(name=found, last_values=True)


def parse_start(text: str) -> str | int | datetime:
    """Where a subscription begins: a word, a sequence or a time. Raises typer.BadParameter."""
    from simplebus.core.protocol.requests import START_KEYWORDS

    if text in START_KEYWORDS:
        return text
    if text.isascii() and text.isdigit() and int(text) <= SEQUENCE_MAX:
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no start; write {', '.join(START_KEYWORDS)}, a sequence, or a time such as "
            "2026-01-31T08:00"
        ) from None


def parse_channel(text: str) -> str:
    """A channel to publish on. Raises typer.BadParameter."""
    return _checked(check_name, text)


def parse_pattern(text: str) -> str:
    """A pattern of channels. Raises typer.BadParameter."""
    return _checked(check_pattern, text)


def _checked(check: Callable[[str], str], text: str) -> str:
    try:
        return check(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_header(text: str | tuple[str, str]) -> tuple[str, str]:
    """A header's name and value, from NAME=VALUE. Raises typer.BadParameter."""
    if isinstance(text, tuple):
        return text
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise typer.BadParameter(f"{text!r} is no header; write NAME=VALUE")
    return name, value


def parse_url(text: str) -> str:
    """The address of a bus, checked. Raises typer.BadParameter."""
    from simplebus.client.addresses import Address

    try:
        return str(Address.parse(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def show_size(size: int) -> str:
    """Bytes as `parse_size` reads them, in the largest unit that leaves a whole number."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0 and size:
            return f"{size // factor}{unit}"
    return str(size)


# Options -----------------------------------------------------------------------------------------


def option(flag: str, text: str, *, panel: str | None = None, **more: Any) -> Any:
    """An option with the environment variable that its name makes."""
    variable = "SIMPLEBUS_" + flag.removeprefix("--").replace("-", "_").upper()
    return typer.Option(
        flag, help=text, envvar=variable, show_envvar=False, rich_help_panel=panel, **more
    )


def size_option(flag: str, text: str, default: str) -> Any:
    """An option that takes a size; its help shows `default`."""
    return option(flag, text, panel=MEMORY, parser=parse_size, metavar="SIZE", show_default=default)


def seconds_option(flag: str, text: str, default: float, *, panel: str | None = None) -> Any:
    """An option that takes seconds."""
    return option(
        flag,
        text,
        panel=panel,
        parser=parse_seconds,
        metavar="SECONDS",
        show_default=f"{default:g}",
    )


URL_OPTION = option(
    "--url",
    "Where the bus listens, as simplebus://HOST:PORT: what `serve --host` and `--port` say.",
    metavar="URL",
    parser=parse_url,
    show_default=URL,
)
