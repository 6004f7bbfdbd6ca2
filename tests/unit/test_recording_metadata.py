"""The machine and libraries that a recording notes at its start."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import modtrace
from modtrace.recording import capture as module
from modtrace.recording.capture import recording_metadata
from modtrace.reporting.clean_timeline import clean_metadata

CPU_INFO = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 7763 64-Core Processor\nflags\t: fpu\n"
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs, as Linux and the driver describe it."""
    (tmp_path / "cpuinfo").write_text(CPU_INFO)
    (tmp_path / "version").write_text(DRIVER)
    for bus in ("0000:07:00.0", "0000:0f:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        (tmp_path / "gpus" / bus / "information").write_text(
            "Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ:   \t\t 123\nGPU UUID: \t GPU-secret\n"
        )
    monkeypatch.setattr(module, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(module, "_NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(module, "_NVIDIA_GPUS", tmp_path / "gpus")
    return tmp_path


@pytest.mark.usefixtures("machine")
def test_hardware_and_libraries_are_noted_and_may_all_be_reported() -> None:
    import numpy

    metadata = recording_metadata("native", 64, False)

    assert metadata["cpu"] == "AMD EPYC 7763 64-Core Processor"
    assert metadata["gpu"] == "2 × NVIDIA A100-SXM4-80GB"
    assert metadata["gpu_driver"] == "535.104.05"
    assert f"numpy {numpy.__version__}" in str(metadata["libraries"]).split(", ")
    assert "secret" not in str(metadata)
    reported = clean_metadata(metadata)
    assert {*metadata} - {*reported} == {"pid", "rank", "program", "host"}
    assert reported["modtrace"] == modtrace.__version__


def test_facts_that_a_machine_does_not_give_are_left_out(machine: Path) -> None:
    for name in ("cpuinfo", "version"):
        (machine / name).unlink()
    (machine / "gpus").rename(machine / "none")

    assert {"cpu", "gpu", "gpu_driver"} & recording_metadata("native", 64, False).keys() == set()


def test_a_recording_has_them_in_its_timeline() -> None:
    with modtrace.record(engine="python", capacity=64) as recording:
        pass

    assert "libraries" in recording.timeline().metadata
    assert isinstance(recording.timeline().metadata["cpus"], int)


def test_libraries_that_are_loaded_during_a_recording_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    with modtrace.record(engine="python", capacity=64) as recording:
        before = recording.snapshot().metadata["libraries"]
        monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(__version__="1.0.31"))
        during = recording.snapshot().metadata["libraries"]
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.9.0"))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(__version__="4.0.0"))

    assert during == f"{before}, timm 1.0.31"
    assert recording.timeline().metadata["libraries"] == f"{before}, timm 1.0.31, vllm 0.9.0"
