"""Tests of the wheel and the sdist: contents, dependencies, modules that an import loads."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.project.test_structure import TOP_LEVEL
from tests.support.programs import environment
from tests.support.sources import PACKAGE, ROOT, SOURCES, SOURCES_GROUP, source_nodes

PACKAGES_WITH_EXTRAS = ("simplebus/otel", "simplebus/spark", "simplebus/testing")
"""Packages that may import more than a plain installation has."""
DISTRIBUTION_BY_MODULE = {
    "msgspec": "msgspec",
    "prometheus_client": "prometheus-client",
    "argon2": "argon2-cffi",
}
"""Distribution of each third-party module."""
MESSAGE_TYPE_MODULES = {"pydantic", "google", "attrs", "attr"}
"""Modules of message types; used only if the program has imported them."""

ONE_WORKER = SOURCES_GROUP
"""The distributions are built once."""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the wheel and the sdist. Returns their paths."""
    folder = tmp_path_factory.mktemp("dist")
    process = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    ((wheel,), (sdist,)) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def wheel_metadata(distributions: tuple[Path, Path]) -> Message:
    """Return the metadata of the wheel."""
    with zipfile.ZipFile(distributions[0]) as wheel:
        (name,) = [each for each in wheel.namelist() if each.endswith(".dist-info/METADATA")]
        return message_from_string(wheel.read(name).decode())


@ONE_WORKER
def test_wheel_contains_only_the_package(distributions: tuple[Path, Path]) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "simplebus"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    with zipfile.ZipFile(distributions[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    names.add("simplebus/spark/pyspark_simplebus.py")  # Spark finds it at the top level.
    assert names >= {*tracked, "pyspark_simplebus.py", "simplebus/py.typed"}
    assert {name.split("/")[0] for name in names} == {"simplebus", "pyspark_simplebus.py"}
    assert not [name for name in names if name.endswith(".pyc")]


@ONE_WORKER
def test_sdist_contains_the_top_level_files(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[1]) as sdist:
        top = {name.split("/")[1] for name in sdist.getnames() if "/" in name}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL | {"PKG-INFO"}


@ONE_WORKER
def test_wheel_contains_the_licence(
    distributions: tuple[Path, Path], wheel_metadata: Message
) -> None:
    assert wheel_metadata["License-Expression"] == "MIT"
    assert wheel_metadata["License-File"] == "simplebus/LICENSE"
    with zipfile.ZipFile(distributions[0]) as wheel:
        (name,) = [each for each in wheel.namelist() if "/licenses/" in each]
        assert wheel.read(name) == (PACKAGE / "LICENSE").read_bytes()


@ONE_WORKER
def test_unpacked_wheel_runs(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(distributions[0]) as wheel:
        wheel.extractall(tmp_path)
    process = subprocess.run(
        [sys.executable, "-P", "-m", "simplebus", "--version"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.stdout.startswith("simplebus 0."), process.stderr


def required_distributions(wheel_metadata: Message) -> set[str]:
    """Return the distributions that an installation without extras requires."""
    lines = [line for line in wheel_metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    return {line.partition(">")[0].partition("[")[0].strip() for line in lines}


@ONE_WORKER
def test_required_distributions_are_those_imported(wheel_metadata: Message) -> None:
    imported: dict[str, str] = {}
    for path in SOURCES:
        relative_path = str(path.relative_to(ROOT))
        if relative_path.startswith(PACKAGES_WITH_EXTRAS):
            continue
        for node in source_nodes(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            imported |= {name.split(".")[0]: relative_path for name in names}
    for name in {*sys.stdlib_module_names, *MESSAGE_TYPE_MODULES, "simplebus"}:
        imported.pop(name, None)
    assert {DISTRIBUTION_BY_MODULE.get(name, name) for name in imported} == required_distributions(
        wheel_metadata
    ), imported


@ONE_WORKER
def test_required_distributions_are_installed(wheel_metadata: Message) -> None:
    for name in required_distributions(wheel_metadata):
        assert importlib.metadata.version(name)


# Imports ------------------------------------------------------------------------------------------

_PRINT_MODULES = (
    "import sys; before = set(sys.modules); import {}; print(*(set(sys.modules) - before))"
)


def loaded_modules(module: str) -> set[str]:
    """Return the modules that an import loads."""
    process = subprocess.run(
        [sys.executable, "-c", _PRINT_MODULES.format(module)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(process.stdout.split())


def test_import_of_the_package_loads_no_submodule() -> None:
    modules = loaded_modules("simplebus")
    assert len(modules) < 50, sorted(modules)
    assert not {name for name in modules if name.startswith("simplebus.")}


def test_command_line_loads_no_heavy_module() -> None:
    modules = {name.split(".")[0] for name in loaded_modules("simplebus.cli")}
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
    process = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.stdout.splitlines() == [
        "complete -o default -F _simplebus_completion simplebus",
        "serve",
        "--drain-timeout",
        "drop_oldest drop_newest",
    ], process.stderr


@pytest.mark.parametrize(
    ("shell", "variables", "completion"),
    [
        ("zsh", {}, '_arguments \'*: :(("serve":"Run the server."))\''),
        ("fish", {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}, "serve\tRun the server."),
    ],
)
def test_zsh_and_fish_complete_commands(
    shell: str, variables: dict[str, str], completion: str
) -> None:
    def run_completion(**more: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "simplebus"],
            cwd=ROOT,
            env=environment(**more),
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()

    script = run_completion(_SIMPLEBUS_COMPLETE=f"source_{shell}")
    assert f"_SIMPLEBUS_COMPLETE=complete_{shell}" in script
    request = {"_SIMPLEBUS_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "simplebus ser"}
    assert run_completion(**request, **variables) == completion


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-lowest.txt"])
def test_locked_packages_have_hashes_and_satisfy_the_requirements(name: str) -> None:
    text = (ROOT / ".ci" / name).read_text().replace("\\\n", " ")
    locked: dict[str, Version] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        pin, *hashes = line.split(" --hash=sha256:")
        assert hashes, f"{line}: expected hashes; run .ci/lock"
        requirement = Requirement(pin.strip())
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        locked[canonicalize_name(requirement.name)] = Version(specifier.version)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for dependency in (*project["dependencies"], *extras["dev"], *extras["spark"]):
        requirement = Requirement(dependency)
        if requirement.name == project["name"]:
            continue
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{dependency} is not in .ci/{name}; run .ci/lock"
        assert version in requirement.specifier, (
            f"{dependency}: .ci/{name} has {version}; run .ci/lock"
        )
