"""Structure and style of the project: purity, docstrings, public names, lint and types."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.cache_folder import cache_folder
from tests.support.sources import (
    PACKAGE,
    ROOT,
    SOURCES,
    SOURCES_GROUP,
    parse_source,
    source_nodes,
)

PURE_SOURCES = sorted(
    path
    for package in ("core", "nats", "monitor", "client/core")
    for path in (PACKAGE / package).rglob("*.py")
)
"""Modules that do no I/O, read no clock and start no thread."""

IMPURE_MODULES = {
    "anyio",
    "asyncio",
    "logging",
    "os",
    "random",
    "select",
    "socket",
    "ssl",
    "threading",
    "time",
    "trio",
}
TOP_LEVEL = {"pyproject.toml", "simplebus", "protocol", "tests", "load", "README.md", "rps.png"}


class ModuleFacts(NamedTuple):
    """Facts about one source file."""

    docstring: str | None
    imports: frozenset[str]
    """Dotted names of all imported modules, wherever the import stands."""
    async_functions: list[str]
    public_classes: list[str]
    undocumented_classes: list[str]
    """Public classes without a docstring."""


@cache
def module_facts(path: Path) -> ModuleFacts:
    """Return the facts of a source file."""
    tree = parse_source(path)
    imports, async_functions, undocumented = set(), [], []
    for node in source_nodes(path):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            imports.add(node.module or "")
            imports |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.AsyncFunctionDef):
            async_functions.append(node.name)
        elif (
            isinstance(node, ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ):
            undocumented.append(node.name)
    public_classes = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    docstring = ast.get_docstring(tree)
    return ModuleFacts(docstring, frozenset(imports), async_functions, public_classes, undocumented)


@SOURCES_GROUP
def test_pure_packages_import_no_io_clock_or_thread() -> None:
    assert {path.parent.name for path in PURE_SOURCES} >= {"ring", "protocol", "bus", "core"}
    for path in PURE_SOURCES:
        impure = {name.split(".")[0] for name in module_facts(path).imports} & IMPURE_MODULES
        assert not impure, f"{path.relative_to(ROOT)} imports {impure}"
        assert not module_facts(path).async_functions, f"{path.relative_to(ROOT)} is asynchronous"


def test_an_import_inside_a_function_is_found(tmp_path: Path) -> None:
    impure = tmp_path / "impure.py"
    impure.write_text("def now():\n    import time\n    return time.time()\n")
    assert module_facts(impure).imports & IMPURE_MODULES == {"time"}


def test_the_package_root_holds_only_the_public_names_and_the_command_line() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "cli.py"}


@SOURCES_GROUP
def test_a_public_class_name_exists_once() -> None:
    modules = defaultdict(list)
    for path in SOURCES:
        for name in module_facts(path).public_classes:
            modules[name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


def test_public_names_are_imported_lazily() -> None:
    import simplebus

    assert sorted(simplebus._MODULES) == list(simplebus.__all__)  # type: ignore[attr-defined]
    assert set(simplebus.__all__) <= set(dir(simplebus))
    with pytest.raises(AttributeError, match="'simplebus' has no attribute 'conect'"):
        _ = simplebus.conect  # type: ignore[attr-defined]


def test_a_server_does_not_load_the_client() -> None:
    code = (
        "import sys, simplebus.cli, simplebus.server.run; "
        "sys.exit(any(m.startswith(('simplebus.client', 'anyio')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_importing_simplebus_does_not_bring_the_server() -> None:
    code = "import sys, simplebus; sys.exit('simplebus.server' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_importing_simplebus_does_not_bring_spark() -> None:
    code = (
        "import sys, simplebus, simplebus.spark.options, simplebus.spark.read.planner; "
        "sys.exit(bool({'pyspark', 'pyarrow', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@SOURCES_GROUP
def test_every_module_has_a_docstring_and_lazy_annotations() -> None:
    for path in SOURCES:
        text, relative_path = path.read_text(), path.relative_to(ROOT)
        assert module_facts(path).docstring, f"{relative_path} has no docstring"
        if path.name not in ("__init__.py", "__main__.py"):
            assert "from __future__ import annotations" in text, (
                f"{relative_path} evaluates annotations"
            )


@SOURCES_GROUP
def test_public_classes_have_docstrings() -> None:
    for path in SOURCES:
        undocumented = module_facts(path).undocumented_classes
        assert not undocumented, f"{path.relative_to(ROOT)}: {undocumented} have no docstring"


def test_public_names_are_documented_and_sorted() -> None:
    import simplebus

    assert list(simplebus.__all__) == sorted(simplebus.__all__)
    for name in simplebus.__all__:
        assert getattr(simplebus, name).__doc__, f"simplebus.{name} has no docstring"


def test_the_top_level_holds_only_the_listed_files() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    top = {name.split("/")[0] for name in listed}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_ruff_finds_nothing() -> None:
    for arguments in (["check"], ["format", "--check"]):
        ruff = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "."],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ruff.returncode == 0, ruff.stdout + ruff.stderr


@pytest.mark.early
def test_mypy_finds_nothing_and_infers_the_types_of_the_examples() -> None:
    """The examples contain mistakes that mypy must report. One run, because a run is slow."""
    examples = ("tests/client/bus_example.py", "tests/client/typed_example.py")
    assert all((ROOT / example).is_file() for example in examples)
    # mypy compares hashes of sources, so that all checkouts can share a cache.
    mypy_cache = str(cache_folder() / "mypy")
    options = () if (ROOT / ".mypy_cache").exists() else ("--cache-dir", mypy_cache)
    mypy = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "simplebus", *examples],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert mypy.returncode == 0, mypy.stdout + mypy.stderr
