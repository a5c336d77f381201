"""Shared pytest set-up: hypothesis profiles, and hooks that make a full run faster.

`dev` is the default; HYPOTHESIS_PROFILE=many tries far more examples. A failure prints the
blob that reproduces it; `pytest --hypothesis-seed=N` replays a whole run. With CI in the
environment the examples are always the same, so that the result depends only on the change.
`--seed` and `--seeds` are for tests/simulation.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.cache_folder import cache_folder

TESTS = Path(__file__).resolve().parent
IN_CI = bool(os.environ.get("CI"))

# A state machine's first example pays for imports and numpy's warm-up: that is not slowness.
settings.register_profile(
    "dev",
    max_examples=20,
    deadline=None,
    print_blob=True,
    derandomize=IN_CI,
    database=None if IN_CI else settings.get_profile("default").database,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("many", settings.get_profile("dev"), max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


SEEDS = 1600 if IN_CI else 24
"""Histories of the simulation in a run of all tests: in CI, about two minutes on two cores."""


@pytest.fixture(autouse=True)
def _loggers_are_left_as_they_were() -> Iterator[None]:
    """Or tests behind this one hear nothing, if they happen to run in its process."""
    log = logging.getLogger("simplebus")
    before = log.level, log.propagate, log.disabled, log.manager.disable
    yield
    assert (log.level, log.propagate, log.disabled, log.manager.disable) == before


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="one life of tests/simulation, told as it happens")
    parser.addoption("--seeds", type=int, default=SEEDS, help="how many lives there")


def pytest_configure() -> None:
    """Keep what Python compiles, even where it is told to keep nothing.

    Else every worker and each of the hundreds of programs that tests start would do it again,
    which is a third of their time. It lies with what else is kept from run to run.
    """
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(cache_folder() / "compiled")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Next to nothing of what is made meanwhile is garbage. It is not looked through for any, now
    or later: that would take a twentieth of the time of all tests."""
    gc.disable()
    try:
        import_by_turns(session.config)
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    gc.freeze()


def import_by_turns(config: pytest.Config) -> None:
    """Begin at different files in different workers, if all are collected: so each is compiled by
    one of them, with its assertions, while the others compile others."""
    worker = getattr(config, "workerinput", None)
    if worker is None or [Path(each).resolve() for each in config.args] != [TESTS]:
        return
    found = sorted(
        path for path in TESTS.rglob("test_*.py") if (path.parent / "__init__.py").exists()
    )
    first = len(found) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in found[first:] + found[:first]:
        # What cannot be imported is told where it is collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(TESTS).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever takes long begins early: else the others have ended, and it is waited for."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a `loadgroup` scheduler that forgets completed work.

    The scheduler of xdist counts all work again after each test, which costs seconds per run.
    """
    from xdist.scheduler import LoadGroupScheduling

    class Forgetting(LoadGroupScheduling):
        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            work = self.assigned_work[node]
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(work[scope].values()):
                del work[scope]

    return Forgetting(config, log) if config.option.dist == "loadgroup" else None


def pytest_report_header() -> str:
    return f"hypothesis: {settings().max_examples} examples each"
