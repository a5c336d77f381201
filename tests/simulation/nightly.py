"""Run very many random histories of the simulation on all cores.

    python -m tests.simulation.nightly                          100,000 new histories
    python -m tests.simulation.nightly --histories 5000 --first 70000
    python -m tests.simulation.nightly --minutes 30

Seeds begin with the day's number times one million, so that each night has new ones. Failures are
printed with the command that repeats them; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import multiprocessing.pool
import os
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

_CHUNK = 8
_CHUNKS_PER_PROCESS = 250
"""A new process then replaces one, which returns its memory."""
_REPORT_SECONDS = 60.0
_FAILURES_MAX = 20
_DAY_SECONDS = 86_400


class Failure(NamedTuple):
    """History in which a promise was broken."""

    seed: int
    reason: str


def run_histories(seeds: range) -> tuple[int, list[Failure]]:
    """Run the histories of these seeds. Returns their number and the failures."""
    from tests.simulation.run import run_simulation

    failures = []
    gc.freeze()
    gc.disable()  # Collections during a history would take 5 % of its time.
    for seed in seeds:
        try:
            run_simulation(seed)
        except Exception as error:
            failures.append(Failure(seed, f"{type(error).__name__}: {error}"))
    gc.collect()
    return len(seeds), failures


def main() -> int:
    """Run the command. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.nightly")
    parser.add_argument("--histories", type=int, default=100_000, metavar="NUMBER")
    parser.add_argument("--first", type=int, metavar="SEED", help="first seed; default: by the day")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="NUMBER")
    options = parser.parse_args()
    first = options.first
    if first is None:
        first = int(time.time() // _DAY_SECONDS) * 1_000_000
    last = first + options.histories
    started_at = reported = time.monotonic()
    run_count, failures = 0, list[Failure]()
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, maxtasksperchild=_CHUNKS_PER_PROCESS) as pool:
        chunks = (range(start, min(start + _CHUNK, last)) for start in range(first, last, _CHUNK))
        for count, found in _run_chunks(pool, chunks, 4 * options.processes):
            run_count += count
            for each in found:
                print(f"seed {each.seed}: {each.reason}", flush=True)
            failures += found
            now = time.monotonic()
            if now - reported > _REPORT_SECONDS:
                reported = now
                print(
                    f"{run_count} histories, {run_count / (now - started_at):.1f} per second",
                    flush=True,
                )
            if now - started_at > options.minutes * 60 or len(failures) >= _FAILURES_MAX:
                break
    seconds = time.monotonic() - started_at
    print(f"{run_count} histories from seed {first} in {seconds:.0f} s: {len(failures)} failures")
    for each in failures:
        print(f"repeat: pytest tests/simulation -n 0 -s --seed {each.seed}")
    return 1 if failures else 0


def _run_chunks(
    pool: multiprocessing.pool.Pool, chunks: Iterator[range], submitted_max: int
) -> Iterator[tuple[int, list[Failure]]]:
    """Yield the results of the chunks in order, with a limited number of them submitted ahead."""
    waiting = [
        pool.apply_async(run_histories, (each,)) for each in itertools.islice(chunks, submitted_max)
    ]
    while waiting:
        yield waiting.pop(0).get()
        waiting += [
            pool.apply_async(run_histories, (each,)) for each in itertools.islice(chunks, 1)
        ]


if __name__ == "__main__":
    sys.exit(main())
