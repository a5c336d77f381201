"""Requirements of the workers that call modules.

A requirement about memory or sockets is tested by its meaning in Python.
"""

from __future__ import annotations

import sys
import threading
from collections import deque

import pytest

from simplebus.gateway import ModuleBus, ModuleMessage
from simplebus.gateway.mailbox import Mailbox
from tests.gateway.recording_modules import (
    TIMEOUT_SECONDS,
    HeldListener,
    Listener,
    assert_no_threads_left,
    run_in_thread,
    text_message,
)


def test_13_026_a_worker_calls_its_own_module(bus: ModuleBus) -> None:
    modules = [Listener(), Listener()]
    for module in modules:
        bus.add_module(module)
    bus.publish(text_message("for the second"), source=modules[0])
    bus.publish(text_message("for both"))
    assert modules[0].wait(1) == ["for both"]
    assert modules[1].wait(2) == ["for the second", "for both"]


def test_13_089_one_worker_processes_messages_one_at_a_time(bus: ModuleBus) -> None:
    current_callback: list[int] = []
    concurrent_counts: list[int] = []

    def count(message: ModuleMessage) -> None:
        current_callback.append(1)
        concurrent_counts.append(len(current_callback))
        current_callback.pop()

    listener = Listener(count)
    bus.add_module(listener)
    threads = [
        run_in_thread(lambda: [bus.publish(text_message("x")) for _ in range(50)]) for _ in range(3)
    ]
    for thread in threads:
        thread.join()
    listener.wait(150)
    assert set(concurrent_counts) == {1}
    assert len(listener.threads) == 1


def broken_mailbox(bus: ModuleBus, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Add a module whose worker fails while it waits, so that the module is removed."""

    def fail(*_: object) -> None:
        raise OSError("on purpose")

    ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.set())
    held_module = HeldListener()
    bus.add_module(held_module)
    bus.publish(text_message("one"))
    held_module.wait_entered()
    monkeypatch.setattr(f"simplebus.gateway.mailbox.{name}", fail)
    held_module.release()
    assert ended.wait(TIMEOUT_SECONDS)
    assert_no_threads_left()
    assert bus.statistics().modules == ()
    monkeypatch.undo()
    listener = Listener()
    bus.add_module(listener)
    bus.publish(text_message("two"))
    assert listener.wait(1) == ["two"]


def test_02_004_a_worker_ends_if_reading_its_queue_fails(
    bus: ModuleBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_mailbox(bus, monkeypatch, "Mailbox.wait_batch")


def test_13_068_a_worker_runs_until_its_module_is_removed(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    for number in range(3):
        bus.publish(text_message(str(number)))
        module.wait(number + 1)
    bus.remove_module(module)
    assert_no_threads_left()


def test_13_091_no_lock_is_held_while_a_module_is_called(bus: ModuleBus) -> None:
    held_module, listener = HeldListener(), Listener()
    bus.add_module(held_module)
    bus.publish(text_message("one"))
    held_module.wait_entered()
    bus.add_module(listener)
    bus.publish(text_message("two"))
    assert listener.wait(1) == ["two"]
    bus.remove_module(listener)
    held_module.release()
    assert held_module.wait(2) == ["one", "two"]


def test_17_016_a_worker_ends_if_releasing_the_lock_fails(
    bus: ModuleBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_mailbox(bus, monkeypatch, "ThreadGate")


def test_17_005_an_idle_worker_does_not_poll(
    bus: ModuleBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue_lengths: list[int] = []
    grab = Mailbox._take_all

    def counted(mailbox: Mailbox) -> deque[ModuleMessage]:
        queue_lengths.append(len(mailbox.queue))
        return grab(mailbox)

    monkeypatch.setattr(Mailbox, "_take_all", counted)
    module = Listener()
    bus.add_module(module)
    for text in "one", "two":
        bus.publish(text_message(text))
        bus.wait_quiet()
    assert module.received == ["one", "two"]
    assert queue_lengths == [1, 1], "once per message"


def test_17_006_an_error_while_waiting_ends_the_worker(
    bus: ModuleBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_mailbox(bus, monkeypatch, "ThreadGate.wait")


def test_17_017_bytes_are_delivered_as_a_message(bus: ModuleBus) -> None:
    received: list[ModuleMessage] = []
    module = Listener(received.append)
    bus.add_module(module)
    message = ModuleMessage(b"one", {"a": "1"})
    bus.publish(message.to_bytes())
    bus.publish(message.to_bytes(version=None))
    bus.publish(text_message("end"))
    module.wait(3)
    assert received[:2] == [message, message]


def test_17_018_malformed_bytes_are_skipped(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    for data in (
        text_message("one").to_bytes(),
        b"",
        b"\xa1\x60\x01garbage",
        text_message("two").to_bytes(),
    ):
        bus.publish(data)
    assert module.wait(2) == ["one", "two"]
    statistics = bus.statistics()
    assert (statistics.published, statistics.malformed) == (2, 2)


def test_13_092_the_callback_receives_the_message(bus: ModuleBus) -> None:
    received: list[ModuleMessage] = []
    handled = threading.Event()
    message = text_message("one")

    def callback(received_message: ModuleMessage) -> None:
        received.append(received_message)
        handled.set()

    bus.add_module(callback)
    bus.publish(message)
    assert handled.wait(TIMEOUT_SECONDS)
    assert received == [message]


def test_13_093_a_delivered_message_is_released(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    content = bytes(range(33, 99))
    before = sys.getrefcount(content)
    bus.publish(ModuleMessage(content))
    module.wait(1)
    bus.wait_quiet()
    assert sys.getrefcount(content) == before, "without another message"


def test_17_019_processed_messages_free_space_in_the_queue(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module, places=1)
    for number in range(20):
        bus.publish(text_message(str(number)))
    assert module.wait(20) == [str(number) for number in range(20)]


def test_99_012_an_object_with_a_receive_method_is_a_module(bus: ModuleBus) -> None:
    class Module:
        def __init__(self) -> None:
            self.received = threading.Event()

        def receive(self, message: ModuleMessage) -> None:
            self.received.set()

    module = Module()
    bus.add_module(module)
    bus.publish(text_message("one"))
    assert module.received.wait(TIMEOUT_SECONDS)
