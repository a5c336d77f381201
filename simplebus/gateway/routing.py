"""Who is on a bus, who hears whom, and which messages wait for room: all that its lock guards.

Rule 1: nothing here waits, and no module's code runs here.
Rule 2: a message goes into all mailboxes of its route at once, or it waits outside. So all modules
hear all messages in one order.
Rule 3: what waits outside comes in once each mailbox that was full has had room, those that came
first, first: not only when all have at once, which may never be. So a queue is longer than its
places by what comes in late: one message of each publisher that waits, at most.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TypeVar

from simplebus.gateway.blocking import TaskGate, ThreadGate
from simplebus.gateway.errors import ModuleBusError, ModuleBusFullError, invalid
from simplebus.gateway.mailbox import Mailbox
from simplebus.gateway.messages import ModuleMessage

Gate = ThreadGate | TaskGate
G = TypeVar("G", ThreadGate, TaskGate)


class Outside:
    """A message that waits for room, and its publisher."""

    __slots__ = ("awaited", "boxes", "gate", "message", "missing")

    def __init__(self, message: ModuleMessage, boxes: tuple[Mailbox, ...], gate: Gate) -> None:
        self.message = message
        self.boxes = boxes
        """Who is to hear it. Those that are removed meanwhile are not."""
        self.gate = gate
        self.awaited = tuple(box for box in boxes if box.room <= 0 and box.blocks)
        """Whom it waits for,"""
        self.missing = set(self.awaited)
        """and those of them that have not had room since."""


class Switchboard:
    """What the lock of a bus guards. Whoever calls a method holds it, unless it says otherwise."""

    def __init__(self, url: str) -> None:
        self.lock = threading.Lock()
        self.url = url
        self.references = 1
        self.boxes: dict[int, Mailbox] = {}
        """Those of the modules, by identity, in the order in which they came."""
        self._leaving: dict[int, Mailbox] = {}
        """Those of modules that were removed in a callback which goes on, the last one of each."""
        self.routes: dict[int, tuple[Mailbox, ...]] = {}
        """Who hears a module that is on the bus, or nobody's messages, as far as found out,"""
        self.alone: dict[int, Mailbox] = {}
        """and of those, who is the only one."""
        self.published = 0
        self.malformed = 0
        self.lost = 0
        """Messages that were given up with modules that have ended."""
        self._outside: deque[Outside] = deque()
        self._quiet: list[Gate] = []
        """Who waits until no module has anything to do."""

    def check(self) -> None:
        """Raise ModuleBusError if the bus is freed."""
        if self.references == 0:
            raise ModuleBusError(f"{self.url} is freed: its last reference was given back")

    # Modules -------------------------------------------------------------------------------------

    def attach(self, box: Mailbox) -> None:
        self.check()
        if id(box.module) in self.boxes:
            raise invalid(f"module {box.name} is on the bus already")
        self.boxes[id(box.module)] = box
        if (former := self._leaving.get(id(box.module))) is not None:
            box.come_behind(former)
        self.reroute()

    def find(self, module: object) -> Mailbox:
        """The mailbox of a module. Raises ModuleBusError."""
        self.check()
        box = self.boxes.get(id(module))
        if box is None:
            raise ModuleBusError(f"module {self.name(module)} is not on the bus")
        return box

    def detach(self, box: Mailbox) -> None:
        """The module hears no more, and is heard by those alone that hear everyone."""
        del self.boxes[id(box.module)]
        self._leaving[id(box.module)] = box
        for other in self.boxes.values():
            other.sources.pop(id(box.module), None)
        self.reroute()
        box.close()
        self.let_in(box)

    def ended(self, box: Mailbox, lost: int) -> None:
        """A worker has ended, with so many messages in its hands. Takes the lock."""
        with self.lock:
            if self.boxes.get(id(box.module)) is box:
                self.detach(box)
            box.is_ended = True
            if self._leaving.get(id(box.module)) is box:
                del self._leaving[id(box.module)]
            self.lost += box.lost + lost
            for gate in box.ends:
                gate.open()
            box.ends.clear()
            self.fell_idle(box)

    def gate_of_end(self, box: Mailbox, make: type[G]) -> G | None:
        """One that opens when the worker has ended; None if it has. Takes the lock."""
        with self.lock:
            if box.is_ended:
                return None
            gate = make()
            box.ends.append(gate)
        return gate

    def withdraw(self, gates: list[Gate], gate: Gate) -> bool:
        """Whether a gate was closed still, which nobody opens now. Takes the lock."""
        with self.lock:
            if gate in gates:
                gates.remove(gate)
                return True
        return False

    def name(self, module: object | None) -> str:
        """What a source is called in texts, without a call of its code: that may want the lock."""
        if module is None:
            return "everyone else"
        box = self.boxes.get(id(module))
        return object.__repr__(module) if box is None else box.name

    # Links ---------------------------------------------------------------------------------------

    def link(self, source: object | None, sink: object) -> None:
        box = self.find(sink)
        if source is None:
            there, box.hears_all = box.hears_all, True
        else:
            self.find(source)
            there = id(source) in box.sources
            box.sources[id(source)] = source
        if there:
            raise invalid(f"module {box.name} hears {self.name(source)} already")
        self.reroute()

    def unlink(self, source: object | None, sink: object) -> None:
        box = self.find(sink)
        if source is None:
            there, box.hears_all = box.hears_all, False
        else:
            there = box.sources.pop(id(source), None) is not None
        if not there:
            raise ModuleBusError(f"module {box.name} does not hear {self.name(source)}")
        self.reroute()

    def reroute(self) -> None:
        """Who hears whom has changed."""
        self.routes.clear()
        self.alone.clear()

    def route(self, source: object | None) -> tuple[Mailbox, ...]:
        """Who hears it. Who is not on the bus is heard as nobody is: by those who hear everyone."""
        self.check()
        key = id(source) if id(source) in self.boxes else id(None)
        boxes = self.routes.get(key)
        if boxes is None:
            boxes = self.routes[key] = tuple(
                box
                for box in self.boxes.values()
                if (box.hears_all and id(box.module) != key) or key in box.sources
            )
            if len(boxes) == 1:
                self.alone[key] = boxes[0]
        return boxes

    # Messages ------------------------------------------------------------------------------------

    def give(self, message: ModuleMessage, source: object | None) -> bool:
        """Give it to all who hear its source, if none of them has its publisher wait. Takes the
        lock."""
        with self.lock:
            box = self.alone.get(id(source))
            if box is not None and box.room > 0:  # What `takes` does, for most messages.
                box.queue.append(message)
                box.room -= message.places
                if box.wake is not None:
                    box.rouse()
                self.published += 1
                return True
            return self.takes(message, self.route(source))

    def takes(self, message: ModuleMessage, boxes: tuple[Mailbox, ...]) -> bool:
        """Give it to all of them, if none of them has its publisher wait."""
        for box in boxes:
            if box.room <= 0 and box.blocks:
                return False
        self._put(message, boxes)
        return True

    def _put(self, message: ModuleMessage, boxes: tuple[Mailbox, ...]) -> None:
        for box in boxes:
            if box.room > 0 or box.blocks or box.make_room():
                box.queue.append(message)
                box.room -= message.places
                if box.wake is not None:
                    box.rouse()
        self.published += 1

    def wait_outside(
        self, message: ModuleMessage, boxes: tuple[Mailbox, ...], gate: Gate
    ) -> Outside:
        """Have it wait for room."""
        outside = Outside(message, boxes, gate)
        self._outside.append(outside)
        return outside

    def go_away(self, outside: Outside) -> bool:
        """Whether it was outside still, and now never comes in. Takes the lock."""
        with self.lock:
            if outside in self._outside:
                self._outside.remove(outside)
                return True
        return False

    def let_in(self, box: Mailbox) -> None:
        """There is room in it, or it is closed."""
        if self._outside:
            left: deque[Outside] = deque()
            for outside in self._outside:
                if box.room > 0 or box.is_closed:
                    outside.missing.discard(box)
                if outside.missing:
                    left.append(outside)
                else:
                    self._put(outside.message, outside.boxes)
                    outside.gate.open()
            self._outside = left

    def all_boxes(self) -> tuple[Mailbox, ...]:
        """Those of all modules. Takes the lock."""
        with self.lock:
            return tuple(self.boxes.values())

    @property
    def waiting(self) -> int:
        """How many messages wait outside."""
        return len(self._outside)

    def full_error(self, boxes: tuple[Mailbox, ...], why: str) -> ModuleBusFullError:
        """That there is no room, where, and what to do."""
        full = [box for box in boxes if box.room <= 0 and box.blocks] or list(boxes)
        box = full[0]
        return ModuleBusFullError(
            f"{len(box.queue):,} messages wait for module {box.name}, which is all it has room "
            f"for; {why}"
        )

    # Rest ----------------------------------------------------------------------------------------

    def fell_idle(self, box: Mailbox) -> None:
        """Its worker has nothing in its hands, and waits, or has ended."""
        box.is_busy = False
        if self._quiet and self.is_quiet:
            for gate in self._quiet:
                gate.open()
            self._quiet.clear()

    @property
    def is_quiet(self) -> bool:
        """Whether no module has anything to do."""
        return not self._outside and not any(
            box.is_busy or box.queue for box in self.boxes.values()
        )

    def gate_of_quiet(self, make: type[G]) -> tuple[G, list[Gate]] | None:
        """One that opens when it is quiet, and where it waits; None if it is. Takes the lock."""
        with self.lock:
            if self.is_quiet:
                return None
            gate = make()
            self._quiet.append(gate)
        return gate, self._quiet
