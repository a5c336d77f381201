"""Random runs of a bus with faults: every promise must hold in each of them.

    pytest tests/simulation --seed 17         one run, with a trace
    pytest tests/simulation --seeds 5000      this many runs
    python -m tests.simulation.nightly        100,000 new runs on all cores

Half of the seeds are fixed, so that a failure shows the change that caused it. The others are
random, so that rare failures are found some day; in CI all are fixed. A failure names its seed.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.simulation.run import run_simulation

IN_CI = bool(os.environ.get("CI"))
SEEDS = 640
"""Runs in all tests: two minutes on two cores."""
CHUNK = 8
"""Runs per test, so that pytest workers share them."""
SHORT_COUNT = 40
"""The other runs are long tests, unless the command line gives a number."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        config = metafunc.config
        single_seed, seed_count = config.getoption("--seed"), config.getoption("--seeds")
        seeds = range(seed_count or SEEDS)
        if single_seed is not None:
            seeds = range(single_seed, single_seed + 1)
        is_default = single_seed is None and seed_count is None
        chunks = [
            pytest.param(
                tuple(seeds[start : start + CHUNK]),
                marks=pytest.mark.long if is_default and start >= SHORT_COUNT else (),
                id=f"{seeds[start]}-{seeds[start : start + CHUNK][-1]}",
            )
            for start in range(0, len(seeds), CHUNK)
        ]
        metafunc.parametrize("seeds", chunks)


def test_promises_hold_under_faults(seeds: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    is_verbose = request.config.getoption("--seed") is not None
    for seed in seeds:
        # Workers must agree on the names of tests, so the random seeds are drawn here.
        if not is_verbose and seed % 2 and not IN_CI:
            seed = random.SystemRandom().randrange(1 << 32)
        try:
            run_simulation(seed, is_verbose=is_verbose)
        except BaseException as error:
            error.add_note(f"seed {seed}; again: pytest tests/simulation -n 0 -s --seed {seed}")
            raise


def test_runs_are_reproducible() -> None:
    assert run_simulation(3).counts == run_simulation(3).counts
