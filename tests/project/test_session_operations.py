"""Only the session package assigns to attributes of sessions; other code calls their methods."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.project.test_structure import module_facts
from tests.support.sources import PACKAGE, SOURCES, SOURCES_GROUP, source_nodes

OWNER = PACKAGE / "core" / "session"
SESSION_NAMES = frozenset({"session", "_session", "local_session"})
NATS_NAMES = frozenset({"local_session"})
"""The same in modules of the NATS server, where `session` is a `NatsSession`."""


def names_of_sessions(path: Path) -> frozenset[str]:
    """Return the names that variables with a session have in a module."""
    is_nats = path.is_relative_to(PACKAGE / "nats") or (
        "simplebus.nats.server.session.NatsSession" in module_facts(path).imports
    )
    return NATS_NAMES if is_nats else SESSION_NAMES


def session_assignments(
    nodes: Iterable[ast.AST], names: frozenset[str] = SESSION_NAMES
) -> list[str]:
    """Return the attributes of sessions, or of their parts, that a source assigns to."""
    return sorted(
        ast.unparse(target)
        for node in nodes
        for target in assigned_targets(node)
        if isinstance(target, ast.Attribute) and is_part_of_session(target.value, names)
    )


def assigned_targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the targets of an assignment, those inside tuples one by one."""
    waiting: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        waiting = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor | ast.NamedExpr):
        waiting = [node.target]
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def is_part_of_session(expression: ast.expr, names: frozenset[str]) -> bool:
    """Return True for a session, as a variable or as an attribute, and for attributes of it."""
    while isinstance(expression, ast.Attribute):
        if expression.attr in names:
            return True
        expression = expression.value
    return isinstance(expression, ast.Name) and expression.id in names


@SOURCES_GROUP
def test_only_the_session_package_assigns_to_attributes_of_sessions() -> None:
    found = {
        str(path.relative_to(PACKAGE)): assignments
        for path in SOURCES
        if not path.is_relative_to(OWNER)
        if (assignments := session_assignments(source_nodes(path), names_of_sessions(path)))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("statement", "target"),
    [
        ("session.peer = 'x'", "session.peer"),
        ("self.session.peer = 'x'", "self.session.peer"),
        ("self._session.count += 1", "self._session.count"),
        ("first, (session.peer, last) = found", "session.peer"),
        ("session.receiver.frame_bytes_max = 1", "session.receiver.frame_bytes_max"),
        ("session.count: int = 1", "session.count"),
    ],
)
def test_an_assignment_to_an_attribute_of_a_session_is_found(statement: str, target: str) -> None:
    assert session_assignments(ast.walk(ast.parse(statement))) == [target]


@pytest.mark.parametrize(
    "statement", ["session = open()", "self.session = session", "peer = session.peer"]
)
def test_other_assignments_are_not_found(statement: str) -> None:
    assert session_assignments(ast.walk(ast.parse(statement))) == []
