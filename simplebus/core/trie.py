"""A dict of patterns that can be asked which of them match a name.

Rule 1: what it finds is what `channels.matches` says of each pattern; it only finds it sooner.
Rule 2: nothing here walks by recursion, and memory is in proportion to the patterns' text: one of
1,000 segments takes as many nodes as one of two.

A node holds the segments at which no two patterns part. Below it are the literals that come next,
and the three wildcards have slots of their own. `a.*.c`, `a.b.>` and `a.b.x.#` are

    root ── a ──┬── literals: b ──┬── some: a.b.>
                │                 └── literals: x ── rest: a.b.x.#
                └── one: *.c ── here: a.*.c
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from simplebus.core.channels import ONE, REST, SOME, split

# Segments that nodes share while they last, so that a frequent one is stored a few times only.
# Python's own table of such strings keeps them for ever (3.12).
_SHARED_MAX = 4096

V = TypeVar("V")

_SLOTS = {REST: "rest", SOME: "some"}


class Node(Generic[V]):
    """Some segments of the patterns below, and the values of those that end here.

    Invariant: every node but the root has a value, or at least two children.
    """

    __slots__ = ("here", "literals", "one", "path", "rest", "some")

    def __init__(self, path: tuple[str, ...]) -> None:
        self.path = path
        """The segments that lead here from the parent. Empty in the root alone."""
        self.here: V | None = None
        """Of the pattern that ends here."""
        self.rest: V | None = None
        """Of the pattern that goes on with `#`."""
        self.some: V | None = None
        """Of the pattern that goes on with `>`."""
        self.one: Node[V] | None = None
        """Where `*` comes next."""
        self.literals: dict[str, Node[V]] | None = None
        """Where anything else comes next, by it. None when nothing does."""

    @property
    def values(self) -> list[V]:
        return [value for value in (self.here, self.rest, self.some) if value is not None]

    @property
    def children(self) -> list[Node[V]]:
        found = list(self.literals.values()) if self.literals else []
        return found if self.one is None else [*found, self.one]

    def child(self, segment: str) -> Node[V] | None:
        if segment == ONE:
            return self.one
        return self.literals.get(segment) if self.literals else None

    def adopt(self, child: Node[V]) -> None:
        """Take a child, in place of the one that begins with the same segment."""
        if child.path[0] == ONE:
            self.one = child
        elif self.literals is None:
            self.literals = {child.path[0]: child}
        else:
            self.literals[child.path[0]] = child

    def drop(self, child: Node[V]) -> None:
        """Lose a child."""
        if child is self.one:
            self.one = None
        else:
            assert self.literals is not None
            del self.literals[child.path[0]]
            self.literals = self.literals or None

    def part(self, child: Node[V], count: int) -> Node[V]:
        """Put a new node behind the first segments of a child's path."""
        between = Node[V](child.path[:count])
        child.path = child.path[count:]
        between.adopt(child)
        self.adopt(between)
        return between

    def is_needed(self) -> bool:
        """Whether it has values, or more than one child."""
        if self.here is not None or self.rest is not None or self.some is not None:
            return True
        return (self.one is not None) + len(self.literals or ()) > 1


class Trie(Generic[V]):
    """One value for each legal pattern, never None."""

    def __init__(self) -> None:
        self._root = Node[V](())
        self._shared: dict[str, str] = {}

    def get(self, pattern: str) -> V | None:
        """The value of this very pattern, or None."""
        steps, slot = _steps(pattern)
        trail = self._trail(steps)
        value: V | None = getattr(trail[-1], slot) if trail else None
        return value

    def __setitem__(self, pattern: str, value: V) -> None:
        steps, slot = _steps(pattern)
        setattr(self._grow(steps), slot, value)

    def __delitem__(self, pattern: str) -> None:
        steps, slot = _steps(pattern)
        trail = self._trail(steps)
        if not trail or getattr(trail[-1], slot) is None:
            raise KeyError(pattern)
        setattr(trail[-1], slot, None)
        self._prune(trail)

    def matching(self, segments: list[str]) -> list[V]:
        """The values of all patterns that match the name of these segments, in no order."""
        found: list[V] = []
        count = len(segments)
        todo = [(self._root, 0)]
        while todo:
            node, at = todo.pop()
            if node.rest is not None:
                found.append(node.rest)
            if at == count:
                if node.here is not None:
                    found.append(node.here)
                continue
            if node.some is not None:
                found.append(node.some)
            if node.literals is not None:
                child = node.literals.get(segments[at])
                if child is not None and _fits(child.path, segments, at):
                    todo.append((child, at + len(child.path)))
            child = node.one
            if child is not None and _fits(child.path, segments, at):
                todo.append((child, at + len(child.path)))
        return found

    def nodes(self) -> Iterator[Node[V]]:
        """The root and all other nodes."""
        todo = [self._root]
        while todo:
            node = todo.pop()
            todo += node.children
            yield node

    def check(self) -> None:
        """Raise AssertionError unless the invariant holds."""
        for node in self.nodes():
            assert (node is self._root) == (not node.path), node.path
            assert node is self._root or node.is_needed(), f"the node {node.path} is needless"
            for child in node.children:
                assert node.child(child.path[0]) is child, f"{child.path} is in the wrong place"

    def _grow(self, steps: list[str]) -> Node[V]:
        """The node that these segments lead to, made where there is none."""
        node, at = self._root, 0
        while at < len(steps):
            child = node.child(steps[at])
            if child is None:
                child = Node[V](tuple([self._share(step) for step in steps[at:]]))
                node.adopt(child)
                return child
            common = _common(child.path, steps, at)
            if common < len(child.path):
                child = node.part(child, common)
            node = child
            at += common
        return node

    def _trail(self, steps: list[str]) -> list[Node[V]]:
        """The nodes from the root to where these segments lead, or none at all."""
        trail = [self._root]
        at = 0
        while at < len(steps):
            child = trail[-1].child(steps[at])
            if child is None or _common(child.path, steps, at) < len(child.path):
                return []
            trail.append(child)
            at += len(child.path)
        return trail

    def _prune(self, trail: list[Node[V]]) -> None:
        """Take out the last node of the trail unless it is needed; then its parent likewise."""
        while len(trail) > 1 and not trail[-1].is_needed():
            node = trail.pop()
            children = node.children
            if children:
                (child,) = children
                child.path = node.path + child.path
                trail[-1].adopt(child)
                return
            trail[-1].drop(node)

    def _share(self, segment: str) -> str:
        if len(self._shared) >= _SHARED_MAX:
            self._shared.clear()
        return self._shared.setdefault(segment, segment)


def _steps(pattern: str) -> tuple[list[str], str]:
    """The segments that lead to a pattern's node, and the slot there that its value is in."""
    steps = split(pattern)
    slot = _SLOTS.get(steps[-1], "here")
    if slot != "here":
        steps.pop()
    return steps, slot


def _common(path: tuple[str, ...], steps: list[str], at: int) -> int:
    """How many segments of the path are those of the steps from `at` on."""
    ahead = steps[at : at + len(path)]
    for count, (segment, step) in enumerate(zip(path, ahead, strict=False)):
        if segment != step:
            return count
    return len(ahead)


def _fits(path: tuple[str, ...], segments: list[str], at: int) -> bool:
    """Whether the segments from `at` on go along the path, whose first step they are known to."""
    if len(path) == 1:
        return True
    ahead = segments[at : at + len(path)]
    for step, segment in zip(path, ahead, strict=False):
        if step not in (segment, ONE):
            return False
    return len(ahead) == len(path)
