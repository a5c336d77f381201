"""Lives of a bus among faults, by their seeds: every promise holds in each of them.

pytest tests/simulation --seed 17         one life, told as it happens
pytest tests/simulation --seeds 5000      so many

Rule 1: half of the lives are the same in each run, so that a change that breaks one shows who broke
it; the others are new ones, so that what is rare is found some day. With CI in the environment all
are the same: there a failure says something of the change. Whatever fails names its seed.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.simulation.run import live

IN_CI = bool(os.environ.get("CI"))
CHUNK = 8
"""Lives in one test, so that workers share them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        config = metafunc.config
        one, many = config.getoption("--seed"), config.getoption("--seeds")
        known = range(many) if one is None else range(one, one + 1)
        chunks = [tuple(known[at : at + CHUNK]) for at in range(0, len(known), CHUNK)]
        metafunc.parametrize("seeds", chunks, ids=lambda chunk: f"{chunk[0]}-{chunk[-1]}")


def test_what_is_promised_holds(seeds: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    tells = request.config.getoption("--seed") is not None
    for seed in seeds:
        # Workers must agree on the names of tests: which lives are new is decided here.
        if not tells and seed % 2 and not IN_CI:
            seed = random.SystemRandom().randrange(1 << 32)
        try:
            live(seed, tells=tells)
        except BaseException as error:
            error.add_note(f"seed {seed}; again: pytest tests/simulation -n 0 -s --seed {seed}")
            raise


def test_a_life_is_the_same_each_time() -> None:
    assert live(3).counts == live(3).counts
