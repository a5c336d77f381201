"""Imports between packages point one way, and no modules import each other in a circle.

Imports inside functions and under `TYPE_CHECKING` count like all others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.support.cases import for_each
from tests.support.sources import ROOT, SOURCES, SOURCES_GROUP, parse_source, source_nodes

pytestmark = SOURCES_GROUP

ORDER: Mapping[str, tuple[str, ...]] = {
    "simplebus": (
        *("core", "nats", "console", "logs", "storage", "net", "client", "otel", "jetstream"),
        *("monitor", "server", "bridge", "config", "memory", "gateway", "spark", "testing", "demo"),
        *("commands", "bench"),
    ),
    "simplebus.core": (
        *("channel", "protocol", "ring", "redelivery", "users", "subscription", "group"),
        *("session", "message_class", "authorization", "store", "broker"),
    ),
    "simplebus.nats": ("protocol", "client", "server", "bus"),
    "simplebus.client": ("core", "event_loop", "tracing", "aio", "blocking"),
    "simplebus.jetstream": ("publish", "cluster", "consume"),
    "simplebus.server": ("runtime", "preauth", "tls", "journal", "observability", "http"),
    "simplebus.bridge": ("source", "target"),
    "simplebus.gateway": ("modules",),
    "simplebus.spark": ("java", "json_payloads", "read", "jobs", "commands"),
    "simplebus.spark.jobs": ("report",),
    "simplebus.commands": (
        "deploy",
        "operate",
        "serve",
    ),
}
"""Sub-packages of each package: a package imports only packages that stand before it."""

Graph = dict[str, set[str]]
"""Imported modules of the project, by importing module."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def module_paths() -> Mapping[str, Path]:
    return {module_name(path): path for path in SOURCES}


def imported_modules(nodes: Iterable[ast.AST], module_names: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules among `module_names` that a source imports, wherever the import stands."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in module_names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if submodule in module_names:
                    yield submodule
                elif node.module in module_names:
                    yield node.module


@cache
def import_graph() -> Graph:
    paths = module_paths()
    return {
        name: set(imported_modules(source_nodes(path), paths)) - {name}
        for name, path in paths.items()
    }


def upward_imports(graph: Graph, order: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return, as sentences, the imports of a sub-package from a later sub-package of the order."""
    found = []
    for importing, imports in graph.items():
        for imported in imports:
            siblings = sibling_packages(importing, imported, order)
            if siblings is not None:
                parent, before, after = siblings
                if order[parent].index(before) < order[parent].index(after):
                    found.append(f"{importing} imports {imported}")
    return sorted(found)


def sibling_packages(
    importing: str, imported: str, order: Mapping[str, tuple[str, ...]]
) -> tuple[str, str, str] | None:
    """Return the common parent of two modules and the sub-packages of it that contain them.

    None if they are in the same package, or if one lies directly in the common parent.
    """
    parent = "simplebus"
    for importing_part, imported_part in zip(
        importing.split(".")[1:], imported.split(".")[1:], strict=False
    ):
        if importing_part != imported_part:
            packages = order.get(parent, ())
            return (
                (parent, importing_part, imported_part)
                if importing_part in packages and imported_part in packages
                else None
            )
        parent = f"{parent}.{importing_part}"
    return None


def import_cycles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    cycles, modules_in_cycles = [], set()
    for start in sorted(graph):
        if start in modules_in_cycles:
            continue
        reachable = reachable_from(graph, start)
        if start in reachable:
            cycle = [name for name in reachable if start in reachable_from(graph, name)]
            cycles.append(sorted(cycle))
            modules_in_cycles.update(cycle)
    return cycles


def reachable_from(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(graph.get(name, ()))
    return found


def test_the_order_lists_every_package() -> None:
    packages: dict[str, set[str]] = {}
    for name, path in module_paths().items():
        if path.name == "__init__.py" and "." in name:
            parent, _, last = name.rpartition(".")
            packages.setdefault(parent, set()).add(last)
    assert {parent: set(names) for parent, names in ORDER.items()} == packages


def test_packages_import_only_packages_before_them() -> None:
    assert upward_imports(import_graph(), ORDER) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert import_cycles(import_graph()) == []


def test_an_upward_import_and_a_cycle_are_found() -> None:
    graph = {
        "simplebus.core.ring.ring": {"simplebus.core.store.store"},
        "simplebus.core.store.store": {"simplebus.core.ring.ring"},
        "simplebus.core.errors": set(),
    }
    assert upward_imports(graph, ORDER) == [
        "simplebus.core.ring.ring imports simplebus.core.store.store"
    ]
    assert import_cycles(graph) == [["simplebus.core.ring.ring", "simplebus.core.store.store"]]


def test_imports_in_functions_and_for_types_are_found() -> None:
    source = (
        "if TYPE_CHECKING:\n    from simplebus.core.errors import BusError\n"
        "def run():\n    import simplebus.core.limits\n    from simplebus.core import settings\n"
    )
    assert set(imported_modules(ast.walk(ast.parse(source)), module_paths())) == {
        "simplebus.core.errors",
        "simplebus.core.limits",
        "simplebus.core.settings",
    }


def packages() -> list[str]:
    return [name for name, path in module_paths().items() if path.name == "__init__.py"]


@for_each("package", {name: name for name in packages()})
def test_a_package_docstring_lists_its_modules(package: str) -> None:
    text = ast.get_docstring(parse_source(module_paths()[package])) or ""
    words = set(
        text.replace("/", " ").replace(",", " ").replace("`", " ").replace(":", " ").split()
    )
    children = {
        name.rpartition(".")[2] for name in module_paths() if name.rpartition(".")[0] == package
    }
    missing = {name for name in children if not name.startswith("__")} - words
    assert not missing, f"the docstring of {package} does not list {sorted(missing)}"


@for_each("package", {name: name for name in packages()})
def test_a_package_has_few_enough_modules_to_overlook(package: str) -> None:
    modules = [
        name
        for name, path in module_paths().items()
        if name.rpartition(".")[0] == package and path.name not in ("__init__.py", "__main__.py")
    ]
    assert len(modules) <= 15, f"{package} has {len(modules)} modules: make it two packages"
