"""Every framework × engine: the loss is the same, nothing is missed, and nothing is told twice."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest

from modtrace.track.engine import EngineName

from .judge import Run, Verdict, judge
from .ranks import TRAININGS
from .table import judge_on_ranks
from .trainers import TRAINERS, import_torchvision


@pytest.fixture(params=TRAINERS, ids=lambda train: train.__name__)
def train(request: pytest.FixtureRequest) -> Callable[[], Run]:
    training: Callable[[], Run] = request.param
    library = training.__name__.partition("_")[0]
    if importlib.util.find_spec(library) is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{library} is not installed")
        pytest.skip(f"{library} is not installed: pip install --group frameworks")
    return training


@pytest.mark.filterwarnings("default")  # libraries warn of each other; those that recording adds are counted
def test_a_library(train: Callable[[], Run], engine: EngineName) -> None:
    import_torchvision()

    assert judge(train, engine).faults == {}


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, str], Verdict]:
    return judge_on_ranks()


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("engine_name", ["native", "python"])
@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.__name__)
def test_two_ranks(
    verdicts: dict[tuple[str, str], Verdict], training: Callable[[], Run], engine_name: EngineName
) -> None:
    assert verdicts[training.__name__, engine_name].faults == {}
