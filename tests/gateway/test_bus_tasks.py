"""The module bus with tasks, in one event loop and together with threads."""

from __future__ import annotations

import sys
import threading

import pytest
import trio
import trio.lowlevel
import trio.testing

from simplebus.gateway import ModuleBus, ModuleBusError, ModuleBusFullError, ModuleMessage
from tests.gateway.recording_modules import (
    HeldListener,
    Listener,
    assert_no_threads_left,
    run_in_thread,
    text_message,
)


class Task:
    """Module with a task, which can be held in its callback."""

    def __init__(self, release_event: trio.Event | None = None) -> None:
        self.received: list[str] = []
        self.release_event = release_event
        self.entered = trio.Event()
        self.threads: set[int] = set()

    async def receive(self, message: ModuleMessage) -> None:
        self.received.append(message.content.decode())
        self.threads.add(threading.get_ident())
        self.entered.set()
        if self.release_event is not None:
            await self.release_event.wait()


async def test_tasks_receive_in_order_and_share_loop() -> None:
    async with ModuleBus() as bus:
        first, second = Task(), Task()
        quick: list[str] = []
        bus.add_module(first)
        bus.add_module(second)
        bus.add_module(lambda message: quick.append(message.content.decode()), quick=True)
        for number in range(3000):
            await bus.publish_async(text_message(str(number)), source=first)
        await bus.wait_quiet_async()
        assert second.received == quick == [str(number) for number in range(3000)]
        assert first.received == []
        assert second.threads == {threading.get_ident()}


async def test_tasks_and_threads_exchange_messages() -> None:
    async with ModuleBus() as bus:
        echoed = Task()

        def echo(message: ModuleMessage) -> None:
            bus.publish(message, source=thread)

        thread = Listener(echo)
        bus.add_module(thread, places=2)
        bus.add_module(echoed, places=2)
        for number in range(100):
            await bus.publish_async(text_message(str(number)), source=echoed)
        while len(echoed.received) < 100:
            await trio.lowlevel.checkpoint()
        assert echoed.received == thread.received == [str(number) for number in range(100)]
    assert_no_threads_left()


@pytest.mark.parametrize("interrupted_task", ["module task", "child task"])
async def test_sys_exit_in_task_loses_one_message(
    interrupted_task: str, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[bytes] = []

    async def leave() -> None:
        sys.exit(3)

    async def receive(message: ModuleMessage) -> None:
        received.append(message.content)
        if message.content == b"1":
            if interrupted_task == "module task":
                await leave()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leave)

    async with ModuleBus() as bus:
        bus.add_module(receive)
        for number in range(3):
            await bus.publish_async(text_message(str(number)))
        await bus.wait_quiet_async()
        assert bus.statistics().modules[0][1].failed == 1
    assert received == [b"0", b"1", b"2"]
    assert "SystemExit" in caplog.text


async def test_ctrl_c_in_task_is_not_module_failure() -> None:
    async def receive(message: ModuleMessage) -> None:
        raise KeyboardInterrupt

    bus = ModuleBus()

    async def interrupted() -> None:
        async with bus:
            bus.add_module(receive)
            await bus.publish_async(text_message("1"))
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as raised:
        await interrupted()
    assert raised.group_contains(KeyboardInterrupt)
    assert bus.is_freed


async def test_blocked_task_does_not_block_others() -> None:
    release_event = trio.Event()
    async with ModuleBus() as bus, trio.open_nursery() as nursery:
        module = Task(release_event)
        bus.add_module(module, places=1)
        await bus.publish_async(text_message("first"))
        await module.entered.wait()
        bus.publish(text_message("second"))
        with pytest.raises(ModuleBusFullError, match="await publish_async"):
            bus.publish(text_message("third"))
        with trio.move_on_after(0):
            await bus.publish_async(text_message("cancelled"))
        nursery.start_soon(bus.publish_async, text_message("third"))
        await trio.testing.wait_all_tasks_blocked()
        assert bus.statistics().waiting == 1
        release_event.set()
        await bus.wait_quiet_async()
        assert module.received == ["first", "second", "third"]


async def test_message_delivered_during_cancellation_is_published() -> None:
    """A thread makes room during the cancellation, so the task's message is published."""
    async with ModuleBus() as bus:
        held_module = HeldListener()
        bus.add_module(held_module, places=1)
        bus.publish(text_message("first"))
        await trio.to_thread.run_sync(held_module.wait_entered)
        bus.publish(text_message("second"))
        published: list[bool] = []

        async def publish() -> None:
            with trio.CancelScope() as scope:
                scopes.append(scope)
                await bus.publish_async(text_message("third"))
                published.append(True)

        scopes: list[trio.CancelScope] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish)
            await trio.testing.wait_all_tasks_blocked()
            held_module.release()
            while bus.statistics().waiting:  # The event loop does not run meanwhile.
                pass
            scopes[0].cancel()
        assert published == [True]
        assert await trio.to_thread.run_sync(held_module.wait, 3) == ["first", "second", "third"]


async def test_callback_waiting_for_itself_gets_error() -> None:
    refused: list[str] = []

    async def flood(message: ModuleMessage) -> None:
        try:
            for _ in range(3):
                await bus.publish_async(text_message("more"))
        except ModuleBusFullError as error:
            refused.append(str(error))

    async with ModuleBus() as bus:
        bus.add_module(flood, places=1)
        await bus.publish_async(text_message("go"))
        while not refused:
            await trio.lowlevel.checkpoint()
    assert "would not end" in refused[0]


async def test_remove_waits_for_callback_except_inside() -> None:
    release_event = trio.Event()
    async with ModuleBus() as bus, trio.open_nursery() as nursery:
        module = Task(release_event)

        async def leave(message: ModuleMessage) -> None:
            await bus.remove_module_async(leave)
            has_left.set()

        has_left = trio.Event()
        bus.add_module(module)
        bus.add_module(leave)
        await bus.publish_async(text_message("go"))
        await has_left.wait()
        removed = trio.Event()

        async def remove() -> None:
            await bus.remove_module_async(module)
            removed.set()

        nursery.start_soon(remove)
        await trio.testing.wait_all_tasks_blocked()
        assert not removed.is_set()
        assert bus.statistics().modules == ()
        release_event.set()
        await removed.wait()
        with pytest.raises(ModuleBusError, match="not on the bus"):
            await bus.remove_module_async(module)


async def test_readded_module_waits_for_its_callback() -> None:
    calls: list[str] = []
    added, may_continue = trio.Event(), trio.Event()

    async def remove_and_add(message: ModuleMessage) -> None:
        calls.append(f"begins {message.content.decode()}")
        if message.content == b"go":
            await bus.remove_module_async(remove_and_add)
            bus.add_module(remove_and_add)
            added.set()
            await may_continue.wait()
        calls.append(f"ends {message.content.decode()}")

    async with ModuleBus() as bus:
        bus.add_module(remove_and_add)
        await bus.publish_async(text_message("go"))
        await added.wait()
        await bus.publish_async(text_message("more"))
        await trio.testing.wait_all_tasks_blocked()
        assert calls == ["begins go"]
        may_continue.set()
        await bus.wait_quiet_async()
        assert calls == ["begins go", "ends go", "begins more", "ends more"]


async def test_wait_for_own_callback_is_cancelled_with_loop() -> None:
    added, forever = trio.Event(), trio.Event()

    async def remove_and_add(message: ModuleMessage) -> None:
        await bus.remove_module_async(remove_and_add)
        bus.add_module(remove_and_add)
        added.set()
        await forever.wait()

    bus = ModuleBus()

    async def leave_with_error() -> None:
        async with bus:
            bus.add_module(remove_and_add)
            await bus.publish_async(text_message("go"))
            await added.wait()
            await trio.testing.wait_all_tasks_blocked()
            raise ValueError("out of here")

    with pytest.raises(ValueError, match="out of here"):
        await leave_with_error()
    assert bus.is_freed


async def test_remove_does_not_block_event_loop() -> None:
    async with ModuleBus() as bus:
        held_module = HeldListener()
        bus.add_module(held_module)
        bus.publish(text_message("go"))
        await trio.to_thread.run_sync(held_module.wait_entered)
        bus.remove_module(held_module)
        held_module.release()
        task = Task(trio.Event())
        bus.add_module(task)
        bus.publish(text_message("go"))
        await task.entered.wait()
        bus.remove_module(task)
        assert task.release_event is not None
        task.release_event.set()


async def test_error_stops_tasks_and_is_not_wrapped() -> None:
    module = Task(trio.Event())
    bus = ModuleBus()

    async def fail() -> None:
        async with bus:
            bus.add_module(module)
            bus.publish(text_message("go"))
            await module.entered.wait()
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        await fail()
    assert bus.is_freed


async def test_referenced_bus_outlives_event_loop() -> None:
    thread = Listener()
    async with ModuleBus() as bus:
        bus.inc_ref()
        bus.add_module(thread)
        bus.add_module(Task())
        with pytest.raises(ModuleBusError, match="already entered in an event loop"):
            await bus.__aenter__()
    assert [module for module, _ in bus.statistics().modules] == [thread]
    bus.publish(text_message("still there"))
    assert await trio.to_thread.run_sync(thread.wait, 1) == ["still there"]
    bus.destroy()


def test_task_gets_own_loop_without_async_with() -> None:
    module, listener = Task(), Listener()

    async def answer(message: ModuleMessage) -> None:
        await module.receive(message)
        await trio.lowlevel.checkpoint()
        await bus.publish_async(text_message("answer"), source=answer)

    with ModuleBus() as bus:
        bus.add_module(listener)
        bus.add_module(answer)
        bus.publish(text_message("hello"), source=listener)
        assert listener.wait(1) == ["answer"]
    assert module.received == ["hello"]
    assert_no_threads_left()


def test_reports_missing_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    module = Task()
    with ModuleBus() as bus:
        with monkeypatch.context() as patch:
            patch.setattr("simplebus.gateway.workers.trio.run", fail)
            with pytest.raises(
                ModuleBusError, match=r"create an event loop: .* Too many open files"
            ):
                bus.add_module(module)
        assert_no_threads_left()
        assert bus.statistics().modules == ()
        bus.add_module(module)


async def test_threads_can_add_and_remove_tasks() -> None:
    async with ModuleBus() as bus:
        module = Task()
        adding = run_in_thread(lambda: bus.add_module(module))
        adding.join()
        publishing = run_in_thread(lambda: bus.publish(text_message("hello")))
        publishing.join()
        await bus.wait_quiet_async()
        removing = run_in_thread(lambda: bus.remove_module(module))
        while removing.is_running:
            await trio.lowlevel.checkpoint()
        removing.join()
        assert module.received == ["hello"]


async def test_exit_waits_for_callbacks_in_threads() -> None:
    held_module = HeldListener()
    async with trio.open_nursery() as nursery:

        async def enter_and_leave() -> None:
            async with ModuleBus() as bus:
                bus.add_module(held_module)
                bus.publish(text_message("go"))
                await trio.to_thread.run_sync(held_module.wait_entered)
                leaves.set()
            has_left.set()

        leaves, has_left = trio.Event(), trio.Event()
        nursery.start_soon(enter_and_leave)
        await leaves.wait()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not has_left.is_set()
        held_module.release()
        await has_left.wait()
