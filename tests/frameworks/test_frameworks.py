"""Every framework × engine: the loss is the same, nothing is missed, and nothing is told twice."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest

from modtrace.record_options import EngineName
from tests.support.test_scale import EFFORT

from .judge import Run, Verdict, judge
from .ranks import TRAININGS
from .table import ENGINES, judge_on_ranks
from .trainers import TRAINERS, import_torchvision

SOON = ("transformers_trainer", "lightning_automatic", "accelerate_accumulation", "peft_lora", "timm_vit")
"""One of each library; the others are tried in full."""


@pytest.fixture(
    params=[pytest.param(train, marks=() if train.__name__ in SOON else pytest.mark.full) for train in TRAINERS],
    ids=[train.__name__ for train in TRAINERS],
)
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
    return judge_on_ranks(("native",) if EFFORT == "quick" else ENGINES)


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("engine_name", ["native", pytest.param("python", marks=pytest.mark.full)])
@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.__name__)
def test_two_ranks(
    verdicts: dict[tuple[str, str], Verdict], training: Callable[[], Run], engine_name: EngineName
) -> None:
    assert verdicts[training.__name__, engine_name].faults == {}
