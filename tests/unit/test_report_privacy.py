"""What a report leaves out: texts, metadata, events, lines of the environment; each by cases worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modtrace.report.aliases import AliasedNames, ReportNames
from modtrace.report.clean_timeline import clean_timeline
from modtrace.report.event_filter import EventFilter
from modtrace.report.redact import Redactor
from modtrace.report.system_info import allowed_lines, environment
from modtrace.timeline import Columns, CounterSeries, Mark, Name, Process, Timeline, Track
from tests.support.python_process import run_python

ENVIRON = {
    "HOME": "/home/Jane Doe",
    "USER": "janed",
    "HOSTNAME": "gpu-box.corp.example",
    "HF_TOKEN": "hf_abcdefgh",
    "API_KEY": "short",
    "LANG": "en_US.UTF-8",
}


@pytest.fixture
def redact() -> Redactor:
    return Redactor.of_this_machine(ENVIRON)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPT.transformer.h.0", "GPT.transformer.h.0"),
        ("a/b and/or 3 / 4 // 5 /x", "a/b and/or 3 / 4 // 5 /x"),
        ("void f<4, A&>(int, B*)::{lambda(float)#1}", "void f<4, A&>(int, B*)::{lambda(float)#1}"),
        ("/home/Jane Doe/run/x.pt", "<path>"),
        ("below /home/jane doe", "below ~"),
        ("Net.inner./data/janed/x.0", "Net.inner.<path>"),
        ("/data/janed/gpu-box/x", "<path>"),
        ("saved to /data/run 7/x.pt", "saved to <path> 7/x.pt"),
        ("open(/mnt/secret/train.py): 12", "open(<path>): 12"),
        ("~/secret", "<path>"),
        ("~other/secret", "<path>"),
        ("../lib/secret/x", "<path>"),
        (r"C:\Users\jane\x.py", "<path>"),
        (r"\\server\share\x", "<path>"),
        ("s3://bucket/secret?key=1", "<url>"),
        ("from jane@corp.example on", "from <address> on"),
        ("janed's model", "<user>'s model"),
        ("JaneD_head_1", "<user>_head_1"),
        ("janedoe", "janedoe"),
        ("on gpu-box", "on <host>"),
        ("on GPU-BOX.corp.example", "on <host>"),
        ("janed@gpu-box", "<user>@<host>"),
        ("xhf_abcdefghx", "x<secret>x"),
        ("short en_US.UTF-8", "short en_US.UTF-8"),
    ],
)
def test_names_of_persons_and_machines_are_replaced(redact: Redactor, text: str, expected: str) -> None:
    assert redact(text) == expected


def test_names_of_nobody_are_kept() -> None:
    redact = Redactor.of_this_machine({"HOME": "/root", "USER": "root", "HOSTNAME": "localhost"})

    assert redact("root: Net on localhost") == "root: Net on localhost"


# AliasedNames.


def test_aliases_keep_the_structure(redact: Redactor) -> None:
    names = AliasedNames(redact)

    assert [
        names.name(name)
        for name in [
            Name("Net", "Net", "Net"),
            Name("h.0: Block", "Net.h.0", "Block"),
            Name("attn: Attention", "Net.h.0.attn", "Attention"),
            Name("h.1: Block", "Net.h.1", "Block"),
            Name("attn: Attention", "Net.h.1.attn", "Attention"),
            Name("x.attn: Net", "Net.x.attn", "Net"),
        ]
    ] == [
        Name("Class1", "Class1", "Class1"),
        Name("m1.0: Class2", "Class1.m1.0", "Class2"),
        Name("m2: Class3", "Class1.m1.0.m2", "Class3"),
        Name("m1.1: Class2", "Class1.m1.1", "Class2"),
        Name("m2: Class3", "Class1.m1.1.m2", "Class3"),
        Name("m3.m2: Class1", "Class1.m3.m2", "Class1"),
    ]
    assert names.fqn("Net.h.1.attn") == "Class1.m1.1.m2"


def test_aliases_of_modules_that_the_profiler_numbered(redact: Redactor) -> None:
    names = AliasedNames(redact)

    assert names.name(Name("Net", "Net_0", "Net")) == Name("Class1", "Class1_0", "Class1")
    assert names.name(Name("Lin_3: Lin", "Net_0.Lin_3", "Lin")) == Name(
        "Class2_3: Class2", "Class1_0.Class2_3", "Class2"
    )


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("operation", "aten::addmm", "aten::addmm"),
        ("operation", "AddmmBackward0", "AddmmBackward0"),
        (
            "operation",
            "autograd::engine::evaluate_function: AddmmBackward0",
            "autograd::engine::evaluate_function: AddmmBackward0",
        ),
        (
            "operation",
            "autograd::engine::evaluate_function: SecretBackward",
            "autograd::engine::evaluate_function: operation 1",
        ),
        ("operation", "acme::secret", "operation 1"),
        ("operation", "Optimizer.step#Secret.step", "Optimizer.step#Class1.step"),
        ("operation", "ProfilerStep#12", "ProfilerStep#12"),
        ("operation", "eval of secret", "operation 1"),
        ("kernel", "void at::native::elementwise<4, Secret>(int)", "void at::native::elementwise"),
        ("kernel", "secret_kernel(float*)", "kernel 1"),
        ("kernel", "Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH (Device -> Pageable)"),
        ("thread", "MainThread", "MainThread"),
        ("thread", "Thread-3 (secret_loader)", "Thread-3"),
        ("thread", "pt_autograd_0", "pt_autograd_0"),
        ("thread", "secret", "thread 1"),
        ("mark", "step 3", "step 3"),
        ("mark", "secret 3", "mark 1"),
        ("counter", "process RSS", "process RSS"),
        ("counter", "cuda:1 reserved", "cuda:1 reserved"),
        ("counter", "secret", "counter 1"),
    ],
)
def test_names_of_torchs_own_have_no_alias(redact: Redactor, kind: str, text: str, expected: str) -> None:
    assert getattr(AliasedNames(redact), kind)(text) == expected


# Timelines.


def test_every_field_of_a_timeline_is_chosen(redact: Redactor) -> None:
    process = Process(7, 3, "train.py --token hf_abcdefgh")
    columns = Columns.of(
        start=[5, 6], end=[9, 8], name=[0, 1], phase=[0, 0], track=[0, 0], depth=[0, 1], parent=[-1, 0],
        call=[0, 0], step=[0, 0], link=[-1, -1], complete=[1, 1],
    )  # fmt: skip
    timeline = Timeline(
        columns,
        [Name("Net", "Net", "Net"), Name("janed: Head", "Net.janed", "Head")],
        [Track("forward", "loader of janed", 8, process)],
        marks=[Mark(7, "mark", "see /data/x/y"), Mark(7, "sync", "modtrace.sync#janed"), Mark(8, "step", "step 0")],
        counters=[CounterSeries("RSS of janed", "bytes", process, np.array([1]), np.array([2]))],
        metadata={
            "torch": "2.13.0+cpu", "python": "3.11 on janed's box", "engine": "native", "modtrace": 3, "capacity": 64,
            "host": "0123456789ab", "pid": 7, "argv": ["x"],
        },
        span_args={
            0: {"shapes": "float32[2, 8], mask=bool[], …", "doc": "secret"},
            1: {"shapes": "float32[2] # secret", "own": "secret"},
        },
    )  # fmt: skip

    clean = clean_timeline(timeline, ReportNames(redact))

    assert clean.columns is columns
    assert clean.names == [Name("Net", "Net", "Net"), Name("<user>: Head", "Net.<user>", "Head")]
    assert clean.tracks == [Track("forward", "loader of <user>", 8, Process(7, 3))]
    assert clean.marks == [Mark(7, "mark", "see <path>"), Mark(8, "step", "step 0")]
    assert [(c.name, c.unit, c.process) for c in clean.counters] == [("RSS of <user>", "bytes", Process(7, 3))]
    assert clean.metadata == {"torch": "2.13.0+cpu", "engine": "native", "capacity": 64}
    assert clean.span_args == {0: {"shapes": "float32[2, 8], bool[], …"}}


# Events of the profiler.

Event = dict[str, Any]


def slice_(category: str, name: str, args: Event) -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 2, "ts": 1.5, "dur": 2, "args": args}


def metadata(kind: str, **args: str) -> Event:
    return {"ph": "M", "name": kind, "pid": 1, "tid": 9, "args": args}


KEPT: list[tuple[Event, Event]] = [
    (
        slice_(
            "cpu_op",
            "aten::mm",
            {
                "External id": 3,
                "Input Dims": [[2, 3], [], "x"],
                "Input type": ["float", "__torch__.secret.Config"],
                "Concrete Inputs": ["", "/home/x"],
                "Sequence number": 4,
                "Call stack": "train.py(3): main",
                "device": "secret",
            },
        ),
        slice_("cpu_op", "aten::mm", {"External id": 3, "Input type": ["float", "other"], "Sequence number": 4}),
    ),
    (
        slice_(
            "kernel",
            "k<float>",
            {
                "grid": [8, 1, 1],
                "Collective name": "all_reduce",
                "Process Group Description": "janed's",
                "dtype": "Float",
                "Process Group Ranks": "[0, 1]",
                "username": "janed",
                "kernel_file": "/x/y",
            },
        ),
        slice_(
            "kernel",
            "k<float>",
            {"grid": [8, 1, 1], "Collective name": "all_reduce", "dtype": "Float", "Process Group Ranks": "[0, 1]"},
        ),
    ),
    (
        slice_("python_function", "nn.Module: Linear_12", {"Python id": 1, "Python module id": 2, "file": "x.py"}),
        slice_("python_function", "nn.Module: Linear_12", {"Python id": 1, "Python module id": 2}),
    ),
    (slice_("user_annotation", "of janed", {}), slice_("user_annotation", "of <user>", {})),
    (slice_("cuda_runtime", "my secret", {}), slice_("cuda_runtime", "runtime call", {})),
    (metadata("process_name", name="train.py"), metadata("process_name", name="python")),
    (metadata("thread_name", name="thread 9 (train_janed)"), metadata("thread_name", name="thread 9")),
    (
        metadata("thread_name", name="thread 9 (pt_autograd_0)"),
        metadata("thread_name", name="thread 9 (pt_autograd_0)"),
    ),
    (metadata("process_labels", labels="janed"), metadata("process_labels")),
    (
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 3, "bp": "e", "pid": 0, "tid": 7, "ts": 1, "args": {"x": "y"}},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 3, "bp": "e", "pid": 0, "tid": 7, "ts": 1},
    ),
    (
        {"ph": "s", "cat": "call", "name": "backward", "id": 3, "pid": 1, "tid": 7, "ts": 1},
        {"ph": "s", "cat": "call", "name": "backward", "id": 3, "pid": 1, "tid": 7, "ts": 1},
    ),
    (
        slice_("forward", "Net", {"fqn": "Net", "module_class": "Net", "complete": False, "call": 1, "shapes": "x"})
        | {"flow_out": True, "bind_id": 4294967299, "flow_in": "janed"},
        slice_("forward", "Net", {"fqn": "Net", "module_class": "Net", "complete": False, "call": 1})
        | {"flow_out": True, "bind_id": 4294967299},
    ),
    (
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1, "args": {}},
    ),
]


@pytest.mark.parametrize(("event", "expected"), KEPT)
def test_known_fields_of_an_event_are_kept(redact: Redactor, event: Event, expected: Event) -> None:
    assert EventFilter(ReportNames(redact))(event) == expected


@pytest.mark.parametrize(
    "event",
    [
        "text",
        {"ph": "X", "cat": "secret", "name": "x", "pid": 1, "tid": 1, "ts": 1, "dur": 1},
        {"ph": "X", "name": "secret", "pid": 1, "tid": 1, "ts": 1, "dur": 1},
        {"ph": "i", "name": "secret", "pid": 1, "tid": 1, "ts": 1},
        {"ph": "X", "cat": "python_function", "name": "train.py(3): main", "pid": 1, "tid": 1, "ts": 1, "dur": 1},
        {
            "ph": "X",
            "cat": "python_function",
            "name": "nn.Module: secret of /x/y",
            "pid": 1,
            "tid": 1,
            "ts": 1,
            "dur": 1,
        },
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": "secret", "tid": 1, "ts": 1, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": "secret", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": 3, "pid": 1, "tid": 1, "ts": 1, "dur": 1},
        {"ph": "M", "name": "secret", "pid": 1, "tid": 1, "args": {"name": "secret"}},
        {"ph": "s", "cat": "secret", "name": "x", "id": 1, "pid": 1, "tid": 1, "ts": 1},
        {"ph": "s", "cat": "fwdbwd", "name": "x", "id": "secret", "pid": 1, "tid": 1, "ts": 1},
        {"ph": "N", "name": "secret", "id": 1, "ts": 1, "pid": 1, "tid": 1},
    ],
)
def test_an_unknown_event_is_left_out(redact: Redactor, event: object) -> None:
    event_filter = EventFilter(ReportNames(redact))

    assert event_filter(event) is None
    assert event_filter.dropped == 1


# The environment.


def test_the_lines_of_collect_env_that_are_told() -> None:
    text = """\
Collecting environment information...
PyTorch version: 2.13.0+cu130
OS: Debian GNU/Linux 12 (bookworm) (x86_64)
Python version: 3.11.7 (main, built by janed@box, Jan 1) [GCC 12.2.0] (64-bit runtime)
Python platform: Linux-6.1.0-janed-x86_64
CUDA_MODULE_LOADING set to: /secret
GPU models and configuration: GPU 0: NVIDIA A100-SXM4-80GB
GPU 1: NVIDIA A100-SXM4-80GB
GPU secret: /x
cuDNN version: Probably one of the following:
/usr/lib/janed/libcudnn.so.9.1.0
/usr/lib/janed/libsecret.so.9.1.0
Caching allocator config: secret
Is CUDA available: True
Is debug build: secret
CPU(s):                                  8
Model name:                              AMD EPYC
Flags:                                   fpu vme
Hostname: box
[pip3] numpy==2.4.6
[pip3] torch==2.13.0+cu130
[pip3] torch-acme-secret==1.0
[pip3] torchvision==0.2 (/home/janed/vision)
[pip3] torchaudio @ file:///home/janed/audio
[conda] numpy                     1.26.4          py311h  https://user:token@conda.example
[pip3] acme==1.0
"""

    assert list(allowed_lines(text)) == [
        "PyTorch version: 2.13.0+cu130",
        "OS: Debian GNU/Linux 12 (bookworm) (x86_64)",
        "Python version: 3.11.7",
        "GPU models and configuration: GPU 0: NVIDIA A100-SXM4-80GB",
        "GPU 1: NVIDIA A100-SXM4-80GB",
        "cuDNN version: Probably one of the following",
        "libcudnn.so.9.1.0",
        "Is CUDA available: True",
        "CPU(s): 8",
        "Model name: AMD EPYC",
        "numpy 2.4.6",
        "torch 2.13.0+cu130",
        "torchvision 0.2",
        "numpy 1.26.4",
    ]


def of_another_torch(folder: Path, source: str, timeout_s: float = 30) -> str:
    """The environment where `torch.utils.collect_env` is this source."""
    (folder / "torch/utils").mkdir(parents=True)
    (folder / "torch/__init__.py").touch()
    (folder / "torch/utils/__init__.py").touch()
    (folder / "torch/utils/collect_env.py").write_text(source)
    code = f"from modtrace.report.system_info import environment; print(environment(str, {timeout_s}))"
    environ = {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2] / 'src'}", "PATH": "/usr/bin:/bin"}
    return run_python("-c", code, env=environ).stdout


def test_torchs_report_may_hang(tmp_path: Path) -> None:
    # The pipe stays open as long as one of them lives: the test ends only if all were ended.
    source = "import subprocess, time\ndef main():\n    subprocess.Popen(['sleep', '600'])\n    time.sleep(600)\n"

    assert "torch.utils.collect_env took more than 0.5 s and was stopped" in of_another_torch(tmp_path, source, 0.5)


def test_torchs_report_may_fail(tmp_path: Path) -> None:
    text = of_another_torch(tmp_path, "def main():\n    raise RuntimeError('secret')\n")

    assert "torch.utils.collect_env failed (1)" in text
    assert "secret" not in text


def test_the_environment_says_what_is_installed() -> None:
    text = environment(str)

    assert text.startswith("The environment in which this report was made:\n\nmodtrace ")
    for line in ("numpy ", "PyTorch version: ", "CPU(s): "):
        assert f"\n{line}" in text
