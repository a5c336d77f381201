"""Requirements of adding and removing modules.

A requirement about memory or sockets is tested by its meaning in Python.
"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from simplebus.gateway import ModuleBus, ModuleBusFullError, Result, result_codes
from tests.gateway.recording_modules import (
    TIMEOUT_SECONDS,
    HeldListener,
    Listener,
    assert_no_threads_left,
    run_in_thread,
    text_message,
)


def modules(bus: ModuleBus) -> list[object]:
    return [module for module, _ in bus.statistics().modules]


# AddModule


def test_99_013_without_a_bus_or_a_module_add_is_invalidarg(bus: ModuleBus) -> None:
    assert result_codes.add_module(None, Listener()) is Result.INVALIDARG
    assert result_codes.add_module(bus, None) is Result.INVALIDARG


def test_13_107_the_module_is_remembered(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    assert modules(bus) == [module]


def test_17_013_each_module_has_its_own_queue(bus: ModuleBus) -> None:
    held, other = HeldListener(), Listener()
    bus.add_module(held)
    bus.add_module(other)
    for number in range(5):
        bus.publish(text_message(str(number)))
    assert other.wait(5) == ["0", "1", "2", "3", "4"]
    held.wait_entered()
    held.release()
    assert held.wait(5) == other.received


def test_17_014_a_module_hears_everything_that_others_publish(bus: ModuleBus) -> None:
    module, other = Listener(), Listener()
    bus.add_module(module)
    bus.add_module(other)
    for source in None, other, object():
        bus.publish(text_message("heard"), source=source)
    bus.publish(text_message("its own"), source=module)
    assert other.wait(3)[-1] == "its own"
    assert module.wait(3) == ["heard"] * 3


def test_13_099_a_queue_is_guarded(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module, places=3)
    many = [
        run_in_thread(lambda: [bus.publish(text_message("x")) for _ in range(100)])
        for _ in range(3)
    ]
    for each in many:
        each.join()
    assert len(module.wait(300)) == 300


def test_17_020_a_module_is_told_to_quit_and_no_other(bus: ModuleBus) -> None:
    one, two = Listener(), Listener()
    bus.add_module(one)
    bus.add_module(two)
    bus.remove_module(one)
    bus.publish(text_message("hello"))
    assert two.wait(1) == ["hello"]
    assert one.received == []


def test_13_102_each_module_has_its_own_thread(bus: ModuleBus) -> None:
    both = [Listener(), Listener()]
    for module in both:
        bus.add_module(module)
    bus.publish(text_message("hello"))
    for module in both:
        module.wait(1)
    threads = both[0].threads | both[1].threads
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_13_039_a_module_can_be_added_while_others_publish(bus: ModuleBus) -> None:
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            bus.publish(text_message("x"))

    publishing = run_in_thread(publish)
    added = [Listener() for _ in range(10)]
    for module in added:
        bus.add_module(module)
        module.wait(1)
    stop.set()
    publishing.join()


def test_13_045_the_module_is_last_in_the_list(bus: ModuleBus) -> None:
    added: list[object] = [Listener(), Listener(), Listener()]
    for module in added:
        bus.add_module(module)
    assert modules(bus) == added


def test_13_046_after_add_others_may_add(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    run_in_thread(lambda: bus.add_module(Listener())).join()
    assert result_codes.add_module(bus, module) is Result.INVALIDARG
    run_in_thread(lambda: bus.add_module(Listener())).join()
    assert len(modules(bus)) == 3


def test_13_047_add_is_an_error_when_there_can_be_no_thread(
    bus: ModuleBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Listener()

    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert result_codes.add_module(bus, module) is Result.ERROR
        assert modules(bus) == []
        bus.publish(text_message("nobody hears it"))
    assert result_codes.add_module(bus, module) is Result.OK
    bus.publish(text_message("hello"))
    assert module.wait(1) == ["hello"]


def test_99_014_without_a_callback_add_is_invalidarg(bus: ModuleBus) -> None:
    class Mute:
        receive = None

    assert result_codes.add_module(bus, Mute()) is Result.INVALIDARG
    assert result_codes.add_module(bus, object()) is Result.INVALIDARG
    assert modules(bus) == []


def test_99_015_without_an_instance_add_is_invalidarg(bus: ModuleBus) -> None:
    assert result_codes.add_module(bus, None) is Result.INVALIDARG
    assert modules(bus) == []


# RemoveModule


def test_13_048_without_a_bus_or_a_module_remove_is_invalidarg(bus: ModuleBus) -> None:
    assert result_codes.remove_module(None, Listener()) is Result.INVALIDARG
    assert result_codes.remove_module(bus, None) is Result.INVALIDARG


def test_13_088_of_those_who_remove_one_module_at_once_one_does(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    results: list[Result] = []
    many = [
        run_in_thread(lambda: results.append(result_codes.remove_module(bus, module)))
        for _ in range(4)
    ]
    for each in many:
        each.join()
    assert sorted(results) == [Result.ERROR] * 3 + [Result.OK]


def test_13_049_the_module_itself_is_looked_for(bus: ModuleBus) -> None:
    class Alike(Listener):
        def __eq__(self, other: object) -> bool:
            return True

    one, two = Alike(), Alike()
    bus.add_module(one)
    assert result_codes.remove_module(bus, two) is Result.ERROR
    assert result_codes.add_module(bus, two) is Result.OK
    assert result_codes.remove_module(bus, one) is Result.OK
    bus.publish(text_message("hello"))
    assert two.wait(1) == ["hello"]


def test_13_050_a_module_that_is_not_there_is_an_error_and_holds_nothing_up(
    bus: ModuleBus,
) -> None:
    assert result_codes.remove_module(bus, Listener()) is Result.ERROR
    run_in_thread(lambda: bus.publish(text_message("x"))).join()


def test_13_052_the_module_is_in_the_list_no_more(bus: ModuleBus) -> None:
    one, two, three = Listener(), Listener(), Listener()
    for module in one, two, three:
        bus.add_module(module)
    bus.remove_module(two)
    assert modules(bus) == [one, three]


def test_13_054_the_lock_is_given_back_before_the_callback_is_waited_for(bus: ModuleBus) -> None:
    held, other = HeldListener(), Listener()
    bus.add_module(held)
    bus.add_module(other)
    bus.publish(text_message("one"))
    held.wait_entered()
    removing = run_in_thread(lambda: bus.remove_module(held))
    while held in modules(bus):
        pass
    bus.publish(text_message("two"))
    assert other.wait(2) == ["one", "two"]
    assert removing.is_running
    held.release()
    removing.join()


def test_17_021_a_worker_that_waits_is_told_to_quit(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    bus.remove_module(module)
    assert_no_threads_left()


def full(bus: ModuleBus) -> HeldListener:
    held = HeldListener()
    bus.add_module(held, places=1)
    bus.publish(text_message("one"))
    held.wait_entered()
    bus.publish(text_message("two"))
    return held


def test_02_001_a_queue_is_closed_while_others_publish_into_it(bus: ModuleBus) -> None:
    held = full(bus)
    publishing = run_in_thread(lambda: bus.publish(text_message("three")))
    while not bus.statistics().waiting:
        pass
    removing = run_in_thread(lambda: bus.remove_module(held))
    publishing.join()
    held.release()
    removing.join()


def test_17_015_what_waited_for_the_module_is_not_delivered(bus: ModuleBus) -> None:
    held = full(bus)
    removing = run_in_thread(lambda: bus.remove_module(held))
    while modules(bus):
        pass
    held.release()
    removing.join()
    assert held.received == ["one"]
    assert bus.statistics().lost == 1


def test_02_003_after_the_queue_is_closed_others_publish(bus: ModuleBus) -> None:
    held = full(bus)
    with pytest.raises(ModuleBusFullError):
        bus.publish_nowait(text_message("three"))
    removing = run_in_thread(lambda: bus.remove_module(held))
    while modules(bus):
        pass
    bus.publish_nowait(text_message("three"))
    held.release()
    removing.join()


def test_13_104_remove_waits_for_the_thread(bus: ModuleBus) -> None:
    held = HeldListener()
    bus.add_module(held)
    bus.publish(text_message("one"))
    held.wait_entered()
    removing = run_in_thread(lambda: bus.remove_module(held))
    while modules(bus):
        pass
    assert removing.is_running
    held.release()
    removing.join()
    assert_no_threads_left()


def test_13_057_nothing_of_the_module_is_kept(bus: ModuleBus) -> None:
    module, other = Listener(), Listener()
    bus.add_module(module)
    bus.add_module(other, hears_all=False)
    bus.link(module, other)
    bus.publish(text_message("one"), source=module)
    bus.publish(text_message("two"))
    module.wait(1)
    (thread,) = (each for each in threading.enumerate() if each.ident in module.threads)
    gone = weakref.ref(module)
    bus.remove_module(module)
    thread.join(TIMEOUT_SECONDS)
    del module
    gc.collect()
    assert gone() is None


def test_13_053_remove_is_ok_once_and_then_an_error(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    assert result_codes.remove_module(bus, module) is Result.OK
    assert result_codes.remove_module(bus, module) is Result.ERROR
    bus.destroy()
    assert result_codes.remove_module(bus, module) is Result.ERROR
