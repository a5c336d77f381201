"""Style is a test: layers, sizes, exports, words, lint and types."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.cache_folder import cache_folder

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "simplebus"
SOURCES = sorted(PACKAGE.rglob("*.py"))
CORE = sorted(
    path
    for part in ("core", "nats", "monitor", "client/core")
    for path in (PACKAGE / part).rglob("*.py")
)

BANNED_IN_CORE = {
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
LAYERS = {
    # Each folder, and what of simplebus it may import.
    "core": {"core"},
    "nats": {"core", "nats"},
    "storage": {"core", "storage"},
    "net": {"core", "nats", "net"},
    "jetstream": {"core", "jetstream", "nats", "net"},
    "monitor": {"core", "monitor", "nats"},
    "server": {"console", "core", "jetstream", "monitor", "nats", "net", "server", "storage"},
    "client": {"client", "core", "net"},
    "gateway": {"bridge", "client", "config", "core", "gateway", "memory", "monitor", "net"},
}
TOP_LEVEL = {"pyproject.toml", "simplebus", "protocol", "tests", "load", "README.md", "rps.png"}

READ = pytest.mark.xdist_group("sources")
"""Tests of what one worker reads; else each of them would."""


class Facts(NamedTuple):
    """What is asked of a file here."""

    law: str | None
    imports: frozenset[str]
    """The dotted modules that it imports anywhere."""
    waits: list[str]
    """Its async functions."""
    unsaid: list[str]
    """Public classes that say nothing of themselves."""


@cache
def facts(path: Path) -> Facts:
    """Of a file, which is read once."""
    tree = ast.parse(path.read_text())
    found, waits, unsaid = set(), [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.AsyncFunctionDef):
            waits.append(node.name)
        elif (
            isinstance(node, ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ):
            unsaid.append(node.name)
    return Facts(ast.get_docstring(tree), frozenset(found), waits, unsaid)


@READ
def test_the_core_touches_nothing_outside_itself() -> None:
    for path in CORE:
        touched = {name.split(".")[0] for name in facts(path).imports} & BANNED_IN_CORE
        assert not touched, f"{path.relative_to(ROOT)} imports {touched}"
        assert not facts(path).waits, f"{path.relative_to(ROOT)} has async functions"


def test_a_file_that_reads_the_clock_would_be_noticed(tmp_path: Path) -> None:
    impure = tmp_path / "impure.py"
    impure.write_text("def now():\n    import time\n    return time.time()\n")
    assert facts(impure).imports & BANNED_IN_CORE == {"time"}


@pytest.mark.parametrize("layer", LAYERS)
@READ
def test_a_layer_imports_only_what_lies_below_it(layer: str) -> None:
    for path in sorted((PACKAGE / layer).rglob("*.py")):
        inner = {
            name.split(".")[1] for name in facts(path).imports if name.startswith("simplebus.")
        }
        assert inner <= LAYERS[layer], f"{path.relative_to(ROOT)} imports {inner - LAYERS[layer]}"


def test_every_public_name_is_loaded_from_where_it_is() -> None:
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


@READ
def test_each_file_says_what_it_is() -> None:
    for path in SOURCES:
        text, where = path.read_text(), path.relative_to(ROOT)
        assert facts(path).law, f"{where} does not say what it is"
        if path.name not in ("__init__.py", "__main__.py"):
            assert "from __future__ import annotations" in text, f"{where} reads annotations"


@READ
def test_public_things_are_documented() -> None:
    for path in SOURCES:
        assert not facts(path).unsaid, f"{path.name}: {facts(path).unsaid} have no docstring"


def test_every_public_name_exists_and_is_sorted() -> None:
    import simplebus

    assert list(simplebus.__all__) == sorted(simplebus.__all__)
    for name in simplebus.__all__:
        assert getattr(simplebus, name).__doc__, f"simplebus.{name} is not documented"


def test_the_top_level_holds_what_it_should() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    top = {name.split("/")[0] for name in listed}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_ruff_finds_nothing() -> None:
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_mypy_finds_nothing_and_knows_what_programs_are_given() -> None:
    """The examples are programs, with the mistakes that it must find: in one run, a long one."""
    examples = ("tests/client/bus_example.py", "tests/client/typed_example.py")
    assert all((ROOT / example).is_file() for example in examples)
    # To write down what it has found takes a fifth of its time, and saves the next run nearly all.
    kept = hashlib.sha256(os.fsencode(ROOT)).hexdigest()[:16]
    where = os.devnull if os.environ.get("CI") else str(place() / "mypy" / kept)
    keeps = () if (ROOT / ".mypy_cache").exists() else ("--cache-dir", where)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *keeps, "simplebus", *examples],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
