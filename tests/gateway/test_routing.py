"""Routing: the fast path for a single receiver equals the general path, and blocked messages are
delivered.
"""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from simplebus.gateway.blocking import ThreadGate
from simplebus.gateway.errors import ModuleBusError
from simplebus.gateway.mailbox import FullQueuePolicy, Mailbox
from simplebus.gateway.messages import QUEUE_UNIT_BYTES, ModuleMessage
from simplebus.gateway.routing import Router

NAMES = ["a", "b", "c"]  # None, one or all of these modules receive a message.
SOURCES = [None, *NAMES, "nobody"]


class SlowRouter(Router):
    """Router without the fast path."""

    def publish(self, message: ModuleMessage, source: object | None) -> bool:
        with self.lock:
            return self.try_deliver(message, self.find_route(source))


class RouterModel:
    """Router with mailboxes whose workers are simulated by the test."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.mailboxes: dict[str, Mailbox] = {}
        self.woken: list[str] = []

    def step(self, action: str, name: str, other_name: str | None, number: int) -> object:
        """Carry out an action. Returns its result."""
        router = self.router
        try:
            if action == "add":
                full = list(FullQueuePolicy)[number % 3]
                mailbox = Mailbox(router, name, 1 + number % 4, full)
                mailbox.hears_all = number % 2 == 0
                router.attach(mailbox)
                mailbox.wake_callback = lambda: self.woken.append(name)
                self.mailboxes[name] = mailbox
            elif action == "remove":
                router.detach(router.find(name))
            elif action == "link":
                router.link(other_name, name)
            elif action == "unlink":
                router.unlink(other_name, name)
            elif action == "take":
                router.find(name)
                return list(self.mailboxes[name]._take_all())
            else:
                content = b"x" * (number % 3 * QUEUE_UNIT_BYTES) + b"%d" % number
                return router.publish(ModuleMessage(content), other_name)
        except ModuleBusError as error:
            return error.result
        return None

    def state(self) -> list[object]:
        """Return the observable state."""
        mailboxes = [
            (name, list(mailbox.queue), mailbox.free_units, mailbox.dropped, mailbox.lost_count)
            for name, mailbox in self.mailboxes.items()
        ]
        return [*mailboxes, self.woken, self.router.published]


STEPS = st.tuples(
    st.sampled_from(["add", "remove", "link", "unlink", "take", "publish", "publish", "publish"]),
    st.sampled_from(NAMES),
    st.sampled_from(SOURCES),
    st.integers(0, 11),
)


PUBLISH = ("publish", "a", None, 1)


@given(st.lists(STEPS, max_size=40))
@example([PUBLISH, ("add", "b", None, 6), PUBLISH])
@example([PUBLISH, ("remove", "a", None, 0), PUBLISH])
@example([PUBLISH, ("unlink", "a", None, 0), PUBLISH])
@example([PUBLISH, PUBLISH, PUBLISH, PUBLISH, ("take", "a", None, 0), PUBLISH])
def test_fast_path_equals_slow_path(
    steps: list[tuple[str, str, str | None, int]],
) -> None:
    """The lists are long enough to fill the queue of a single receiver, and to add others."""
    fast, slow = RouterModel(Router("quick")), RouterModel(SlowRouter("slow"))
    for step in [("add", "a", None, 6), *steps]:
        assert fast.step(*step) == slow.step(*step)
        assert fast.state() == slow.state()


def test_blocked_message_waits_for_each_full_queue_in_turn() -> None:
    router, other_name = Router("bus"), ModuleMessage(b"other")
    first_mailbox, second_mailbox = (
        Mailbox(router, name, 1, FullQueuePolicy.BLOCK) for name in "ab"
    )
    for mailbox, source in (first_mailbox, "to one"), (second_mailbox, "to two"):
        router.attach(mailbox)
        mailbox.hears_all = False
        router.attach(Mailbox(router, source, 1, FullQueuePolicy.BLOCK))
        router.link(source, mailbox.module)
        assert router.publish(other_name, source)
    message = ModuleMessage(b"to both")
    assert not router.try_deliver(message, (first_mailbox, second_mailbox))
    router.block_publish(message, (first_mailbox, second_mailbox), ThreadGate())
    assert list(first_mailbox.wait_batch() or ()) == [other_name]
    assert router.publish(other_name, "to one"), "one queue has space and the other has none"
    assert router.blocked_count == 1
    assert list(second_mailbox.wait_batch() or ()) == [other_name]
    assert router.blocked_count == 0
    assert list(first_mailbox.wait_batch() or ()) == [other_name, message]
    assert list(second_mailbox.wait_batch() or ()) == [message]
