"""Frames of modtrace in the traceback of an error in the user's model: none, if tools can leave frames out."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked
from tests.support.small_modules import Failing

SOURCE = Path(modtrace.__file__).parent


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("in forward")


def ours(run: AbstractContextManager[object]) -> list[bool]:
    """Whether each modtrace frame is hidden in the tracebacks of an error in a forward and of one in a backward."""
    hidden = []
    model = nn.Sequential(nn.Sequential(Fails()))
    with run:
        with pytest.raises(KeyError, match="in forward") as forward:
            model(torch.ones(1))
        with pytest.raises(ValueError, match="on purpose") as backward:
            Failing.apply(nn.Linear(1, 1)(torch.ones(1))).backward()
    for caught in (forward, backward):
        for entry in caught.traceback:
            if SOURCE in Path(entry.path).parents:
                assert entry.frame.f_locals["__traceback_hide__"] is True
                hidden.append(entry.ishidden(caught))
    return hidden


def ours_alone(**options: object) -> list[bool]:
    """The same for a recording in a new process: wrappers of an earlier one stay in this process."""
    code = f"import modtrace; from {__name__} import ours; print(ours(modtrace.record(**{options!r})))"
    hidden: list[bool] = json.loads(run_forked("-c", code).stdout.lower())
    return hidden


def test_frames_of_an_engine_are_hidden(engine: EngineName) -> None:
    # One frame for each of three calls and one for the pass; the native engine has no frame.
    assert ours_alone(engine=engine) == ([True] * 4 if engine == "python" else [])


def test_frames_that_note_shapes_are_hidden(engine: EngineName) -> None:
    assert ours_alone(engine=engine, shapes=True) == [True] * (7 if engine == "python" else 3)


@pytest.mark.parametrize("tracker", [modtrace.ModuleTracker, modtrace.ModTracker])
def test_frames_of_a_tracker_are_hidden(tracker: type[modtrace.ModuleTracker]) -> None:
    hidden = ours(tracker())

    assert hidden == [True] * len(hidden)
    assert len(hidden) > 3
