"""`modtrace run` of scripts, modules, commands and code: they end and print as under Python, and are recorded."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import modtrace
from tests.support.forked_python import run_forked
from tests.support.python_process import python_environment, run_python

TRAIN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)

def train(steps):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""

SURROUNDINGS = """
import json, os, pickle, sys

class Local:
    pass

main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv,
    "name": __name__,
    "file": __file__,
    "first path": sys.path[0],
    "main is this": main.__dict__ is globals(),
    "main file": main.__file__,
    "package": __package__,
    "pickles": type(pickle.loads(pickle.dumps(Local()))) is Local,
    "annotations": str(__annotations__) if "__annotations__" in globals() else None,
}))
x: undefined_unless_annotations_are_lazy if False else int = 1
"""

ENDS = {
    "falls off its end": "print('done')",
    "exits with a number": "import sys; print('out'); sys.exit(3)",
    "exits with a text": "import sys; sys.exit('goodbye')",
    "exits with nothing": "import sys; sys.exit()",
    "raises": "def f():\n    raise ValueError('from f')\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()",
    "raises from a cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
    "is no Python": "print('unreached')\nif True print(1)\n",
    "is interrupted": "raise KeyboardInterrupt",
    "raises what click knows": "import click; raise click.UsageError('the script is wrong')",
    "aborts as click does": "import click; raise click.Abort",
    "has its own excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\nraise OSError",
    "exits in an exit handler": "import atexit, os\natexit.register(lambda: print('bye'))\nraise ValueError",
    "breaks the pipe": "raise BrokenPipeError(32, 'Broken pipe')",
    "ends in a thread": "import threading, time\nthreading.Timer(0.1, lambda: print('later')).start()\nprint('first')",
    "leaves a pool open": (
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\n"
        "print(pool.submit(lambda: 'in the pool').result())"
    ),
    "is waited for by a thread": (
        "import threading\nmain = threading.main_thread()\n"
        "threading.Thread(target=lambda: (main.join(), print('after main'))).start()"
    ),
    "starts a thread from a thread": (
        "import threading\nlater = threading.Timer(0.2, lambda: print('later'))\n"
        "threading.Timer(0.1, later.start).start()"
    ),
}


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `command`; `.stderr` is stderr without modtrace's own lines."""
    return run_python(*command, status=None, cwd=cwd, env=python_environment(**environment))


def record(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `modtrace run` in a process that has already imported torch."""
    return run_forked("-m", "modtrace", "run", *arguments, status=None, cwd=cwd, env=python_environment(**environment))


def ours(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("modtrace: ")]


def theirs(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if not line.startswith("modtrace: ")]


@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_as_it_does_under_python(end: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDS[end])

    plain = run("script.py", "-x", cwd=tmp_path)
    if "can't create new thread at interpreter shutdown" in plain.stderr:
        pytest.skip("this CPython, as 3.12.1, starts no thread any more when the main one has ended")
    recorded = run("-m", "modtrace", "run", "script.py", "-x", cwd=tmp_path)

    assert recorded.returncode == plain.returncode
    assert recorded.stdout == plain.stdout
    assert theirs(recorded.stderr) == plain.stderr.splitlines()


def test_an_interrupted_script_dies_of_the_interrupt(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDS["is interrupted"])

    assert run("-m", "modtrace", "run", "script.py", cwd=tmp_path).returncode == -signal.SIGINT


def test_a_script_sees_what_it_sees_under_python(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "script.py").write_text(SURROUNDINGS)
    (tmp_path / "link.py").symlink_to("real/script.py")

    for script in ("real/script.py", "link.py", str(tmp_path / "real" / "script.py")):
        plain = run(script, "--steps", "3", "--", "-m", cwd=tmp_path)
        recorded = run("-m", "modtrace", "run", script, "--steps", "3", "--", "-m", cwd=tmp_path)
        assert recorded.stdout == plain.stdout != ""


@pytest.mark.parametrize("module", ["package.script", "package"])
def test_a_module_sees_what_it_sees_under_python(module: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    for name in ("script.py", "__main__.py"):
        (tmp_path / "package" / name).write_text(SURROUNDINGS)

    plain = run("-m", module, "--steps", "3", cwd=tmp_path)
    recorded = run("-m", "modtrace", "run", "-m", module, "--steps", "3", cwd=tmp_path)

    assert recorded.stdout == plain.stdout != ""


def test_a_module_that_raises_shows_its_own_frames_only(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDS["raises"])

    recorded = run("-m", "modtrace", "run", "-m", "script", cwd=tmp_path)

    assert recorded.returncode == 1
    assert [line.split(", line")[0] for line in recorded.stderr.splitlines() if "File" in line] == [
        f'  File "{tmp_path / "script.py"}"'
    ] * 3


RAISES_ITS_OWN_NAME = "raise ModuleNotFoundError('no part', name='package')"


@pytest.mark.parametrize(
    ("init", "script"),
    [
        ("", RAISES_ITS_OWN_NAME),
        ("import package.lost", ""),
        ("", "import package.lost"),
        ("", "import click; raise click.UsageError('the script is wrong')"),
    ],
)
def test_a_module_raises_what_it_raises_under_python(init: str, script: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(init)
    (tmp_path / "package" / "script.py").write_text(script)

    plain = run("-m", "package.script", cwd=tmp_path)
    recorded = run("-m", "modtrace", "run", "-m", "package.script", cwd=tmp_path)

    runpy = re.compile(r"^(?:  File \S*runpy.*\n(?:    .*\n)*|.*runpy.*\n|modtrace: .*\n)", re.MULTILINE)
    assert recorded.returncode == plain.returncode == 1
    assert runpy.sub("", recorded.stderr) == runpy.sub("", plain.stderr)


@pytest.mark.parametrize(
    "shebang", ["#!/usr/bin/env python3\n", "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"]
)
def test_a_command_on_the_path_sees_what_it_sees_under_python(shebang: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "launch").write_text(shebang.format(python=sys.executable) + SURROUNDINGS)
    (tmp_path / "bin" / "launch").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"

    plain = run(str(tmp_path / "bin" / "launch"), "--steps", "3", cwd=tmp_path)
    recorded = run("-m", "modtrace", "run", "launch", "--steps", "3", cwd=tmp_path, PATH=path)

    assert recorded.stdout == plain.stdout != ""


def test_processes_launched_by_a_command_on_the_path_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "train(2)")
    (tmp_path / "bin").mkdir()
    launch = "#!/usr/bin/env python3\nimport subprocess, sys\n"
    launch += "sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)\n"
    (tmp_path / "bin" / "launch").write_text(launch)
    (tmp_path / "bin" / "launch").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"

    done = run("-m", "modtrace", "run", "launch", "train.py", cwd=tmp_path, PATH=path)

    [trace] = tmp_path.glob("launch.pid*.pftrace")
    assert done.returncode == 0, done.stderr
    assert ours(done.stderr)[0].startswith(f"modtrace: 1 child process is in {trace.name}")
    assert len(modtrace.load(trace).spans) == 8


@pytest.mark.parametrize("end", ["print('done')", "raise ValueError('x')", "import sys; sys.exit(4)", "True print"])
def test_code_ends_as_it_does_under_python(end: str, tmp_path: Path) -> None:
    code = f"import sys; print(sys.argv, sys.path[0], '__file__' in globals(), __loader__)\n{end}"

    plain = run("-c", code, "-x", cwd=tmp_path)
    recorded = run("-m", "modtrace", "run", "-c", code, "-x", cwd=tmp_path)

    assert (recorded.returncode, recorded.stdout) == (plain.returncode, plain.stdout)
    assert theirs(recorded.stderr) == plain.stderr.splitlines()


def test_the_trace_of_code(tmp_path: Path) -> None:
    done = record("-c", TRAIN + "import sys; train(int(sys.argv[1]))", "3", cwd=tmp_path)

    assert ours(done.stderr)[-2] == "modtrace: 12 spans of 3 steps are in command.pftrace"
    assert len(modtrace.load(tmp_path / "command.pftrace").spans) == 12


def test_the_trace_of_a_training_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "train(3)")

    done = record("-o", "out.json", "train.py", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert ours(done.stderr)[-2] == "modtrace: 12 spans of 3 steps are in out.json"
    assert "Next: " in ours(done.stderr)[-1]
    assert " view out.json, or" in ours(done.stderr)[-1]
    timeline = modtrace.load(tmp_path / "out.json")
    forward = [(span.fqn, span.step, span.call) for span in timeline.spans if span.phase == "forward"]
    assert forward == [(fqn, step, step) for step in range(3) for fqn in ("Net", "Net.layer")]
    assert sum(span.phase == "backward" for span in timeline.spans) == 6


@pytest.mark.parametrize("end", ["raise ValueError('mine')", "sys.exit(7)", "os.kill(os.getpid(), signal.SIGINT)"])
def test_the_trace_is_saved_however_the_script_ends(end: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + f"train(1)\nimport os, signal, sys\n{end}")

    plain = run_forked("train.py", status=None, cwd=tmp_path)
    done = record("train.py", cwd=tmp_path)

    assert done.returncode == plain.returncode != 0
    assert theirs(done.stderr) == plain.stderr.splitlines()
    assert len(modtrace.load(tmp_path / "train.pftrace").spans) == 4


def test_the_end_of_a_large_ring_is_never_a_timeline_as_a_whole(tmp_path: Path) -> None:
    patched = "from modtrace.recording.recording import Recording\nfrom modtrace.timeline.decode import pieces\n"
    patched += "pieces.PIECE_EVENTS = 64\nRecording.snapshot = None\n"
    (tmp_path / "train.py").write_text(TRAIN + patched + "train(50)")

    done = record("-o", "out.pftrace", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ours(done.stderr)[-2] == "modtrace: 200 spans of 50 steps are in out.pftrace"
    assert len(modtrace.load(tmp_path / "out.pftrace").spans) == 200


@pytest.mark.parametrize(("step", "said"), [("loss.backward()", "8 spans of 2 steps are"), ("", "4 spans are")])
def test_the_last_line_counts_the_steps_that_backward_passes_end_and_names_no_others(
    step: str, said: str, tmp_path: Path
) -> None:
    program = "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(3, 3))\nfor _ in range(2):\n"
    program += f"    loss = model(torch.ones(2, 3)).sum()\n    {step}\n"
    (tmp_path / "train.py").write_text(program)

    done = record("-o", "out.json", "train.py", cwd=tmp_path)

    assert ours(done.stderr)[-2] == f"modtrace: {said} in out.json"


def test_only_the_first_steps(tmp_path: Path) -> None:
    script = TRAIN + "train(5)\nimport os; print(os.path.exists('train.pftrace'))\ntrain(1)"
    (tmp_path / "train.py").write_text(script)

    done = record("--max-steps", "2", "train.py", cwd=tmp_path)

    assert done.stdout == "True\n"
    assert ours(done.stderr)[-2] == "modtrace: 8 spans of 2 steps are in train.pftrace"
    assert "Next: " in ours(done.stderr)[-1]
    assert " view train.pftrace, or" in ours(done.stderr)[-1]
    assert {span.step for span in modtrace.load(tmp_path / "train.pftrace").spans} == {0, 1}


def test_a_script_that_records_itself_replaces_the_commands_recording(tmp_path: Path) -> None:
    own = "train(1)\nimport modtrace\nwith modtrace.record('own.json'):\n    train(2)"
    (tmp_path / "train.py").write_text(TRAIN + own)

    done = record("train.py", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert ours(done.stderr)[-3:-1] == [
        "modtrace: the script recorded itself, to own.json, which ended this recording",
        "modtrace: 4 spans of 1 step are in train.pftrace",
    ]
    assert "Next: " in ours(done.stderr)[-1]
    assert " view train.pftrace, or" in ours(done.stderr)[-1]
    assert len(modtrace.load(tmp_path / "train.pftrace").spans) == 4
    assert len(modtrace.load(tmp_path / "own.json").spans) == 8


def test_variables_that_torch_reads_at_import_can_be_set_by_the_script(tmp_path: Path) -> None:
    script = "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint(torch.get_num_threads())"
    (tmp_path / "script.py").write_text(script)

    done = run("-m", "modtrace", "run", "script.py", cwd=tmp_path, OMP_NUM_THREADS="2")

    assert done.stdout == "1\n"


def test_threads_are_waited_for_and_recorded(tmp_path: Path) -> None:
    script = TRAIN + "import threading\nthreading.Timer(0.2, train, [1]).start()"
    (tmp_path / "train.py").write_text(script)

    record("train.py", cwd=tmp_path)

    assert len(modtrace.load(tmp_path / "train.pftrace").spans) == 4


def test_a_forked_child_leaves_the_trace_to_its_parent(tmp_path: Path) -> None:
    script = TRAIN + "import os\ntrain(1)\nchild = os.fork()\nif child:\n    os.waitpid(child, 0)\n    train(1)"
    (tmp_path / "train.py").write_text(script)

    done = record("train.py", cwd=tmp_path)

    assert ours(done.stderr)[-2] == "modtrace: 8 spans of 2 steps are in train.pftrace"
    assert "Next: " in ours(done.stderr)[-1]
    assert " view train.pftrace, or" in ours(done.stderr)[-1]
    assert len(ours(done.stderr)) == len(set(ours(done.stderr)))
    assert len(modtrace.load(tmp_path / "train.pftrace").spans) == 8


def test_the_trace_lies_where_the_script_was_started(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "import os; os.chdir('/')\ntrain(1)")

    record("--ring", "ring.modtrace", "train.py", cwd=tmp_path)

    assert len(modtrace.load(tmp_path / "train.pftrace").spans) == 4
    assert len(modtrace.load(tmp_path / "ring.modtrace").spans) == 4


def test_each_rank_has_files_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "train(1)")

    command = ("-o", "a.json.gz", "--ring", "run.modtrace", "train.py")
    record(*command, cwd=tmp_path, WORLD_SIZE="4", RANK="3")

    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "a.rank3.json.gz", "run.rank3.modtrace"}


def test_a_script_without_torch(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")

    done = run("-m", "modtrace", "run", "script.py", cwd=tmp_path)

    assert done.returncode == 0
    assert done.stderr == "modtrace: nothing is recorded: the script ended before torch was imported\n"


@pytest.mark.parametrize(
    ("arguments", "code", "fault"),
    [
        (["absent.py"], 2, "modtrace: There is no script 'absent.py'."),
        (["sh"], 2, f"modtrace: {shutil.which('sh')} is not a Python script."),
        (["-m", "package"], 2, "modtrace: No module named 'package.__main__'."),
        (["-m", "absent"], 2, "modtrace: No module named 'absent'."),
        (["-m", "absent.part"], 2, "modtrace: No module named 'absent'."),
        (
            ["--max-steps", "0", "script.py"],
            2,
            "modtrace: Invalid value for '--max-steps': max_steps is 0; it must be a whole number, 1 or more.",
        ),
        (["-o", "trace.txt", "script.py"], 1, "modtrace: trace.txt: the suffix must be one of"),
        (["-o", "absent/trace.json", "script.py"], 1, "modtrace: absent/trace.json: there is no directory absent"),
        (["--ring", "absent/ring", "script.py"], 1, "modtrace: "),
    ],
)
def test_mistakes(arguments: list[str], code: int, fault: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch; print('ran')")
    (tmp_path / "package").mkdir()

    done = run("-m", "modtrace", "run", *arguments, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.splitlines()[-1].startswith(fault)
    assert "Traceback" not in done.stderr
