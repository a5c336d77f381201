"""Syntax trees of the package's source files, parsed once per process for all tests of sources."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "simplebus"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SOURCES_GROUP = pytest.mark.xdist_group("sources")
"""One worker runs all tests that read the nodes of all sources."""


@cache
def parse_source(path: Path) -> ast.Module:
    """Return the syntax tree of a source file."""
    gc.disable()  # Hardly any object of a tree is garbage.
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


@cache
def source_nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a source file, in the order of `ast.walk`."""
    return tuple(ast.walk(parse_source(path)))
