"""A run and profiler's traces in which words are planted that a report must not hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import modtrace

PLANTED = ("zaphod", "heartofgold", "magrathea", "tok_5f1e2d3c4b5a", "towel42secret", "deepthought")
"""User, home, host, token, secret in a class attribute, name of the script."""


RUN = """
import threading, torch, modtrace
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

class Vogon(nn.Module):
    poem = "towel42secret"
    def __init__(self):
        super().__init__()
        self.zaphod_head = nn.Linear(4, 4)
        self.slartibart = nn.ModuleDict({"/heartofgold/zaphod/x": nn.Linear(4, 4), "say zaphod\\n": nn.Linear(4, 4)})
        self.secret = "towel42secret"
    def extra_repr(self):
        return "towel42secret"
    def forward(self, x, babelfish=None):
        x = self.zaphod_head(x)
        for layer in self.slartibart.values():
            x = layer(x)
        return x

def step():
    with record_function("reads /heartofgold/zaphod/data on magrathea"):
        model(torch.ones(2, 4), babelfish=torch.ones(1)).sum().backward()

model = Vogon()
activities = [ProfilerActivity.CPU]
with profile(activities=activities, with_stack=True, record_shapes=True) as profiler:
    step()
profiler.export_chrome_trace("plain.json")
with modtrace.record(ring="run.ring", shapes=True, memory_interval=0, host_name=True, engine="python") as rec:
    with profile(activities=activities, with_stack=True, record_shapes=True) as profiler:
        for _ in range(2):
            thread = threading.Thread(target=step, name="loader of zaphod")
            thread.start()
            thread.join()
            step()
            rec.mark("saved /heartofgold/zaphod/model.pt for zaphod@magrathea.example")
            rec.step()
profiler.export_chrome_trace("with.json")
rec.save("run.json")
rec.save("run.pftrace")
rec.save("run.zip")
"""


def planted(source: Any) -> Any:
    """A profiler's trace as a cluster writes it: with who, where and what at the top, and in its events."""
    source |= {
        "username": "zaphod",
        "host_name": "magrathea",
        "hostname": "magrathea",
        "job_name": "zaphod/deepthought",
        "job_user": "zaphod",
        "traceName": "/heartofgold/zaphod/trace.json",
        "command": "python deepthought.py --token tok_5f1e2d3c4b5a",
        "env": {"HF_TOKEN": "tok_5f1e2d3c4b5a"},
        "INFO": ["at magrathea"],
        "distributedInfo": {"rank": 0, "world_size": 1, "pg_config": [{"pg_desc": "zaphod's"}], "host": "magrathea"},
    }
    events = source["traceEvents"]
    for event in events[:: max(len(events) // 50, 1)]:
        event.setdefault("args", {})["Call stack"] = "/heartofgold/zaphod/deepthought.py(3): towel42secret"
        event["id_of"] = "zaphod"
    place = {"pid": events[0]["pid"], "tid": events[0]["tid"], "ts": events[-1].get("ts", 1), "dur": 1}
    events += [
        {"ph": "X", "cat": "python_function", "name": "deepthought.py(1): towel42secret", **place},
        {"ph": "X", "cat": "user_annotation", "name": "## zaphod@magrathea.example: ~/heartofgold ##", **place},
        {"ph": "X", "cat": "cpu_op", "name": "load(/heartofgold/zaphod/x.py)", **place},
        {"ph": "X", "cat": "zaphod", "name": "zaphod", **place},
        {"ph": "M", "name": "process_name", **place, "args": {"name": "deepthought.py"}},
        {"ph": "M", "name": "thread_name", **place, "args": {"name": "thread 1 (deepthought)"}},
    ]
    return source


def environ(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "USER": "zaphod",
        "LOGNAME": "zaphod",
        "HOME": str(home),
        "HOSTNAME": "magrathea",
        "HF_TOKEN": "tok_5f1e2d3c4b5a",
        "MODTRACE_TEST_SETTING": "towel42secret",
        "PYTHONPATH": str(Path(modtrace.__file__).parents[1]),
    }
