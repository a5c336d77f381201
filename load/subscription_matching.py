"""Time and memory of subscription matching, from 10 to 1,000,000 subscriptions.

    python load/subscription_matching.py

Before timing, a sample of names is compared with the plain matching rule. As subscriptions grow, so
does the number of sites, while a name matches about as many subscriptions: the figures show the
cost of subscriptions, not of deliveries. Each round measures every size once. Memory is the growth
of the process's resident size, without the patterns' text.
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

# For `python load/subscription_matching.py`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from load.processes import LoadError
from simplebus.core.channel.pattern import matches
from simplebus.core.channel.subscription_index import SubscriptionIndex

COUNTS = (10, 1_000, 100_000, 1_000_000)
METERS_A_SITE = 8
NAMES = 1_000
ROUNDS = 41
WARM_PASSES = 5
SAMPLES_MAX = 200
CHECKS_MAX = 3_000_000
"""Maximum number of patterns compared before the first figure."""
MEMORY_COUNT_MIN = 100_000
"""Smaller sizes grow a process by pages rather than by subscriptions."""
PAGE_BYTES = 4096
WIDTH = 110


def literal_pattern(number: int) -> str:
    return f"site.{number // METERS_A_SITE}.meter.{number % METERS_A_SITE}.reading"


def mixed_pattern(number: int) -> str:
    """Return a pattern. Of eight per site, five are literal and three have wildcards."""
    site, meter = divmod(number, METERS_A_SITE)
    if meter == 5:
        return f"site.{site}.meter.*.reading"
    if meter == 6:
        return f"*.{site}.*.2.reading"
    if meter == 7:
        return f"site.{site}.#"
    return literal_pattern(number)


MIXES: dict[str, Callable[[int], str]] = {"literal": literal_pattern, "mixed": mixed_pattern}


class MatchingCase:
    """Number of subscriptions, with its measurements."""

    def __init__(self, patterns: list[str]) -> None:
        self.count = len(patterns)
        gc.collect()
        before = resident_bytes()
        started_at = time.perf_counter_ns()
        self.index = SubscriptionIndex[int]()
        for number, pattern in enumerate(patterns):
            self.index.insert(pattern, number)
        self.insert_ns = (time.perf_counter_ns() - started_at) / self.count
        gc.collect()
        self.bytes_each = (resident_bytes() - before) / self.count
        self.cold_ns: list[float] = []
        self.warm_ns: list[float] = []
        self.values_per_match: list[float] = []
        """Average matches per name, by round."""

    def measure(self, random: Random) -> None:
        """Measure one round of random names: once without the cache, then with it."""
        names = list(
            dict.fromkeys(literal_pattern(random.randrange(self.count)) for _ in range(NAMES))
        )
        empty_cache(self.index)
        self.cold_ns.append(ns_per_match(self.index, names))
        self.warm_ns.append(median(ns_per_match(self.index, names) for _ in range(WARM_PASSES)))
        self.values_per_match.append(
            sum(len(self.index.match(name)) for name in names) / len(names)
        )

    def row(self, mix: str) -> list[str]:
        """Return the row of the table."""
        return [
            mix,
            f"{self.count:,}",
            f"{median(self.values_per_match):.1f}",
            f"{median(self.cold_ns):,.0f}",
            f"{median(self.warm_ns):,.0f}",
            f"{self.insert_ns:,.0f}",
            f"{self.bytes_each:,.0f}" if self.count >= MEMORY_COUNT_MIN else "",
        ]


def measure_mix(mix: str) -> list[list[str]]:
    """Return the rows of one mix. Call it first in a fresh process."""
    random = Random(mix)
    patterns = [MIXES[mix](number) for number in range(COUNTS[-1])]
    # The largest first, so that its memory is not taken from memory freed by the others.
    cases = [MatchingCase(patterns[:count]) for count in reversed(COUNTS)][::-1]
    for case in cases:
        verify(case.index, patterns[: case.count], random)
    gc.freeze()
    for _ in range(ROUNDS):
        for case in cases:
            case.measure(random)
    return [case.row(mix) for case in cases]


def verify(index: SubscriptionIndex[int], patterns: list[str], random: Random) -> None:
    """Raise LoadError if matches are wrong."""
    for _ in range(max(2, min(SAMPLES_MAX, CHECKS_MAX // len(patterns)))):
        name = literal_pattern(random.randrange(len(patterns)))
        expected = [number for number, pattern in enumerate(patterns) if matches(pattern, name)]
        for found in (sorted(index.match(name)), sorted(index.match(name))):
            if found != expected or not found:
                raise LoadError(f"{name} found {found}, expected {expected} by the rule")


def empty_cache(index: SubscriptionIndex[int]) -> None:
    """Clear the cache by adding and removing a wildcard pattern."""
    index.insert("nowhere.*", -1)
    index.remove("nowhere.*", -1)


def ns_per_match(index: SubscriptionIndex[int], names: list[str]) -> float:
    """Return nanoseconds per match. The names are new strings, as from a socket."""
    new_names = [name.encode().decode() for name in names]
    match = index.match
    started_at = time.perf_counter_ns()
    for name in new_names:
        match(name)
    return (time.perf_counter_ns() - started_at) / len(new_names)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def main() -> None:
    table = Table("subscriptions", title="Matching a name", min_width=WIDTH // 2)
    for title in ("count", "found", "ns cold", "ns warm", "ns an insert", "bytes each"):
        table.add_column(title, justify="right")
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for rows in pool.map(measure_mix, MIXES):
            for row in rows:
                table.add_row(*row)
            table.add_section()
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


if __name__ == "__main__":
    main()
