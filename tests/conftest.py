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
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

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
if IN_CI:
    # hypothesis stores the constants of the sources there, by the hash of each file.
    set_hypothesis_home_dir(cache_folder() / "hypothesis")

# `CliRunner` would build all commands anew for each command that a test runs.
typer.testing._get_command = cache(typer.main.get_command)


@pytest.fixture(autouse=True)
def _check_logging_is_restored() -> Iterator[None]:
    """Fail a test that changes the logging set-up, which would hide logs from later tests."""
    logger = logging.getLogger("simplebus")
    original_state = logger.level, logger.propagate, logger.disabled, logger.manager.disable
    yield
    assert (
        logger.level,
        logger.propagate,
        logger.disabled,
        logger.manager.disable,
    ) == original_state


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="run one history of tests/simulation and print it")
    parser.addoption("--seeds", type=int, help="number of histories in tests/simulation")


def pytest_configure() -> None:
    """Store bytecode in the cache folder if Python is configured not to write any.

    Otherwise every worker and each of the hundreds of programs that tests start would compile
    again, which is a third of their time.
    """
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(cache_folder() / "compiled")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without garbage collection.

    Hardly any object that collection creates is garbage, and searching them would take 5 % of the
    time of all tests. `pytest_collection_finish` therefore excludes them from later runs as well.
    """
    gc.disable()
    try:
        import_in_rotated_order(session.config)
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    gc.freeze()


def import_in_rotated_order(config: pytest.Config) -> None:
    """Import all test files, each worker starting at a different file.

    pytest rewrites the assertions of a file when it is first imported. Workers that start at
    different files share this work. Does nothing if only a part of the tests is collected.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or not is_run_of_all_tests(config):
        return
    found = sorted(
        path for path in TESTS.rglob("test_*.py") if (path.parent / "__init__.py").exists()
    )
    first = len(found) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in found[first:] + found[:first]:
        # The collection reports import errors.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(TESTS).with_suffix("").parts))


def is_run_of_all_tests(config: pytest.Config) -> bool:
    return [Path(arg).resolve() for arg in config.args] == [TESTS]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long tests out of a run of all tests, unless `-m` selects tests.

    Early tests come first, so that no worker starts one when the others are finished.
    """
    if is_run_of_all_tests(config) and not config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if is_long(item)])
        items[:] = [item for item in items if not is_long(item)]
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


def is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a `loadgroup` scheduler that forgets completed work.

    The scheduler of xdist counts all work again after each test, which costs seconds per run.
    """
    from xdist.scheduler import LoadGroupScheduling

    class ForgettingScheduling(LoadGroupScheduling):
        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            work = self.assigned_work[node]
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(work[scope].values()):
                del work[scope]

    return ForgettingScheduling(config, log) if config.option.dist == "loadgroup" else None


def pytest_report_header() -> str:
    return f"hypothesis: {settings().max_examples} examples each"
