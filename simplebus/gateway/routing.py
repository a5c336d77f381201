"""State of a module bus that its lock guards: modules, routes, and blocked messages.

Nothing here waits or runs code of a module. A message enters all mailboxes of its route at
once, or is blocked, so all modules receive all messages in the same order. A blocked message is
delivered, in order of arrival, after each full mailbox has had room once. So a queue can exceed
its size by one message per blocked publisher.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TypeVar

from simplebus.gateway.blocking import TaskGate, ThreadGate
from simplebus.gateway.errors import ModuleBusError, ModuleBusFullError, invalid_argument
from simplebus.gateway.mailbox import Mailbox
from simplebus.gateway.messages import ModuleMessage

Gate = ThreadGate | TaskGate
G = TypeVar("G", ThreadGate, TaskGate)


class BlockedPublish:
    """Message of a publisher that waits for room."""

    __slots__ = ("awaiting_room", "full_mailboxes", "gate", "mailboxes", "message")

    def __init__(self, message: ModuleMessage, mailboxes: tuple[Mailbox, ...], gate: Gate) -> None:
        self.message = message
        self.mailboxes = mailboxes
        """Mailboxes of the route. Modules that are removed meanwhile do not receive the message."""
        self.gate = gate
        self.full_mailboxes = tuple(
            mailbox for mailbox in mailboxes if mailbox.free_units <= 0 and mailbox.blocks_publisher
        )
        """Mailboxes that were full."""
        self.awaiting_room = set(self.full_mailboxes)
        """Full mailboxes that have not had room since."""


class Router:
    """State of a bus under its lock. The caller holds the lock, unless a method takes it."""

    def __init__(self, url: str) -> None:
        self.lock = threading.Lock()
        self.url = url
        self.references = 1
        self.mailboxes: dict[int, Mailbox] = {}
        """Mailboxes by identity of the module, in the order of `add_module`."""
        self._leaving_mailboxes: dict[int, Mailbox] = {}
        """Last mailbox of each removed module whose callback has not ended."""
        self.routes: dict[int, tuple[Mailbox, ...]] = {}
        """Cached routes by identity of the source; the route of None is for every source without a
        link.
        """
        self.single_routes: dict[int, Mailbox] = {}
        """The mailbox of each route that has only one."""
        self.published = 0
        self.malformed = 0
        self.lost = 0
        """Messages that were not delivered because modules were removed."""
        self._blocked: deque[BlockedPublish] = deque()
        self._idle_gates: list[Gate] = []
        """Gates of callers that wait until all modules are idle."""

    def check_open(self) -> None:
        """Raise ModuleBusError if the bus is freed."""
        if self.references == 0:
            raise ModuleBusError(f"{self.url} is freed: its last reference was released")

    # Modules -------------------------------------------------------------------------------------

    def attach(self, mailbox: Mailbox) -> None:
        self.check_open()
        if id(mailbox.module) in self.mailboxes:
            raise invalid_argument(f"module {mailbox.name} is on the bus already")
        self.mailboxes[id(mailbox.module)] = mailbox
        if (previous := self._leaving_mailboxes.get(id(mailbox.module))) is not None:
            mailbox.wait_for_previous(previous)
        self.clear_routes()

    def find(self, module: object) -> Mailbox:
        """Return the mailbox of a module. Raises ModuleBusError."""
        self.check_open()
        mailbox = self.mailboxes.get(id(module))
        if mailbox is None:
            raise ModuleBusError(f"module {self.describe(module)} is not on the bus")
        return mailbox

    def detach(self, mailbox: Mailbox) -> None:
        """Remove a module. Its remaining messages reach only modules that receive all messages."""
        del self.mailboxes[id(mailbox.module)]
        self._leaving_mailboxes[id(mailbox.module)] = mailbox
        for remaining_mailbox in self.mailboxes.values():
            remaining_mailbox.sources.pop(id(mailbox.module), None)
        self.clear_routes()
        mailbox.close()
        self.deliver_blocked(mailbox)

    def worker_ended(self, mailbox: Mailbox, lost: int) -> None:
        """Note that a worker has ended, with `lost` undelivered messages. Takes the lock."""
        with self.lock:
            if self.mailboxes.get(id(mailbox.module)) is mailbox:
                self.detach(mailbox)
            mailbox.has_ended = True
            if self._leaving_mailboxes.get(id(mailbox.module)) is mailbox:
                del self._leaving_mailboxes[id(mailbox.module)]
            self.lost += mailbox.lost_count + lost
            for gate in mailbox.end_gates:
                gate.open()
            mailbox.end_gates.clear()
            self.note_idle(mailbox)

    def create_end_gate(self, mailbox: Mailbox, make: type[G]) -> G | None:
        """Return a gate that opens when the worker has ended; None if it has. Takes the lock."""
        with self.lock:
            if mailbox.has_ended:
                return None
            gate = make()
            mailbox.end_gates.append(gate)
        return gate

    def remove_gate(self, gates: list[Gate], gate: Gate) -> bool:
        """Remove a gate. Returns False if it was opened before. Takes the lock."""
        with self.lock:
            if gate in gates:
                gates.remove(gate)
                return True
        return False

    def describe(self, module: object | None) -> str:
        """Return the name of a source without running its code, which might need the lock."""
        if module is None:
            return "everyone else"
        mailbox = self.mailboxes.get(id(module))
        return object.__repr__(module) if mailbox is None else mailbox.name

    # Links ---------------------------------------------------------------------------------------

    def link(self, source: object | None, sink: object) -> None:
        mailbox = self.find(sink)
        if source is None:
            was_linked, mailbox.hears_all = mailbox.hears_all, True
        else:
            self.find(source)
            was_linked = id(source) in mailbox.sources
            mailbox.sources[id(source)] = source
        if was_linked:
            raise invalid_argument(
                f"module {mailbox.name} is already linked to {self.describe(source)}"
            )
        self.clear_routes()

    def unlink(self, source: object | None, sink: object) -> None:
        mailbox = self.find(sink)
        if source is None:
            was_linked, mailbox.hears_all = mailbox.hears_all, False
        else:
            was_linked = mailbox.sources.pop(id(source), None) is not None
        if not was_linked:
            raise ModuleBusError(f"module {mailbox.name} is not linked to {self.describe(source)}")
        self.clear_routes()

    def clear_routes(self) -> None:
        """Forget the cached routes after a change."""
        self.routes.clear()
        self.single_routes.clear()

    def find_route(self, source: object | None) -> tuple[Mailbox, ...]:
        """Return the mailboxes for messages of `source`.

        A source that is not on the bus reaches the modules that receive all messages.
        """
        self.check_open()
        key = id(source) if id(source) in self.mailboxes else id(None)
        mailboxes = self.routes.get(key)
        if mailboxes is None:
            mailboxes = self.routes[key] = tuple(
                mailbox
                for mailbox in self.mailboxes.values()
                if (mailbox.hears_all and id(mailbox.module) != key) or key in mailbox.sources
            )
            if len(mailboxes) == 1:
                self.single_routes[key] = mailboxes[0]
        return mailboxes

    # Messages ------------------------------------------------------------------------------------

    def publish(self, message: ModuleMessage, source: object | None) -> bool:
        """Deliver a message, unless a full mailbox blocks its publisher. Takes the lock."""
        with self.lock:
            mailbox = self.single_routes.get(id(source))
            # Fast path of `try_deliver` for the most frequent case.
            if mailbox is not None and mailbox.free_units > 0:
                mailbox.queue.append(message)
                mailbox.free_units -= message.places
                if mailbox.wake_callback is not None:
                    mailbox.wake_worker()
                self.published += 1
                return True
            return self.try_deliver(message, self.find_route(source))

    def try_deliver(self, message: ModuleMessage, mailboxes: tuple[Mailbox, ...]) -> bool:
        """Deliver a message, unless a full mailbox blocks its publisher."""
        for mailbox in mailboxes:
            if mailbox.free_units <= 0 and mailbox.blocks_publisher:
                return False
        self._deliver_to(message, mailboxes)
        return True

    def _deliver_to(self, message: ModuleMessage, mailboxes: tuple[Mailbox, ...]) -> None:
        for mailbox in mailboxes:
            if mailbox.free_units > 0 or mailbox.blocks_publisher or mailbox.make_room():
                mailbox.queue.append(message)
                mailbox.free_units -= message.places
                if mailbox.wake_callback is not None:
                    mailbox.wake_worker()
        self.published += 1

    def block_publish(
        self, message: ModuleMessage, mailboxes: tuple[Mailbox, ...], gate: Gate
    ) -> BlockedPublish:
        """Keep a message until there is room."""
        blocked = BlockedPublish(message, mailboxes, gate)
        self._blocked.append(blocked)
        return blocked

    def cancel_blocked(self, blocked: BlockedPublish) -> bool:
        """Remove a blocked message. Returns False if it was delivered before. Takes the lock."""
        with self.lock:
            if blocked in self._blocked:
                self._blocked.remove(blocked)
                return True
        return False

    def deliver_blocked(self, mailbox: Mailbox) -> None:
        """Deliver blocked messages after a mailbox got room or was closed."""
        if self._blocked:
            still_blocked: deque[BlockedPublish] = deque()
            for blocked in self._blocked:
                if mailbox.free_units > 0 or mailbox.is_closed:
                    blocked.awaiting_room.discard(mailbox)
                if blocked.awaiting_room:
                    still_blocked.append(blocked)
                else:
                    self._deliver_to(blocked.message, blocked.mailboxes)
                    blocked.gate.open()
            self._blocked = still_blocked

    def all_mailboxes(self) -> tuple[Mailbox, ...]:
        """Return the mailboxes of all modules. Takes the lock."""
        with self.lock:
            return tuple(self.mailboxes.values())

    @property
    def blocked_count(self) -> int:
        """Number of blocked messages."""
        return len(self._blocked)

    def full_error(self, mailboxes: tuple[Mailbox, ...], reason: str) -> ModuleBusFullError:
        """Return the error for a full queue."""
        full = [
            mailbox for mailbox in mailboxes if mailbox.free_units <= 0 and mailbox.blocks_publisher
        ]
        mailbox = (full or mailboxes)[0]
        return ModuleBusFullError(
            f"the queue of module {mailbox.name} is full ({len(mailbox.queue):,} messages); "
            f"{reason}"
        )

    # Idle ----------------------------------------------------------------------------------------

    def note_idle(self, mailbox: Mailbox) -> None:
        """Note that a worker has no messages."""
        mailbox.is_busy = False
        if self._idle_gates and self.is_idle:
            for gate in self._idle_gates:
                gate.open()
            self._idle_gates.clear()

    @property
    def is_idle(self) -> bool:
        """True if no module has anything to do."""
        return not self._blocked and not any(
            mailbox.is_busy or mailbox.queue for mailbox in self.mailboxes.values()
        )

    def create_idle_gate(self, make: type[G]) -> tuple[G, list[Gate]] | None:
        """Return a gate that opens when all modules are idle, and its list; None if they are. Takes
        the lock.
        """
        with self.lock:
            if self.is_idle:
                return None
            gate = make()
            self._idle_gates.append(gate)
        return gate, self._idle_gates
