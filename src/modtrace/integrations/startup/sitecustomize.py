"""Python runs this module first in a child of a recorded process, whose `PYTHONPATH` starts with this folder.

The child records itself once torch is imported. This module removes its folder from `sys.path`, and runs the
`sitecustomize` that Python would have run without it.
"""

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _record_job() -> None:
    from modtrace.integrations.child_recording import record_this_child
    from modtrace.integrations.job import Job

    if "modtrace.cli" not in sys.modules:  # `modtrace run` makes a job of its own
        record_this_child(Job.inherited())


def _run_next_sitecustomize() -> None:
    spec = PathFinder.find_spec(__name__, sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(module)


_folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _folder]
# Another Python, or another environment of it, may have no modtrace, or another version.
_is_same_python = os.environ.get("MODTRACE_JOB", "").startswith(f"{sys.hexversion:x} {sys.prefix}\n")
if _is_same_python and not os.environ.get("MODTRACE"):
    with contextlib.suppress(ImportError):
        from modtrace._after_import import call_after_import

        call_after_import("torch", _record_job)
_run_next_sitecustomize()
