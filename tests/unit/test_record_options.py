from __future__ import annotations

import inspect
import re
import signal
from typing import Any, get_args

import click
import pytest
import torch

import modtrace
from modtrace.autorecord import parse_variable
from modtrace.cli.commands.run import run_command
from modtrace.record_options import ENGINES, OPTIONS, EngineName, RecordOptions, _StepSchedule
from modtrace.recording import record

PARAMETERS = {name: value for name, value in inspect.signature(record).parameters.items() if name != "path"}
TEXTS: dict[str, tuple[str, Any]] = {
    "engine": ("python", "python"),
    "capacity": ("4096", 4096),
    "ring": ("/a/b.modtrace", "/a/b.modtrace"),
    "model": ("GPT", "GPT"),
    "max_steps": ("3", 3),
    "schedule": ("5,1,3,2", _StepSchedule(5, 1, 3, 2)),
    "shapes": ("true", True),
    "memory_interval": ("0.5", 0.5),
    "memory": ("1", True),
    "on_signal": ("SIGUSR1", signal.SIGUSR1),
    "stacks_on_signal": ("SIGUSR2", signal.SIGUSR2),
    "host_name": ("1", True),
    "strip_wrappers": ("false", False),
    "device_times": ("1", True),
    "device_depth": ("3", 3),
    "device_modules": ("GPT.blocks.*", "GPT.blocks.*"),
    "ranges": ("false", False),
    "flops": ("1", True),
    "workers": ("1", True),
    "keep": ("0", 0),
    "keep_when": ("step > 3x", "step > 3x"),
}


def test_record_options_table_and_signature_have_the_same_names_and_defaults() -> None:
    assert {option.name: option.default for option in OPTIONS} == {
        name: parameter.default for name, parameter in PARAMETERS.items()
    }
    assert set(RecordOptions.__annotations__) == set(PARAMETERS)
    assert get_args(EngineName) == ENGINES


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_option_can_be_given_in_the_variable_and_on_the_command_line(name: str) -> None:
    text, value = TEXTS[name]
    (option,) = (option for option in OPTIONS if option.name == name)
    flag = f"--{name.replace('_', '-')}"

    flag = f"--no-{name.replace('_', '-')}" if option.metavar is None and not value else flag
    context = run_command.make_context("run", [flag, *([] if option.metavar is None else [text]), "script.py"])

    assert context.params[name] == value
    assert parse_variable(f"{name}={text}", {}) == {name: value}


def test_options_that_are_not_given_are_as_of_record() -> None:
    params = run_command.make_context("run", ["script.py"]).params

    assert {name: params[name] for name in PARAMETERS} == {
        name: parameter.default for name, parameter in PARAMETERS.items()
    }


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("engine", "fast", "engine is 'fast'; it must be 'auto', 'native' or 'python'"),
        ("capacity", "many", "capacity is 'many'; it must be a whole number of events, 16 to 17,179,869,184"),
        ("capacity", "15", "capacity is 15; it must be a whole number of events, 16 to 17,179,869,184"),
        ("max_steps", "0", "0 is not in the range x>=1"),
        ("memory_interval", "-1", "'-1' is not a number of seconds, 0 or more"),
        ("memory_interval", "nan", "'nan' is not a number of seconds, 0 or more"),
        ("schedule", "5,1", "'5,1' is not wait,warmup,active,repeat: numbers of steps, and of cycles (0: without end)"),
        ("schedule", "5,1,0,1", "'5,1,0,1' records no step; the third number, active, must be 1 or more"),
        ("on_signal", "10", "'10' is not the name of a signal, as SIGUSR1"),
    ],
)
def test_a_text_that_is_no_value_is_refused_with_the_reason(name: str, text: str, fault: str) -> None:
    with pytest.raises(modtrace.RecordingError, match=re.escape(f"'{name}={text}' cannot be understood: {fault}")):
        parse_variable(f"{name}={text}", {})
    with pytest.raises(click.BadParameter) as raised:
        run_command.make_context("run", [f"--{name.replace('_', '-')}", text, "script.py"])
    assert raised.value.message == f"{fault}."


def test_a_flag_in_the_variable_is_true_or_false() -> None:
    assert parse_variable("shapes=False,host_name=0", {}) == {"shapes": False, "host_name": False}
    with pytest.raises(modtrace.RecordingError, match="'yes' is neither true nor false"):
        parse_variable("shapes=yes", {})


@pytest.mark.parametrize("numbers", [(5, 1, 3, 2), (1, 1, 1, 0), (0, 1, 2, 1)])
def test_a_schedule_given_as_text_is_that_of_torch(numbers: tuple[int, int, int, int]) -> None:
    wait, warmup, active, repeat = numbers
    torchs = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)

    schedule = parse_variable("schedule=" + ",".join(map(str, numbers)), {})["schedule"]

    assert [schedule(step) for step in range(40)] == [torchs(step) for step in range(40)]


def test_a_free_threaded_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else None)

    with pytest.raises(modtrace.RecordingError, match=r"this is a free-threaded build of CPython .*, which"):
        modtrace.record()
