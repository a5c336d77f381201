"""Gateway plans, read from a TOML file and checked.

A returned plan can be carried out: entry points were found, settings checked, and links have both
ends. Otherwise ConfigError names the place of the mistake in the file.

    [modules.clock]
    module = "timer"                  # or package.module:Name
    settings = { every = 1 }

    [modules.log]
    module = "logger"
    hears = ["clock"]                 # or ["*"]: all other modules
    places = 1024                     # size of its queue, in units of 64 KiB
    full = "block"                    # or drop_oldest, drop_newest
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from simplebus.config.errors import ConfigError, describe_unknown_name, find_repeated_names
from simplebus.config.toml_document import read_document
from simplebus.gateway.mailbox import QUEUE_UNITS, FullQueuePolicy
from simplebus.gateway.modules import SHIPPED

EVERYONE = "*"
"""Source of a link that stands for all other modules."""

Factory = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Plan of one module. Equal plans create modules that do the same."""

    name: str
    module: str
    """Short name of an included module, or its class as "package.module:Name"."""
    settings: Any = field(default_factory=dict)
    """Settings for the entry point."""
    places: int = QUEUE_UNITS
    full: FullQueuePolicy = FullQueuePolicy.BLOCK
    factory: Factory | None = field(default=None, compare=False, repr=False)
    """Entry point, if it was found already."""

    @classmethod
    def of(cls, name: str, module: str, settings: Any = None, **options: Any) -> ModulePlan:
        """Create a plan, with its entry point found and its settings checked.

        Args:
            name: Name of the module in the gateway.
            module: Short name of a shipped module, or `package.module:Name`.
            settings: Settings as in a file; None for none.
            options: `places` and `full`, as in `ModuleBus.add_module`.

        Returns:
            The plan.

        Raises:
            ConfigError: The name, the module or a setting is invalid.
        """
        factory = _find_callable(module)
        parsed = parse_settings(factory, {} if settings is None else settings)
        return cls(check_module_name(name), module, parsed, factory=factory, **options)


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """Modules in the order in which they start, and links between them."""

    modules: tuple[ModulePlan, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    """Source and sink of each link. The source may be EVERYONE."""

    def check(self) -> None:
        """Check the names and the links.

        Raises:
            ConfigError: A name is invalid or used twice, or a link has an unknown end.
        """
        names = [check_module_name(module.name) for module in self.modules]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two modules have the name {name!r}")
        for link in self.links:
            for name in link:
                if name not in names and (name != EVERYONE or name is link[1]):
                    raise ConfigError(
                        f"a link: {describe_unknown_name(name, names or ['no modules'], '')}"
                    )
            if self.links.count(link) > 1:
                raise ConfigError(f"{link[1]!r} already receives from {link[0]!r}")


class _ModuleTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    module: str
    settings: dict[str, Any] = {}
    hears: list[str] = []
    places: int = QUEUE_UNITS
    full: FullQueuePolicy = FullQueuePolicy.BLOCK


def read(path: Path) -> GatewayPlan:
    """Return the plan in a file. Raises ConfigError."""
    document = read_document(path)
    try:
        return parse(document.tables)
    except ConfigError as error:
        raise ConfigError(*document.locate(error.messages)) from None


def parse(document: Mapping[str, Any]) -> GatewayPlan:
    """Return the plan in a parsed file. Raises ConfigError."""
    for name in document:
        if name != "modules":
            raise ConfigError(describe_unknown_name(name, ["modules"], ""))
    if not document:
        raise ConfigError(
            "the file is empty: expected [modules.NAME] for each module, or [modules] for none"
        )
    tables = document["modules"]
    if not isinstance(tables, dict):
        raise ConfigError("modules: expected tables, [modules.NAME] for each")
    modules, links = [], []
    for name, table in tables.items():
        plan, sources = _parse_module(name, table)
        modules.append(plan)
        links += [(source, name) for source in sources]
    for source, sink in links:
        path = f"modules.{sink}.hears"
        if source != EVERYONE and source not in tables:
            raise ConfigError(describe_unknown_name(source, tables, path))
        if links.count((source, sink)) > 1:
            raise ConfigError(f"{path}: {source!r} is listed twice")
    return GatewayPlan(tuple(modules), tuple(links))


def check_module_name(name: str) -> str:
    """Return the name. Raises ConfigError if a module cannot have it."""
    if name == EVERYONE:
        raise ConfigError(
            f"{EVERYONE!r} stands for all other modules and cannot be a module's name"
        )
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise ConfigError(f"a module's name has letters, digits, _ and -, up to 64; got {name!r}")
    return name


def find_entry_point(module: str) -> Factory:
    """Import the entry point of a module. Raises ConfigError."""
    module_name, _, name = SHIPPED.get(module, module).partition(":")
    if not name:
        hint = describe_unknown_name(module, SHIPPED, "")
        raise ConfigError(f"{hint}; name your own module as package.module:Name")
    try:
        entry_point: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{module_name!r} cannot be imported: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Foreign code may raise anything.
        raise ConfigError(f"{module_name!r} fails when it is imported: {error!r}") from error
    for part in name.split("."):
        if not hasattr(entry_point, part):
            public_names = [name for name in dir(entry_point) if not name.startswith("_")]
            raise ConfigError(describe_unknown_name(part, public_names, module_name))
        entry_point = getattr(entry_point, part)
    if not callable(entry_point):
        raise ConfigError(f"{module!r} must be a class or a function, got {entry_point!r}")
    return entry_point  # type: ignore[no-any-return]


def _find_callable(module: str) -> Factory:
    """Import the entry point of a module, and check its parameters. Raises ConfigError."""
    entry_point = find_entry_point(module)
    try:
        inspect.signature(entry_point).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{module!r} is not a module: expected a class or function with two parameters, "
            f"bus and settings ({error})"
        ) from None
    except ValueError:
        pass  # Functions that are not written in Python may have no signature.
    return entry_point


def parse_settings(factory: Factory, raw: Mapping[str, Any]) -> Any:
    """Convert settings by the module's `parse`, or to its `Settings`, or to a dict.

    Raises ConfigError, whose message begins with "settings".
    """
    settings_type = getattr(factory, "Settings", None)
    parse = getattr(factory, "parse", None)
    try:
        if parse is not None:
            return parse(dict(raw))
        if settings_type is None:
            return dict(raw)
        return convert_settings(raw, settings_type)
    except ConfigError:
        raise
    except msgspec.ValidationError as error:
        raise ConfigError(_describe_invalid_value(error, settings_type, "settings")) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Foreign code may raise anything.
        raise ConfigError(f"settings: {error or repr(error)}") from error


def convert_settings(raw: Mapping[str, Any], settings_type: Any) -> Any:
    """Convert settings to a `Settings` type.

    Raises:
        ConfigError: A name is unknown.
        ValidationError: A value is invalid.
    """
    if dataclasses.is_dataclass(settings_type):
        field_names = [settings_field.name for settings_field in dataclasses.fields(settings_type)]
    else:
        field_names = [
            settings_field.encode_name for settings_field in msgspec.structs.fields(settings_type)
        ]
    for error in find_repeated_names(raw, "settings"):
        raise ConfigError(error)
    for name in raw:
        if name.replace("-", "_") not in field_names:
            raise ConfigError(describe_unknown_name(name, field_names, "settings"))
    return msgspec.convert(
        {name.replace("-", "_"): each for name, each in raw.items()}, settings_type
    )


def _describe_invalid_value(error: msgspec.ValidationError, table: Any, path: str) -> str:
    """Return an error of msgspec with the path of its key in front."""
    problem, _, location = str(error).partition(" - at `$.")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return f"{path}: {missing[1].replace('_', '-')!r} is missing"
    key = location.removesuffix("`")
    return f"{path}{key and '.'}{key}: {problem}{_expected_values(problem, table, key)}"


def _expected_values(problem: str, settings_type: Any, name: str) -> str:
    """Return the allowed values for an invalid word, as the end of a sentence; empty for other
    errors.
    """
    if not problem.startswith("Invalid enum value"):
        return ""
    kind: Any = get_type_hints(settings_type).get(name)
    words = get_args(kind) if get_origin(kind) is Literal else ()
    if isinstance(kind, type) and issubclass(kind, Enum):
        words = tuple(member.value for member in kind)
    return f", expected one of {', '.join(map(str, words))}" if words else ""


def _parse_module(name: str, table: Any) -> tuple[ModulePlan, list[str]]:
    """Return the plan of a module and its sources. Raises ConfigError."""
    path, field_names = f"modules.{name}", _ModuleTable.__struct_fields__
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: expected a table, got {table!r}")
    for key in table:
        if key not in field_names:
            raise ConfigError(describe_unknown_name(key, field_names, path))
    try:
        parsed = msgspec.convert(table, _ModuleTable)
    except msgspec.ValidationError as error:
        raise ConfigError(_describe_invalid_value(error, _ModuleTable, path)) from None
    if parsed.places < 1:
        raise ConfigError(f"{path}.places: expected 1 or more, got {parsed.places}")
    with _located(path):
        check_module_name(name)
    with _located(f"{path}.module"):
        factory = _find_callable(parsed.module)
    with _located(path, "."):
        settings = parse_settings(factory, parsed.settings)
    plan = ModulePlan(name, parsed.module, settings, parsed.places, parsed.full, factory)
    return plan, parsed.hears


@contextlib.contextmanager
def _located(path: str, separator: str = ": ") -> Iterator[None]:
    """Raise a ConfigError of the block with `path` in front of its message."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}{separator}{error}") from None
