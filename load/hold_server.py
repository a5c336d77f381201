"""Server that reports how long its event loop was held: `python -m load.hold_server serve ...`.

Each step of a task, and each garbage collection between steps, that takes at least REPORTED_S of
CPU time becomes a line of JSON on standard output. CPU time, unlike elapsed time, does not grow
when other programs use the machine. A thread takes samples of the stack of long steps.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import trio

import simplebus
from simplebus.cli import main

REPORTED_S = 0.001
_SAMPLE_S = 0.0005
_FRAMES = 4
"""Functions of simplebus that a report names, the innermost first."""
_PACKAGE = str(Path(simplebus.__file__).parent) + os.sep


class HoldRecorder(trio.abc.Instrument):
    """Measures each step of each task."""

    def __init__(self) -> None:
        self.step_count = 0
        self.stacks: Counter[str] = Counter()
        self._began_at = self._gc_began_at = self._gc_s = 0.0
        self._is_in_step = False
        self._fault_count = 0
        gc.callbacks.append(self._measure_collection)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.step_count += 1
        self.stacks.clear()
        self._gc_s = 0.0
        self._is_in_step = True
        self._fault_count = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        self._began_at = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        seconds = time.thread_time() - self._began_at
        self._is_in_step = False
        if seconds < REPORTED_S:
            return
        stacks = self.stacks.copy()  # The sampling thread may change the original.
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - self._fault_count
        name = ".".join(task.name.split(".")[-2:])
        stack = max(stacks, key=stacks.__getitem__, default="")
        _report(seconds, self._gc_s, faults, name, stack)

    def _measure_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._gc_began_at = time.thread_time()
            return
        seconds = time.thread_time() - self._gc_began_at
        self._gc_s += seconds
        if not self._is_in_step and seconds >= REPORTED_S:
            _report(seconds, seconds, 0, "garbage collection", "")


def _report(seconds: float, gc_seconds: float, faults: int, task: str, stack: str) -> None:
    """Write the line of a hold."""
    hold = {
        "at": time.monotonic(),
        "seconds": seconds,
        "gc": gc_seconds,
        "faults": faults,
        "task": task,
        "stack": stack,
    }
    os.write(1, f"hold {json.dumps(hold)}\n".encode())


def sample_long_steps(recorder: HoldRecorder, thread_id: int) -> None:
    """Take samples of the stack of the event loop, except at the first sample of each step."""
    last_step = -1
    while True:
        time.sleep(_SAMPLE_S)
        step = recorder.step_count
        frame = sys._current_frames().get(thread_id) if step == last_step else None
        if frame is not None and step == recorder.step_count:
            # A collection in `f_back` could run another thread, which ends the frame: a crash.
            gc.disable()
            recorder.stacks[_describe_stack(frame)] += 1
            gc.enable()
        last_step = step


def _describe_stack(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None and len(names) < _FRAMES:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            names.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(names)


if __name__ == "__main__":
    recorder = HoldRecorder()
    trio.run = functools.partial(trio.run, instruments=[recorder])
    sys.setswitchinterval(_SAMPLE_S)
    threading.Thread(
        target=sample_long_steps, args=(recorder, threading.get_ident()), daemon=True
    ).start()
    main()
