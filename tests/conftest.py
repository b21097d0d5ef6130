"""Every backend runs in every test: a missing one fails. Without a GPU, Triton runs in its interpreter, and the CUDA
kernels on fibers (simt/)."""

from __future__ import annotations

import atexit
import functools
import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

gc.disable()  # until everything is imported

import torch  # noqa: E402

if not torch.cuda.is_available():
    # Read by triton when it is imported, which no test module does before this.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest  # noqa: E402
import simt.kernels  # noqa: E402
import typer.testing  # noqa: E402
from support import BACKENDS, FAST_BACKENDS, TREE_BACKENDS, pairwise, rotation  # noqa: E402
from support.frames import with_room  # noqa: E402
from support.suite_cost import SuiteCost, has_everyday  # noqa: E402

if not torch.cuda.is_available():
    from support.interpreter import patch_once_a_launch

    simt.kernels.serve()
    patch_once_a_launch()

# Typer would make all commands again, with hundreds of options, for each line that a test calls.
typer.testing._get_command = functools.cache(typer.testing._get_command)
pytest.Function.runtest = with_room(pytest.Function.runtest)
torch.set_num_threads(1)  # the tests run in several processes (pytest -n); what threads change has a test of its own


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="every case of every test, but for those of markers")


def pytest_configure(config: pytest.Config) -> None:
    if has_everyday(config):
        config.pluginmanager.register(SuiteCost(config))


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    commits, reached = rotation.today(items)
    if not torch.cuda.is_available():
        leave_to_nightly(items)
        pairwise.mark(items, rotation.APART, rotation.DEAR, reached, commits // rotation.EVERY)
    rotation.mark(config, items, commits, reached)


def leave_to_nightly(items: list[pytest.Item]) -> None:
    """Triton's interpreter takes up to a second for a sequence: without a GPU, of every test's cases on it the first
    and then every twelfth run every day, the others nightly. Of those on fibers, it is every fourth: they run the
    mathematics of the backend ``cpu``. None on the interpreter run every day of test_trees*.py, which have hundreds
    of sequences where test_trees_triton.py has few, and of test_invariance.py, whose cases are pairs of steps."""
    seen: Counter = Counter()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        trees = item.path.name.startswith("test_trees")
        of_trees = [params.get(name) for name in ("tree_backend", "fast") if trees]
        if "triton" in (params.get("backend"), params.get("fast_backend")):
            backend, each = "triton", None if item.path.name == "test_invariance.py" else 12
        elif "triton" in of_trees:
            backend, each = "triton", None
        elif "cuda" in (params.get("backend"), params.get("fast_backend"), *of_trees):
            backend, each = "cuda", 4
        else:
            continue
        if each is None or seen[item.function, backend] % each:
            item.add_marker(pytest.mark.nightly)
        seen[item.function, backend] += 1


def pytest_collection_finish() -> None:
    """What is imported by now stays. The garbage collector would go through its half a million objects again and again,
    for half of the time of a batch of thousands of rows, and pytest's own calls at the end for seconds."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # so that libraries find nothing leaked at the end
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """transformers 5.24 asks for PEFT 0.22 where it loads adapters, which is not out. What fails by that is skipped."""
    report = yield
    told = "".join(text for _, text in report.sections) + (report.longreprtext if report.failed else "")
    if report.failed and "The version of PEFT you are using is not compatible" in told:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "Skipped: transformers asks for a newer PEFT")
    return report


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=FAST_BACKENDS)
def fast_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=TREE_BACKENDS)
def tree_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def keep_thread_count():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pair():
    """(target, draft, tokenizer), embedded. Not to be changed."""
    from specdec import load_embedded_pair

    return load_embedded_pair()


@pytest.fixture(scope="session")
def folders(pair, tmp_path_factory) -> tuple[object, ...]:
    """The options that name a tiny random pair on the disk."""
    from support.commands import save

    path = tmp_path_factory.mktemp("models")
    return ("--target", save(path / "target", 0, tokenizer=pair[2]), "--draft", save(path / "draft", 1))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct. What asks for it is marked ``real``."""
    from support.real_models import real_folder

    return real_folder("SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The folder of Gemma 3 270M, a base model. What asks for it is marked ``real``."""
    from support.real_models import real_folder

    return real_folder("gemma-3-270m")


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, list[tuple[int, int]]]]:
    """Every cache that is made, and its storages as it was new; those of two slots measure."""
    from specdec import StaticKVCache
    from support.allocations import allocated

    made: list = []
    allocate = StaticKVCache.allocate

    def spy(self, *arguments):
        allocate(self, *arguments)
        made.append((self, allocated(self)))

    monkeypatch.setattr(StaticKVCache, "allocate", spy)
    return made
