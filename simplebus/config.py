"""The configuration file of `serve`: TOML, checked to the last key.

Rule 1: every option of `serve` can stand in it, under its own name; the command line wins over the
environment, and the environment over the file.
Rule 2: a mistake is a sentence with the file, the key and what was expected. Nothing is ignored.

    [serve]                     options:        max-memory = "4GiB"      --max-memory
    [nats]                      the NATS door:  max-payload = "8MiB"     --nats-max-payload
    [nats.tls]                                  cert = "server.pem"      --nats-tls-cert
    [tls]                       all doors:      cert = "server.pem"      --tls-cert
    [[nats.users]]              who may come in, and what they may do
    [classes.orders]            id = 7, subjects = ["orders.>"], keep-seconds = 3600
    [[bridges]]                 what is copied to and from other servers

Paths are relative to the file's folder. In names `_` may stand for `-`.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from simplebus.complaints import fail
from simplebus.config_mistakes import ConfigError, once, unknown
from simplebus.options import option

if TYPE_CHECKING:
    from simplebus.bridge.settings import Bridge
    from simplebus.core.requests import NamedClass
    from simplebus.core.settings import ClassSettings
    from simplebus.nats.auth import NatsAuth

_OWN_TABLES = ("serve", "nats", "tls", "classes", "bridges")
_NO_OPTIONS = {"config", "help"}
_FLAG = re.compile(r"--[a-z][a-z-]*")


@dataclass(frozen=True, slots=True)
class Config:
    """What a file says."""

    path: Path
    options: Mapping[str, Any]
    """Values of options, by the names of their values, as they stand in the file."""
    auth: NatsAuth
    """Who may come in through the NATS door."""
    classes: Mapping[str, NamedClass]
    """Classes by their names."""
    class_settings: Mapping[int | str, ClassSettings]
    """What they do in their own way."""
    bridges: tuple[Bridge, ...] = ()
    warnings: tuple[str, ...] = ()


def config_option() -> Any:
    """The option that names the file. Its value is a `Config`, or None without one."""
    return option(
        "--config",
        "A TOML file in which any of these options can stand, by its name, and the users of the "
        "NATS door and the subjects that are bound to classes. Options that are given win.",
        metavar="FILE",
        show_default=False,
        parser=Path,
        is_eager=True,
        callback=_read_for,
    )


def _read_for(context: typer.Context, path: Path | None) -> Config | None:
    """Read the file before other options are looked at, and make it their defaults."""
    if path is None or context.resilient_parsing:
        return None
    try:
        config = read(path, context)
    except ConfigError as error:
        fail(str(error), status=2)
    context.default_map = {**config.options}
    return config


def read(path: Path, context: typer.Context) -> Config:
    """Read and check a file. `context` is that of `serve`. Raises ConfigError."""
    from simplebus.config_tables import ClassTable, NatsTable, table  # It takes a while.

    try:
        with open(path, "rb") as file:
            raw = tomllib.load(file)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    try:
        _known(raw, _OWN_TABLES, "")
        nats, tls = _taken(raw, "nats"), {}
        if "tls" in nats:
            tls = _taken(nats, "tls", under="nats.")
            del nats["tls"]
        parts = {
            "serve": _taken(raw, "serve"),
            "tls": _taken(raw, "tls"),
            "nats": nats,
            "nats.tls": tls,
        }
        options, nats = _options(parts, NatsTable.keys(), path, context)
        users = table(NatsTable, nats, "nats")
        tables = {
            name: table(ClassTable, _named(text, f"classes.{name}"), f"classes.{name}")
            for name, text in _taken(raw, "classes").items()
        }
        classes = {name: each.made(name, f"classes.{name}") for name, each in tables.items()}
        own: dict[int | str, ClassSettings] = {
            name: each.settings(f"classes.{name}") for name, each in tables.items()
        }
        _check_ids(classes)
        auth = users.auth("nats")
        bridges, has_secrets = _bridges(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    warnings = []
    if (users.has_secrets or has_secrets) and mode & stat.S_IROTH:
        warnings.append(f"{path} holds passwords or tokens, and every user may read it")
    return Config(path, options, auth, classes, own, bridges, tuple(warnings))


def _bridges(raw: dict[str, Any]) -> tuple[tuple[Bridge, ...], bool]:
    """The bridges of the file, and whether they hold secrets."""
    if "bridges" not in raw:
        return (), False
    from simplebus.bridge_config import made  # It brings the client, which few servers need.

    bridges, has_secrets = made(raw["bridges"], is_served=True)
    return tuple(bridges), has_secrets


def in_keys(error: ValueError, context: typer.Context) -> ValueError:
    """What is wrong with options together. Where any of those that it names stands in the file,
    with the file, and with keys instead of flags."""
    config: Config | None = context.params.get("config")
    if config is None or isinstance(error, ConfigError):
        return error

    def key(flag: re.Match[str]) -> str:
        name = flag[0].removeprefix("--").replace("-", "_")
        source = context.get_parameter_source(name)
        if source is None or source.name in ("COMMANDLINE", "ENVIRONMENT"):
            return flag[0]
        for part in ("nats_tls_", "nats_", "tls_"):
            if name.startswith(part):
                return part.replace("_", ".") + flag[0][len(part) + 2 :]
        return f"serve.{flag[0][2:]}"

    names = [flag[2:].replace("-", "_") for flag in _FLAG.findall(str(error))]
    if config.options.keys().isdisjoint(names):
        return error
    return ConfigError(f"{config.path}: {_FLAG.sub(key, str(error))}")


def _options(
    parts: Mapping[str, dict[str, Any]], others: Iterable[str], path: Path, context: typer.Context
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of options, checked; and what of [nats] is none."""
    parameters = {p.name: p for p in context.command.params if p.name not in _NO_OPTIONS}
    names = {
        "nats.tls": {n.removeprefix("nats_tls_"): n for n in parameters if "nats_tls_" in n},
        "nats": {
            n.removeprefix("nats_"): n
            for n in parameters
            if n.startswith("nats_") and "nats_tls_" not in n
        },
        "tls": {n.removeprefix("tls_"): n for n in parameters if n.startswith("tls_")},
        "serve": {n: n for n in parameters if not n.startswith(("nats_", "tls_"))},
    }
    values: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for part, given in parts.items():
        known = {*names[part], *(others if part == "nats" else ())}
        _known(given, known, part)
        for key, value in given.items():
            name = names[part].get(key.replace("-", "_"))
            if name is None:
                rest[key] = value
                continue
            try:
                values[name] = _checked(parameters[name], value, path, context)
            except (typer.BadParameter, TypeError, ValueError) as error:
                what = (getattr(error, "message", "") or str(error)).removeprefix("Value error, ")
                if what.startswith("Input should be "):
                    what = f"it {what.partition(',')[0][6:]}, got {value!r}"
                raise ConfigError(f"{part}.{key}: {what}") from None
    return values, rest


def _checked(parameter: Any, value: Any, path: Path, context: typer.Context) -> Any:
    """The value of an option as the command line would give it. Raises BadParameter, ValueError."""
    several = isinstance(value, list) and parameter.multiple
    for part in value if several else [value]:
        if not isinstance(part, bool | int | float | str):
            raise ValueError(f"expected a single value, got {_kind(part)}")
        if parameter.is_flag != isinstance(part, bool):
            expected = "true or false" if parameter.is_flag else "a value, not true or false"
            raise ValueError(f"expected {expected}, got {_kind(part)}")
    if parameter.multiple and not several:
        value = [value]
    meant = parameter.process_value(context, value)
    for part, given in zip(meant, value, strict=True) if parameter.multiple else [(meant, value)]:
        if isinstance(part, int | float) and isinstance(given, str) and parameter.metavar != "SIZE":
            raise ValueError(f"expected a number, got {given!r}")
        if isinstance(part, str | Path) and not isinstance(given, str):
            raise ValueError(f"expected a text, got {given!r}")
    return str(path.parent / meant) if isinstance(meant, Path) else value


def _taken(raw: dict[str, Any], name: str, *, under: str = "") -> dict[str, Any]:
    return _named(raw.get(name, {}), under + name)


def _named(value: Any, where: str) -> dict[str, Any]:
    """A copy of a table."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a table, got {_kind(value)}")
    return dict(value)


def _known(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ConfigError for a name that is none, or is there twice."""
    known = set(known)
    given = list(given)
    once(given, where)
    for name in given:
        if name.replace("-", "_") not in known:
            raise ConfigError(unknown(name, known, where))


def _check_ids(classes: Mapping[str, NamedClass]) -> None:
    """Raise ConfigError for an id that two classes have."""
    whose: dict[int, str] = {}
    for name, each in classes.items():
        if each.id is not None and whose.setdefault(each.id, name) != name:
            raise ConfigError(f"classes.{name}.id: {each.id} is the id of {whose[each.id]!r} too")


def _kind(value: Any) -> str:
    words = {dict: "a table", list: "a list", bool: str(value).lower()}
    return words.get(type(value), repr(value))
