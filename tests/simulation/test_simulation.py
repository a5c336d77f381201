"""Lives of a bus among faults, by their seeds: every promise holds in each of them.

pytest tests/simulation --seed 17         one life, told as it happens
pytest tests/simulation --seeds 5000      so many
"""

from __future__ import annotations

import pytest

from simulation.life import live

CHUNK = 8
"""Lives in one test, so that workers share them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        one, many = (metafunc.config.getoption(name) for name in ("--seed", "--seeds"))
        every = range(many) if one is None else range(one, one + 1)
        chunks = [every[at : at + CHUNK] for at in range(0, len(every), CHUNK)]
        metafunc.parametrize("seeds", chunks, ids=lambda chunk: f"{chunk[0]}-{chunk[-1]}")


def test_what_is_promised_holds(seeds: range, request: pytest.FixtureRequest) -> None:
    tells = request.config.getoption("--seed") is not None
    for seed in seeds:
        try:
            counts = live(seed, tells=tells).counts
        except BaseException as error:
            error.add_note(f"seed {seed}; again: pytest tests/simulation -n 0 -s --seed {seed}")
            raise
        assert counts["published"] > 0


def test_a_life_is_the_same_each_time() -> None:
    assert live(3).counts == live(3).counts
