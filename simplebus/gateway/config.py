"""What a gateway is to be made of: read from a TOML file, and checked.

Rule 1: a plan that is returned can be carried out: modules were found, settings checked, links lead
somewhere. Otherwise ConfigError says where in the file what is wrong.

    [modules.clock]
    module = "timer"                  # or package.module:Name
    settings = { every = 1 }

    [modules.log]
    module = "logger"
    hears = ["clock"]                 # or ["*"]: everyone else
    places = 1024                     # messages that may wait for it
    full = "block"                    # or drop_oldest, drop_newest
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from simplebus.config.mistakes import ConfigError, once, unknown
from simplebus.core import toml
from simplebus.gateway.mailbox import QUEUE_PLACES, Full
from simplebus.gateway.modules import SHIPPED

EVERYONE = "*"
"""As a source of a link: everyone else."""

Factory = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One module. Plans that are equal lead to modules that do the same."""

    name: str
    module: str
    """A short name of a module that is shipped, or `package.module:Name`."""
    settings: Any = field(default_factory=dict)
    """What its entry point is called with."""
    places: int = QUEUE_PLACES
    full: Full = Full.BLOCK
    factory: Factory | None = field(default=None, compare=False, repr=False)
    """The entry point, if it is found already."""

    @classmethod
    def of(cls, name: str, module: str, settings: Any = None, **options: Any) -> ModulePlan:
        """One with its entry point found, and its settings checked. Raises ConfigError."""
        factory = _entry(module)
        meant = parse_settings(factory, {} if settings is None else settings)
        return cls(checked_name(name), module, meant, factory=factory, **options)


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """All modules, in the order in which they start, and who hears whom."""

    modules: tuple[ModulePlan, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    """Source and sink of each; the source may be EVERYONE."""

    def check(self) -> None:
        """Raise ConfigError for names that are there twice or are none, and for links that lead
        nowhere."""
        names = [checked_name(each.name) for each in self.modules]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"there are two modules {name!r}")
        for link in self.links:
            for name in link:
                if name not in names and (name != EVERYONE or name is link[1]):
                    raise ConfigError(f"a link: {unknown(name, names or ['no modules'], '')}")
            if self.links.count(link) > 1:
                raise ConfigError(f"{link[1]!r} hears {link[0]!r} already")


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    module: str
    settings: dict[str, Any] = {}
    hears: list[str] = []
    places: int = QUEUE_PLACES
    full: Full = Full.BLOCK


def read(path: Path) -> GatewayPlan:
    """The plan of a file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    try:
        return parse(text)
    except _MistakeError as mistake:
        line = _line_of(text, mistake.where)
        raise ConfigError(f"{path}{f':{line}' if line else ''}: {mistake}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse(text: str) -> GatewayPlan:
    """The plan of a file's text. Raises ConfigError."""
    try:
        raw = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigError(f"no TOML: {error}") from None
    for name in raw:
        if name != "modules":
            raise _MistakeError((name,), unknown(name, ["modules"], ""))
    if not raw:
        raise ConfigError(
            "there is nothing in it: expected [modules.NAME] for each module, or [modules] for none"
        )
    tables = raw["modules"]
    if not isinstance(tables, dict):
        raise _MistakeError(("modules",), "modules: expected tables, [modules.NAME] for each")
    modules, links = [], []
    for name, table in tables.items():
        plan, hears = _module(name, table)
        modules.append(plan)
        links += [(source, name) for source in hears]
    for source, sink in links:
        where = ("modules", sink, "hears")
        if source != EVERYONE and source not in tables:
            raise _MistakeError(where, unknown(source, tables, _dotted(where)))
        if links.count((source, sink)) > 1:
            raise _MistakeError(where, f"{_dotted(where)}: {source!r} is there twice")
    return GatewayPlan(tuple(modules), tuple(links))


def checked_name(name: str) -> str:
    """The name, if a module may be called so. Raises ConfigError."""
    if name == EVERYONE:
        raise ConfigError(f"{EVERYONE!r} stands for everyone else, and is no name of a module")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise ConfigError(f"a module's name has letters, digits, _ and -, up to 64; got {name!r}")
    return name


def find(module: str) -> Factory:
    """The entry point of a module. Raises ConfigError."""
    where, _, name = SHIPPED.get(module, module).partition(":")
    if not name:
        near = unknown(module, SHIPPED, "")
        raise ConfigError(f"{near}; a module of yours is called package.module:Name")
    try:
        found: Any = importlib.import_module(where)
    except ImportError as error:
        raise ConfigError(f"{where!r} cannot be imported: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Whatever it is.
        raise ConfigError(f"{where!r} fails when it is imported: {error!r}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            known = [each for each in dir(found) if not each.startswith("_")]
            raise ConfigError(unknown(part, known, where))
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{module!r} must be a class or a function, got {found!r}")
    return found  # type: ignore[no-any-return]


def _entry(module: str) -> Factory:
    """The entry point of a module, if it can be called as one. Raises ConfigError."""
    found = find(module)
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{module!r} is no module: expected what is called with a bus and settings ({error})"
        ) from None
    except ValueError:
        pass  # Of what is not written in Python nobody knows.
    return found


def parse_settings(factory: Factory, raw: Mapping[str, Any]) -> Any:
    """Settings as the module wants them: what its `parse` makes of them, or its `Settings`, or as
    they are. Raises ConfigError."""
    wanted = getattr(factory, "Settings", None)
    own = getattr(factory, "parse", None)
    try:
        if own is not None:
            return own(dict(raw))
        if wanted is None:
            return dict(raw)
        return converted(raw, wanted)
    except ConfigError:
        raise
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$.")
        if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
            what = f"{missing[1].replace('_', '-')!r} is missing"
        if not (key := at.removesuffix("`")):
            raise _MistakeError((), what) from None
        first = re.split(r"[.\[]", key)[0]
        raise _MistakeError((first,), f"{key}: {what}{_choice(what, wanted, key)}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Whatever it is.
        raise ConfigError(f"settings: {error or repr(error)}") from error


def converted(raw: Mapping[str, Any], wanted: Any) -> Any:
    """Settings as a `Settings` wants them. Raises ConfigError for a name that it does not know,
    ValidationError for a value."""
    if dataclasses.is_dataclass(wanted):
        known = [each.name for each in dataclasses.fields(wanted)]
    else:
        known = [each.encode_name for each in msgspec.structs.fields(wanted)]
    once(raw, "settings")
    for name in raw:
        if name.replace("-", "_") not in known:
            raise _MistakeError((name,), unknown(name, known, ""))
    return msgspec.convert({name.replace("-", "_"): each for name, each in raw.items()}, wanted)


def _choice(what: str, wanted: Any, name: str) -> str:
    """What is expected where a word is none of some, as the end of a sentence; else empty."""
    if not what.startswith("Invalid enum value"):
        return ""
    kind: Any = get_type_hints(wanted).get(name)
    words = get_args(kind) if get_origin(kind) is Literal else ()
    if isinstance(kind, type) and issubclass(kind, Enum):
        words = tuple(each.value for each in kind)
    return f", expected one of {', '.join(map(str, words))}" if words else ""


def _module(name: str, table: Any) -> tuple[ModulePlan, list[str]]:
    where: tuple[str, ...] = ("modules", name)
    try:
        checked_name(name)
        if not isinstance(table, dict):
            raise ConfigError(f"expected a table, got {table!r}")
        known = _Table.__struct_fields__
        for key in table:
            if key not in known:
                where = (*where, key)
                raise ConfigError(unknown(key, known, ""))
        try:
            meant = msgspec.convert(table, _Table)
        except msgspec.ValidationError as error:
            what, _, at = str(error).partition(" - at `$.")
            where = (*where, re.split(r"[.\[`]", at)[0]) if at else where
            raise ConfigError(what + _choice(what, _Table, where[-1])) from None
        if meant.places < 1:
            where = (*where, "places")
            raise ConfigError(f"expected 1 or more, got {meant.places}")
        where = (*where, "module")
        factory = _entry(meant.module)
        where = (*where[:2], "settings")
        settings = parse_settings(factory, meant.settings)
    except _MistakeError as mistake:
        where = (*where, *mistake.where)
        raise _MistakeError(where, f"{_dotted(where[:3])}: {mistake}") from None
    except ConfigError as error:
        raise _MistakeError(where, f"{_dotted(where)}: {error}") from None
    plan = ModulePlan(name, meant.module, settings, meant.places, meant.full, factory)
    return plan, meant.hears


class _MistakeError(ConfigError):
    """One at a known place."""

    def __init__(self, where: tuple[str, ...], sentence: str) -> None:
        super().__init__(sentence)
        self.where = where


def _dotted(where: tuple[str, ...]) -> str:
    return ".".join(where)


def _line_of(text: str, where: tuple[str, ...]) -> int | None:
    """The line where a key stands, or else the table around it. Tables that are written otherwise
    than in the examples may not be found."""
    found, best = None, 0
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]*?)\s*\]", line):
            table = tuple(part.strip(" \"'") for part in header[1].split("."))
            here = table
        elif key := re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line):
            here = (*table, *(part.strip(" \"'") for part in key[1].split(".")))
        else:
            continue
        alike = min(len(here), len(where))
        if here[:alike] == where[:alike] and alike > best:
            found, best = number, alike
    return found
