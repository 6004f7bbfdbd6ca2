"""The options of a recording, given in Python, as text and on the command line: one table for all."""

from __future__ import annotations

import inspect
import re
import signal
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import torch

import modtrace
from modtrace.cli.commands.run import run_command
from modtrace.integrations.auto_recording import parse_variable
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
    "device_times": ("true", True),
    "ranges": ("false", False),
    "flops": ("1", True),
    "workers": ("1", True),
    "keep": ("0", 0),
    "keep_when": ("step > 3x", "step > 3x"),
    "role": ("rollout", "rollout"),
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


def test_options_that_are_not_given_have_the_defaults_of_record() -> None:
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
        ("max_steps", "0", "max_steps is 0; it must be a whole number, 1 or more"),
        ("keep", "-1", "keep is -1; it must be a whole number, 0 or more"),
        ("keep", "few", "keep is 'few'; it must be a whole number, 0 or more"),
        ("memory_interval", "-1", "'-1' is not a number of seconds, 0 or more"),
        ("memory_interval", "nan", "'nan' is not a number of seconds, 0 or more"),
        ("schedule", "5,1", "'5,1' is not wait,warmup,active,repeat: numbers of steps, and of cycles (0: without end)"),
        ("schedule", "5,1,0,1", "'5,1,0,1' records no step; the third number, active, must be 1 or more"),
        ("on_signal", "10", "'10' is not the name of a signal, such as SIGUSR1"),
    ],
)
def test_an_invalid_value_is_refused_with_the_reason(name: str, text: str, fault: str) -> None:
    with pytest.raises(modtrace.RecordingError, match=re.escape(f"'{name}={text}' cannot be understood: {fault}")):
        parse_variable(f"{name}={text}", {})
    with pytest.raises(click.BadParameter) as raised:
        run_command.make_context("run", [f"--{name.replace('_', '-')}", text, "script.py"])
    assert raised.value.message == f"{fault}."


@pytest.mark.parametrize(
    ("flags", "device_times"),
    [
        ([], False),
        (["--device-times"], True),
        (["--device-times", "--device-depth", "3"], "*,3"),
        (["--device-depth", "1"], "*,1"),
        (["--device-modules", "GPT.*"], "GPT.*"),
        (["--device-times", "--device-modules", "GPT.*", "--device-depth", "4"], "GPT.*,4"),
    ],
)
def test_flags_of_device_times_are_one_argument_of_record(
    flags: list[str], device_times: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(arguments: dict[str, Any], **_: object) -> None:
        raise KeyError(arguments["device_times"])

    monkeypatch.setattr("modtrace.integrations.auto_recording.AutoRecording", make)

    with pytest.raises(KeyError) as raised:
        run_command.main(["-o", str(tmp_path / "out.json"), *flags, __file__], standalone_mode=False)

    assert raised.value.args == (device_times,)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("0", False), ("1", 1), ("GPT.*", "GPT.*")]
)
def test_device_times_in_the_variable_are_a_flag_a_depth_or_a_pattern(text: str, value: bool | int | str) -> None:
    parsed = parse_variable(f"device_times={text},flops=1", {})["device_times"]

    assert parsed == value
    assert type(parsed) is type(value)
    assert parse_variable("device_times=GPT.*,3,flops=1", {}) == {"device_times": "GPT.*,3", "flops": True}


def test_a_flag_in_the_variable_is_true_or_false() -> None:
    assert parse_variable("shapes=False,host_name=0", {}) == {"shapes": False, "host_name": False}
    with pytest.raises(modtrace.RecordingError, match="'yes' is neither true nor false"):
        parse_variable("shapes=yes", {})


@pytest.mark.parametrize("numbers", [(5, 1, 3, 2), (1, 1, 1, 0), (0, 1, 2, 1)])
def test_a_schedule_given_as_text_is_torchs_schedule(numbers: tuple[int, int, int, int]) -> None:
    wait, warmup, active, repeat = numbers
    torchs = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)

    schedule = parse_variable("schedule=" + ",".join(map(str, numbers)), {})["schedule"]

    assert [schedule(step) for step in range(40)] == [torchs(step) for step in range(40)]


def test_a_free_threaded_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else None)

    with pytest.raises(modtrace.RecordingError, match=r"this is a free-threaded build of CPython .*, which"):
        modtrace.record()
