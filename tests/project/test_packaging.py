"""What is built and installed: the wheel, the sdist, what they ask for, what an import costs."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from tests.project.test_structure import TOP_LEVEL
from tests.support.programs import environment

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "simplebus"

EXTRA = ("simplebus/spark", "simplebus/testing")
"""What may import more than a plain installation has: its users have installed that."""
PROVIDED = {"msgspec": "msgspec", "prometheus_client": "prometheus-client", "argon2": "argon2-cffi"}
"""Distributions of modules that are not called as they are."""
OPTIONAL = {"pydantic", "google", "attrs", "attr"}
"""What types of messages may come from, if the program has it."""

BUILT = pytest.mark.xdist_group("built")
"""Tests of what one worker builds; else each of them would."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ((wheel,), (sdist,)) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def facts(built: tuple[Path, Path]) -> Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [each for each in wheel.namelist() if each.endswith(".dist-info/METADATA")]
        return message_from_string(wheel.read(name).decode())


@BUILT
def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "simplebus"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    names.add("simplebus/spark/pyspark_simplebus.py")  # It is moved to where Spark looks for it.
    assert names >= {*tracked, "pyspark_simplebus.py", "simplebus/py.typed"}
    assert {name.split("/")[0] for name in names} == {"simplebus", "pyspark_simplebus.py"}
    assert not [name for name in names if name.endswith(".pyc")]


@BUILT
def test_the_sdist_holds_what_the_top_level_does(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        top = {name.split("/")[1] for name in sdist.getnames() if "/" in name}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL | {"PKG-INFO"}


@BUILT
def test_the_licence_is_named_and_there(built: tuple[Path, Path], facts: Message) -> None:
    assert facts["License-Expression"] == "MIT"
    assert facts["License-File"] == "simplebus/LICENSE"
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [each for each in wheel.namelist() if "/licenses/" in each]
        assert wheel.read(name) == (PACKAGE / "LICENSE").read_bytes()


@BUILT
def test_a_wheel_runs_where_it_is_unpacked(built: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "simplebus", "--version"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith("simplebus 0."), done.stderr


def needs(facts: Message) -> set[str]:
    """The distributions that a plain installation pulls."""
    lines = [line for line in facts.get_all("Requires-Dist", []) if "extra ==" not in line]
    return {line.partition(">")[0].partition("[")[0].strip() for line in lines}


@BUILT
def test_an_installation_pulls_what_is_imported_and_no_more(facts: Message) -> None:
    imported: dict[str, str] = {}
    for path in PACKAGE.rglob("*.py"):
        where = str(path.relative_to(ROOT))
        if where.startswith(EXTRA):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            imported |= {name.split(".")[0]: where for name in names}
    for name in {*sys.stdlib_module_names, *OPTIONAL, "simplebus"}:
        imported.pop(name, None)
    assert {PROVIDED.get(name, name) for name in imported} == needs(facts), imported


@BUILT
def test_what_is_asked_for_is_of_versions_that_exist(facts: Message) -> None:
    for name in needs(facts):
        assert importlib.metadata.version(name)


# What an import costs -----------------------------------------------------------------------------

_COUNT = "import sys; before = set(sys.modules); import {}; print(*(set(sys.modules) - before))"


def loaded(module: str) -> set[str]:
    """What an import loads."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT.format(module)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


def test_the_package_loads_next_to_nothing_until_a_name_is_used() -> None:
    modules = loaded("simplebus")
    assert len(modules) < 50, sorted(modules)
    assert not {name for name in modules if name.startswith("simplebus.")}


def test_the_command_line_loads_nothing_that_only_a_command_needs() -> None:
    modules = {name.split(".")[0] for name in loaded("simplebus.cli")}
    heavy = {"trio", "numpy", "anyio", "asyncio", "ssl", "cryptography", "msgspec"}
    heavy |= {"h11", "prometheus_client", "argon2", "pyspark", "multiprocessing"}
    assert not modules & heavy


# Completion ---------------------------------------------------------------------------------------


def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    program = tmp_path / "simplebus"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m simplebus "$@"\n')
    program.chmod(0o755)
    script = """
    eval "$(_SIMPLEBUS_COMPLETE=source_bash simplebus)"
    complete -p simplebus
    for line in "simplebus ser" "simplebus serve --drain" "simplebus serve --full dr"; do
        COMP_WORDS=($line) COMP_CWORD=$(($(wc -w <<< "$line") - 1))
        _simplebus_completion simplebus
        echo "${COMPREPLY[@]}"
    done
    """
    path = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [
        "complete -o default -F _simplebus_completion simplebus",
        "serve",
        "--drain-timeout",
        "drop_oldest drop_newest",
    ], done.stderr


@pytest.mark.parametrize(
    ("shell", "variables", "answer"),
    [
        ("zsh", {}, '_arguments \'*: :(("serve":"Run the server."))\''),
        ("fish", {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}, "serve\tRun the server."),
    ],
)
def test_other_shells_are_answered_in_their_own_words(
    shell: str, variables: dict[str, str], answer: str
) -> None:
    def said(**more: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "simplebus"],
            cwd=ROOT,
            env=environment(**more),
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()

    script = said(_SIMPLEBUS_COMPLETE=f"source_{shell}")
    assert f"_SIMPLEBUS_COMPLETE=complete_{shell}" in script
    asked = {"_SIMPLEBUS_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "simplebus ser"}
    assert said(**asked, **variables) == answer
