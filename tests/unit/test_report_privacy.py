"""A report leaves out private texts, metadata, events and lines of the environment; cases worked out by hand."""

from __future__ import annotations

import gzip
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modtrace
from modtrace import Timeline
from modtrace.reporting.clean_profile import EventFilter
from modtrace.reporting.clean_timeline import (
    REPORT_START_NS,
    IdNumbers,
    clean_metadata,
    clean_timeline,
    environment_text,
    without_identity,
)
from modtrace.reporting.names import AliasedNames, Redactor, ReportNames
from modtrace.ring import Kind
from modtrace.ring.event_text import RangeCategory, range_text
from modtrace.timeline import BackwardPass, CounterSeries, Group, Mark, Name, Process, Slices, Track
from modtrace.timeline.contents import STEP_NOTES
from modtrace.timeline.slices import DTYPES
from tests.support.event_script import EventScript
from tests.support.other_kinds import with_passes
from tests.support.timelines import build_timeline, with_args
from tests.unit.test_findings import training

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
        ("Net.hf_qWeRtYuIoPaSdFgHjKlZxC", "Net.<secret>"),
        ("ghp_0123456789abcdefghijABCD, sk-proj-0123456789_abcdefghij", "<secret>, <secret>"),
        ("key AKIAIOSFODNN7EXAMPLE", "key <secret>"),
        ("hf_model.task-hf_bert_for_causal_lm_head", "hf_model.task-hf_bert_for_causal_lm_head"),
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


BEFORE = "compiled before the first recording (record from before its first call)"


def test_every_field_of_a_timeline_is_chosen(redact: Redactor) -> None:
    process = Process(7, 3, "train.py --token hf_abcdefgh")
    columns = Slices.of(
        start=[5, 6], end=[9, 8], name=[0, 1], phase=[0, 0], track=[0, 0], depth=[0, 1], parent=[-1, 0],
        call=[0, 0], step=[0, 0], link=[-1, -1], complete=[1, 1],
    )  # fmt: skip
    timeline = with_args(Timeline(
        columns,
        [Name("Net", "Net", "Net"), Name("janed: Head", "Net.janed", "Head")],
        [Track("forward", "loader of janed", 8, process)],
        marks=[Mark(7, "mark", "see /data/x/y"), Mark(7, "sync", "modtrace.sync#janed"), Mark(8, "step", "step 0")],
        counters=[CounterSeries("RSS of janed", "bytes", process, np.array([1]), np.array([2]))],
        metadata={
            "torch": "2.13.0+cpu", "python": "3.11 on janed's box", "engine": "native", "modtrace": 3, "capacity": 64,
            "host": "0123456789ab", "pid": 7, "argv": ["x"],
        },
    ), {
            0: {
                "shapes": "float32[2, 8], mask=bool[], …", "doc": "secret", "compiled_unknown": BEFORE,
                "trigger": "gc.collect()",
            },
            1: {
                "shapes": "float32[2] # secret", "own": "secret",
                "compiled_modules": "janed: Head", "compiled_unknown": "secret", "trigger": "secret",
            },
        })  # fmt: skip
    timeline = with_passes(timeline, [BackwardPass(5, 8, "loader of janed", 8, process, complete=False)])

    clean = clean_timeline(timeline, ReportNames(redact))

    assert all(getattr(clean.slices, name) is getattr(timeline.slices, name) for name in DTYPES)
    assert clean.names == [Name("Net", "Net", "Net"), Name("<user>: Head", "Net.<user>", "Head")]
    assert clean.tracks == [Track(kind, "thread 1", 8, Process(7, 3)) for kind in ("forward", "backward pass")]
    assert clean.marks == [Mark(7, "mark", "mark 1"), Mark(8, "step", "step 0")]
    assert [(c.name, c.unit, c.process) for c in clean.counters] == [("counter 1", "bytes", Process(7, 3))]
    assert clean.metadata == {"torch": "2.13.0+cpu", "engine": "native", "capacity": 64}
    assert clean.span_args == {
        0: {"shapes": "float32[2, 8], bool[], …", "compiled_unknown": BEFORE, "trigger": "gc.collect()"},
        1: {"compiled_modules": "<user>: Head"},
    }
    assert clean.backward_passes == [BackwardPass(5, 8, "thread 1", 8, Process(7, 3), complete=False)]


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
    (slice_("user_annotation", "of janed", {}), slice_("user_annotation", "annotation 1", {})),
    (slice_("user_annotation", "ProfilerStep#3", {}), slice_("user_annotation", "ProfilerStep#3", {})),
    (slice_("user_annotation", "aten::of_janed", {}), slice_("user_annotation", "annotation 1", {})),
    (slice_("cpu_op", "load of x", {}), slice_("cpu_op", "operation 1", {})),
    (slice_("mark", "epoch of janed", {}), slice_("mark", "mark 1", {})),
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
    assert EventFilter(ReportNames(redact), IdNumbers())(event) == expected


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
        {"ph": "X", "cat": ["cpu_op"], "name": "aten::mm", "ts": 1, "dur": 1},
    ],
)
def test_an_unknown_event_is_left_out(redact: Redactor, event: object) -> None:
    event_filter = EventFilter(ReportNames(redact), IdNumbers())

    assert event_filter(event) is None
    assert event_filter.dropped == 1


# Ids and times.


def test_ids_of_processes_and_threads_become_numbers_and_others_stay() -> None:
    ids = IdNumbers()

    assert [ids.number(given) for given in (40_123, 0, 7, 40_124, 40_123, 4_040_000_000)] == [
        *(100_001, 0, 7, 100_002, 100_001, 4_040_000_000)
    ]


def test_the_start_and_the_process_of_a_timeline_are_replaced() -> None:
    process = Process(40_123, 3)
    columns = Slices.of(
        start=[1_700_000_000_000_000_005, 1_700_000_000_000_000_006], end=[1_700_000_000_000_000_009] * 2, name=[0, 0],
        phase=[0, 0], track=[0, 0], depth=[0, 1], parent=[-1, 0], call=[0, 0], step=[0, 0], link=[-1, -1],
        complete=[1, 1],
    )  # fmt: skip
    timeline = Timeline(
        columns,
        [Name("Net", "Net", "Net")],
        [Track("forward", "MainThread", 40_123, process), Track("backward", "thread 1", 40_200, process)],
        marks=[Mark(1_700_000_000_000_000_001, "mark", "mark 1")],
    )

    changed = without_identity(timeline)

    assert changed.columns.start.tolist() == [REPORT_START_NS + 4, REPORT_START_NS + 5]
    assert changed.columns.end.tolist() == [REPORT_START_NS + 8, REPORT_START_NS + 8]
    assert changed.marks == [Mark(REPORT_START_NS, "mark", "mark 1")]
    # The main thread is still known by its process' id.
    assert changed.tracks == [
        Track("forward", "MainThread", 100_001, Process(100_001, 3)),
        Track("backward", "thread 1", 100_002, Process(100_001, 3)),
    ]


def test_ids_in_events_are_replaced_wherever_they_stand(redact: Redactor) -> None:
    event_filter = EventFilter(ReportNames(redact), IdNumbers())
    events: list[Event] = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 40_123, "tid": 40_200, "ts": 1, "dur": 1},
        {"ph": "M", "name": "thread_name", "pid": 40_123, "tid": 40_200, "args": {"name": "thread 40200 (python3)"}},
        {"ph": "M", "name": "process_sort_index", "pid": 40_123, "tid": 0, "args": {"sort_index": 40_123}},
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 1},
    ]

    clean = [event_filter(event) or {} for event in events]

    assert [(event["pid"], event["tid"]) for event in clean] == [(100_001, 100_002)] * 2 + [(100_001, 0), (0, 7)]
    assert clean[1]["args"] == {"name": "thread 100002 (python3)"}
    assert clean[2]["args"] == {"sort_index": 100_001}


# The environment.


def test_the_environment_is_that_of_the_recording() -> None:
    metadata = {
        "modtrace": "0.1.0", "torch": "2.13.0+cu130", "python": "3.11.7", "engine": "native", "capacity": 64,
        "os": "Linux x86_64", "cpu": "AMD EPYC 7763 64-Core Processor", "cpus": 16, "gpu": "8 × NVIDIA A100-SXM4-80GB",
        "gpu_driver": "535.104.05", "cuda": "13.0", "libraries": "numpy 2.4.6, transformers 5.1.0.dev0",
        "host": "0123456789ab", "pid": 7, "program": "train.py --token x", "rank": 3, "own": "secret",
    }  # fmt: skip

    assert environment_text(metadata).splitlines() == [
        "Noted by the recording when it started:",
        "",
        "modtrace: 0.1.0",
        "torch: 2.13.0+cu130",
        "Python: 3.11.7",
        "engine: native",
        "capacity: 64",
        "operating system: Linux x86_64",
        "CPU: AMD EPYC 7763 64-Core Processor",
        "CPUs: 16",
        "GPU: 8 × NVIDIA A100-SXM4-80GB",
        "GPU driver: 535.104.05",
        "CUDA: 13.0",
        "libraries: numpy 2.4.6, transformers 5.1.0.dev0",
        "",
        f"Reported by modtrace {modtrace.__version__}.",
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("torch", "2.13 of janed"), ("engine", "secret"), ("os", "Linux x86_64 on box"), ("cpu", "a\nb"),
        ("cpus", "many"), ("gpu", "NVIDIA"), ("libraries", "numpy 2.4, /home/janed"), ("cuda", ["13.0"]),
    ],
)  # fmt: skip
def test_metadata_that_is_not_as_expected_is_left_out(key: str, value: object) -> None:
    assert clean_metadata({key: value}) == {}


def test_a_trace_that_says_nothing_of_its_origin() -> None:
    assert environment_text({}).splitlines()[0] == "The trace does not describe its machine."


def test_collectives_stay_without_the_names_that_a_user_gave_to_groups(tmp_path: Path) -> None:
    script = EventScript()
    net = script.name("Net")
    script.note_group("0", "0-3", "default_pg")
    script.note_group("17ab", "0,2", "Acme secret")
    script.enter(5, net)
    for start, text in ((10, '["all_reduce", "0"]'), (20, '["jane_reduce", "17ab"]'), (30, '["send", "17ab", 1]')):
        script.collective(start, Kind.COLLECTIVE_ENTER, text, 0)
        script.collective(start + 4, Kind.COLLECTIVE_EXIT, text, 8)
    script.collective(38, Kind.COLLECTIVE_DONE, '["all_reduce", "0"]', 0)
    script.exit(40, net)
    path = tmp_path / "report.zip"
    build_timeline(script.snapshot()).save(path)
    collectives = modtrace.load(path).collectives
    begin = REPORT_START_NS - 5
    assert [(row.operator, row.group, row.start_ns - begin, row.done_ns, row.peer) for row in collectives] == [
        ("all_reduce", "0", 10, begin + 38, None),
        ("collective 1", "group 1", 20, None, None),
        ("send", "group 1", 30, None, 1),
    ]
    assert collectives.groups == [Group("0", (0, 1, 2, 3), "default_pg"), Group("group 1", (0, 2), "group 2")]
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content["trace"] = gzip.decompress(content["trace.pftrace.gz"])
    assert not [name for name, data in content.items() if b"Acme" in data or b"jane_reduce" in data or b"17ab" in data]


def test_names_of_ranges_that_users_chose_are_in_no_file_of_a_report(tmp_path: Path) -> None:
    script = EventScript()
    net = script.name("Net")
    chosen: list[tuple[RangeCategory, str]] = [
        ("user", "Acme batch of jane"),
        ("data loading", "enumerate(AcmeLoader)#AcmeLoader.__next__"),
        ("compile", "torch.compile 0/1: L['acme'] is 3"),
        ("saving", "s3://acme/run"),
        ("generate", "generate"),
        ("saving", "safetensors.torch.save_file"),
        ("saving", "torch.distributed.checkpoint.async_save"),
        ("compile", "torch.export.export"),
        ("optimizer", "AcmeMomentum.step"),
    ]
    for number, (category, name) in enumerate(chosen):
        script.collective(100 * number + 10, Kind.RANGE_BEGIN, range_text(name, category), number)
        script.collective(100 * number + 40, Kind.RANGE_END, range_text(name, category), number)
        script.enter(100 * number + 50, net)
        script.exit(100 * number + 60, net)
        script.step(100 * number + 70, number)
    path = tmp_path / "report.zip"
    build_timeline(script.snapshot()).save(path)
    assert [(row.category, row.name) for row in modtrace.load(path).ranges] == [
        ("user", "annotation 1"),
        ("data loading", "annotation 2"),
        ("compile", "torch.compile 0/1"),
        ("saving", "annotation 3"),
        ("generate", "generate"),
        ("saving", "safetensors.torch.save_file"),
        ("saving", "torch.distributed.checkpoint.async_save"),
        ("compile", "torch.export.export"),
        ("optimizer", "annotation 4"),
    ]
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content["trace"] = gzip.decompress(content["trace.pftrace.gz"])
    assert not [name for name, data in content.items() if b"acme" in data.lower() or b"jane" in data.lower()]


@pytest.mark.parametrize("anonymize", [False, True])
def test_names_of_the_programs_files_are_in_no_file_of_a_report(tmp_path: Path, anonymize: bool) -> None:
    timeline = training(before=5)
    gap = ["acme.py:7", "optimizer", "acme.py:9", "forward", "other", [5_000_000]]
    timeline = replace(timeline, metadata={**timeline.metadata, STEP_NOTES: {"steps": 1, "gaps": [gap]}})
    assert "acme.py:7" in timeline.summary().findings[0].evidence

    modtrace.report(timeline, tmp_path / "report.zip", anonymize=anonymize)

    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content["trace"] = gzip.decompress(content["trace.pftrace.gz"])
    assert not [name for name, data in content.items() if b"acme" in data.lower()]


@pytest.mark.parametrize(
    ("modules", "plain", "aliased"),
    [
        ("blocks.0: Block, blocks.0.janed: Head", "blocks.0: Block, blocks.0.<user>: Head",
         "m1.0: Class1, m1.0.m2: Class2"),
        ("blocks.0: Block, see /home/x", None, None),
    ],
)  # fmt: skip
def test_modules_inside_of_what_was_compiled_are_called_as_all_modules_are(
    modules: str, plain: str | None, aliased: str | None, redact: Redactor
) -> None:
    assert ReportNames(redact).inner_modules(modules) == plain
    assert AliasedNames(redact).inner_modules(modules) == aliased
