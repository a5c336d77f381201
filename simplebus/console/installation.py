"""Installed distribution of simplebus: its version, and conflicts with another package."""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path

DISTRIBUTION = "simplebus-broker"
"""Name of the distribution on PyPI, where `simplebus` is an unrelated project."""


def install_command(extra: str = "") -> str:
    """Return the command that installs simplebus in a clone of its repository.

    Args:
        extra: Group of optional dependencies, such as `spark`; empty for none.
    """
    return f'pip install ".[{extra}]"' if extra else "pip install ."


def installed_version() -> str | None:
    """Return the installed version; None if simplebus runs from its source tree."""
    found = _find(DISTRIBUTION)
    return None if found is None else found.version


def find_source_tree() -> Path | None:
    """Return the source tree that simplebus runs from; None if it runs from an installed copy.

    An editable installation runs from its source tree.
    """
    package = Path(str(files("simplebus"))).resolve()
    found = _find(DISTRIBUTION)
    if found is not None and Path(str(found.locate_file("simplebus"))).resolve() == package:
        return None
    return package.parent


def find_conflict() -> str | None:
    """Return what to do if PyPI's unrelated package `simplebus` is installed, otherwise None.

    Both packages install files into the folder `simplebus`, so that one of them is broken.
    """
    package = _find("simplebus")
    if package is None or package.entry_points.select(name="simplebus", value="simplebus.cli:main"):
        return None
    return (
        f"the unrelated package 'simplebus' {package.version} is installed in this environment "
        f"and shares files with {DISTRIBUTION}; in a clone of its repository, run: "
        f"pip uninstall -y simplebus && {install_command()} --force-reinstall"
    )


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
