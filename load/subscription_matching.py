"""How long a match takes and what a subscription costs, from 10 subscriptions to 1,000,000.

    python load/matching.py

Rule 1: before anything is timed, a sample of names is matched and compared with the rule itself,
asked of every pattern.
Rule 2: as subscriptions grow, so do sites, and what a name matches stays alike: the figures tell
what the number of subscriptions costs, not what more deliveries would.
Rule 3: within a round every number of subscriptions is measured once, one after the other: a
machine that slows down slows them all.
Rule 4: memory is what the kernel counts of the process, beyond the patterns' own text.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs by its path.

from load.processes import LoadError
from simplebus.core.channel.pattern import matches
from simplebus.core.channel.subscription_index import Sublist

COUNTS = (10, 1_000, 100_000, 1_000_000)
METERS_A_SITE = 8
NAMES = 1_000
ROUNDS = 41
WARM_PASSES = 5
SAMPLES_MAX = 200
CHECKS_MAX = 3_000_000
"""Patterns that the rule is asked of, at most, before the first figure."""
MEMORY_COUNT_MIN = 100_000
"""Below it, a process grows by pages rather than by subscriptions."""
PAGE_BYTES = 4096
WIDTH = 110


def literal(number: int) -> str:
    return f"site.{number // METERS_A_SITE}.meter.{number % METERS_A_SITE}.reading"


def mixed(number: int) -> str:
    """Of eight patterns of a site, five are literal, two have a star, and one takes the rest."""
    site, meter = divmod(number, METERS_A_SITE)
    if meter == 5:
        return f"site.{site}.meter.*.reading"
    if meter == 6:
        return f"*.{site}.*.2.reading"
    if meter == 7:
        return f"site.{site}.#"
    return literal(number)


MIXES: dict[str, Callable[[int], str]] = {"literal": literal, "mixed": mixed}


class Case:
    """A number of subscriptions, and what they came to."""

    def __init__(self, patterns: list[str]) -> None:
        self.count = len(patterns)
        gc.collect()
        before = resident_bytes()
        begun = time.perf_counter_ns()
        self.sublist = Sublist[int]()
        for number, pattern in enumerate(patterns):
            self.sublist.insert(pattern, number)
        self.insert_ns = (time.perf_counter_ns() - begun) / self.count
        gc.collect()
        self.bytes_each = (resident_bytes() - before) / self.count
        self.cold_ns: list[float] = []
        self.warm_ns: list[float] = []
        self.found: list[float] = []
        """Values in a match, on average of a round."""

    def measure(self, random: Random) -> None:
        """One round: names drawn from all, matched once without the cache, and then with it."""
        names = list(dict.fromkeys(literal(random.randrange(self.count)) for _ in range(NAMES)))
        empty_cache(self.sublist)
        self.cold_ns.append(pass_ns(self.sublist, names))
        self.warm_ns.append(median(pass_ns(self.sublist, names) for _ in range(WARM_PASSES)))
        self.found.append(sum(len(self.sublist.match(name)) for name in names) / len(names))

    def row(self, mix: str) -> list[str]:
        """As the table has it."""
        return [
            mix,
            f"{self.count:,}",
            f"{median(self.found):.1f}",
            f"{median(self.cold_ns):,.0f}",
            f"{median(self.warm_ns):,.0f}",
            f"{self.insert_ns:,.0f}",
            f"{self.bytes_each:,.0f}" if self.count >= MEMORY_COUNT_MIN else "",
        ]


def rows_of(mix: str) -> list[list[str]]:
    """The rows of one mix. They are the first thing that a process does."""
    random = Random(mix)
    patterns = [MIXES[mix](number) for number in range(COUNTS[-1])]
    # The greatest first: what it takes is not found among what others gave back.
    cases = [Case(patterns[:count]) for count in reversed(COUNTS)][::-1]
    for case in cases:
        verify(case.sublist, patterns[: case.count], random)
    gc.freeze()
    for _ in range(ROUNDS):
        for case in cases:
            case.measure(random)
    return [case.row(mix) for case in cases]


def verify(sublist: Sublist[int], patterns: list[str], random: Random) -> None:
    """Refuse to time matches that are wrong."""
    for _ in range(max(2, min(SAMPLES_MAX, CHECKS_MAX // len(patterns)))):
        name = literal(random.randrange(len(patterns)))
        expected = tuple(
            number for number, pattern in enumerate(patterns) if matches(pattern, name)
        )
        for found in (sublist.match(name), sublist.match(name)):
            if found != expected or not found:
                raise LoadError(f"{name} found {found}, expected {expected} by the rule")


def empty_cache(sublist: Sublist[int]) -> None:
    """A pattern with a wildcard comes and goes: no match is remembered over that."""
    sublist.insert("nowhere.*", -1)
    sublist.remove("nowhere.*", -1)


def pass_ns(sublist: Sublist[int], names: list[str]) -> float:
    """Nanoseconds for one match. The names are new strings each time, as from a socket."""
    fresh = [name.encode().decode() for name in names]
    match = sublist.match
    begun = time.perf_counter_ns()
    for name in fresh:
        match(name)
    return (time.perf_counter_ns() - begun) / len(fresh)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def main() -> None:
    table = Table("subscriptions", title="Matching a name", min_width=WIDTH // 2)
    for title in ("count", "found", "ns cold", "ns warm", "ns an insert", "bytes each"):
        table.add_column(title, justify="right")
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for rows in pool.map(rows_of, MIXES):
            for row in rows:
                table.add_row(*row)
            table.add_section()
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


if __name__ == "__main__":
    main()
