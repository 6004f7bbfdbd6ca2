"""However a script imports torch, it is recorded, or modtrace says why not."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.resources
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import modtrace
from modtrace._after_import import call_after_import
from modtrace.record_options import EngineName
from tests.support.python_process import LAZY_IMPORTS_WORK, python_environment, run_python
from tests.support.test_scale import PYTHON_IN_FULL

TRAIN = """
def train():
    import torch
    class Counted(torch.nn.Linear):
        calls = 0
        def forward(self, x):
            Counted.calls += 1
            return super().forward(x)
    net = Counted(2, 2)
    for _ in range(3):
        net(torch.ones(1, 2))
    print("calls", Counted.calls)
"""

DELEGATES = """
import importlib.abc, importlib.machinery, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                return spec
"""

ORDERS = {
    "at once": "train()",
    "only looked for first": "import importlib.util\nfor _ in range(3): importlib.util.find_spec('torch')\ntrain()",
    "looked for by path": "from importlib.machinery import PathFinder\nPathFinder.find_spec('torch')\ntrain()",
    "in a thread": "import threading\nthread = threading.Thread(target=train)\nthread.start()\nthread.join()",
    "in two threads at once": (
        "import threading\ndone = []\n"
        "threads = [threading.Thread(target=lambda: __import__('torch') and done.append(1)) for _ in range(2)]\n"
        "[thread.start() for thread in threads]\n[thread.join() for thread in threads]\nassert done == [1, 1]\ntrain()"
    ),
    "lazily": (
        "import importlib.util, sys\nspec = importlib.util.find_spec('torch')\n"
        "spec.loader = importlib.util.LazyLoader(spec.loader)\nmodule = importlib.util.module_from_spec(spec)\n"
        "sys.modules['torch'] = module\nspec.loader.exec_module(module)\nmodule.nn\ntrain()"
    ),
    "by a finder before ours": DELEGATES + "sys.meta_path.insert(0, Finder())\ntrain()",
    "by a finder behind ours": DELEGATES + "sys.meta_path.append(Finder())\ntrain()",
}


@PYTHON_IN_FULL
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_imports_does_not_matter(engine: EngineName, order: str, tmp_path: Path) -> None:
    if order == "lazily" and not LAZY_IMPORTS_WORK:
        pytest.skip("this Python cannot import this torch lazily")
    (tmp_path / "script.py").write_text(TRAIN + ORDERS[order])

    done = run_python("-m", "modtrace", "run", "--engine", engine, "script.py", cwd=tmp_path)

    assert done.stdout == "calls 3\n"
    assert len(modtrace.load(tmp_path / "script.pftrace").spans) == 3


@pytest.mark.parametrize("order", ["at once", "only looked for first"])
def test_the_order_of_imports_does_not_matter_with_the_variable(order: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import modtrace\n" + TRAIN + ORDERS[order])

    run_python("script.py", cwd=tmp_path, env=python_environment(MODTRACE="path=trace.json,engine=python"))

    assert len(modtrace.load(tmp_path / "trace.json").spans) == 3


def said(script: str, folder: Path) -> str:
    (folder / "script.py").write_text(script)
    by_command = run_python("-m", "modtrace", "run", "--engine", "python", "script.py", cwd=folder).stderr
    (folder / "script.py").write_text("import modtrace\n" + script)
    variable = python_environment(MODTRACE="path=script.pftrace,engine=python")
    by_variable = run_python("script.py", cwd=folder, env=variable).stderr
    why = by_command.removeprefix("modtrace: nothing is recorded: ").removesuffix("\n")
    assert by_variable == f"MODTRACE: {why}; nothing is recorded\n"
    assert not (folder / "script.pftrace").exists()
    return why


def test_the_message_if_nothing_is_recorded(tmp_path: Path) -> None:
    looks = "import importlib.util\nimportlib.util.find_spec('torch')\n"
    past = (
        "import sys\nfrom importlib.machinery import PathFinder\n"
        "sys.meta_path.insert(0, type('Past', (), {'find_spec': lambda *a: PathFinder.find_spec(*a[1:])})())\n"
        "import torch\n"
    )

    assert said(looks, tmp_path) == "the script ended before torch was imported"
    assert said("import torch\ntorch.ones(1)\n", tmp_path) == "no module was called"
    assert "by a loader that modtrace cannot follow" in said(past, tmp_path)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that nothing else imports; the text of its module can be changed."""
    folder = tmp_path / "waited_for"
    folder.mkdir()
    (folder / "__init__.py").write_text("value = 1\n")
    (folder / "data.txt").write_text("data")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    yield folder
    sys.modules.pop("waited_for", None)


def test_an_import_that_fails_can_be_tried_again_and_the_call_comes_once(package: Path) -> None:
    calls: list[bool] = []
    call_after_import("waited_for", lambda: calls.append("waited_for" in sys.modules))
    (package / "__init__.py").write_text("raise ValueError('not yet')\n")
    with pytest.raises(ValueError, match="not yet"):
        importlib.import_module("waited_for")
    assert calls == []
    (package / "__init__.py").write_text("value = 22\n")
    importlib.invalidate_caches()

    module = importlib.import_module("waited_for")
    importlib.reload(module)

    assert (calls, module.value) == ([True], 22)


def test_the_loader_is_unchanged(package: Path) -> None:
    plain = importlib.util.find_spec("waited_for")
    call_after_import("waited_for", lambda: None)
    module = importlib.import_module("waited_for")

    assert plain is not None
    assert module.__spec__ is not None
    assert type(module.__spec__.loader) is type(plain.loader) is importlib.machinery.SourceFileLoader
    assert module.__spec__.origin == plain.origin
    assert module.__loader__ is module.__spec__.loader
    assert module.__loader__.get_source("waited_for") == "value = 1\n"
    assert module.__loader__.is_package("waited_for")
    assert (importlib.resources.files("waited_for") / "data.txt").read_text() == "data"


def test_the_call_for_an_imported_package_comes_at_once(package: Path) -> None:
    calls: list[int] = []
    call_after_import("waited_for", lambda: calls.append(1))

    importlib.import_module("waited_for")

    assert calls == [1]
    call_after_import("waited_for", lambda: calls.append(2))
    assert calls == [1, 2]
