"""`modtrace run`: record an unchanged script."""

import builtins
import importlib.util
import io
import linecache
import os
import runpy
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import BuiltinImporter, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import click

from ..._errors import ModtraceError, check_can_record
from ..._files import next_step_hint
from ..._interrupts import hold_ctrl_c
from ..._tables import counted
from ...record_options import OPTIONS, EngineName, Option
from ..group import ScriptError
from ..options import say, value_option

if TYPE_CHECKING:
    from ...integrations.auto_recording import AutoRecording


def run_file(path: str, arguments: Sequence[str]) -> None:
    """Run a script as `__main__` and wait for its threads."""
    absolute = os.path.abspath(path)

    def compiled() -> CodeType:
        with io.open_code(absolute) as file:
            return compile(file.read(), absolute, "exec", dont_inherit=True)

    sys.argv = [path, *arguments]
    _set_first_search_path(os.path.dirname(os.path.realpath(path)))
    _run_as_main(compiled, __file__=absolute, __loader__=SourceFileLoader("__main__", absolute))


def run_code(code: str, arguments: Sequence[str]) -> None:
    """Run code as `__main__` and wait for its threads."""
    sys.argv = ["-c", *arguments]
    _set_first_search_path("")
    if sys.version_info >= (3, 13):  # tracebacks show the lines of such code
        linecache.cache["<string>"] = (len(code), None, code.splitlines(keepends=True), "<string>")
    _run_as_main(lambda: compile(code, "<string>", "exec", dont_inherit=True), __loader__=BuiltinImporter)


def _run_as_main(compiled: Callable[[], CodeType], **attributes: object) -> None:
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, **attributes)
    # Not restored afterwards: threads, exit handlers and pickles still look it up.
    sys.modules["__main__"] = main
    try:
        exec(compiled(), vars(main))  # noqa: S102 (the purpose of the command)
        _wait_for_threads()
    except BaseException as error:
        raise ScriptError(error, _strip_runner_frames(error.__traceback__)) from None


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module or a package's `__main__` as `__main__` and wait for its threads.

    Raises UsageError if there is no such module; ScriptError for any exception of the module, including SystemExit and
    KeyboardInterrupt.
    """
    sys.argv = [name, *arguments]
    _set_first_search_path(os.getcwd())
    try:
        missing = _find_missing(name)
        if missing is None:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
            _wait_for_threads()
    except BaseException as error:
        raise ScriptError(error, _strip_runner_frames(error.__traceback__)) from None
    if missing is not None:
        raise click.UsageError(f"No module named {missing!r}.")


def _find_script(name: str) -> str:
    """Return the path of a script, or of a command on `PATH` that pip installed."""
    if os.path.isfile(name):
        return name
    path = shutil.which(name)
    if path is None:
        raise click.UsageError(f"There is no script {name!r}.")
    with open(path, "rb") as file:
        # If the path of Python is long, pip writes a line for sh first.
        first, second = file.readline(), file.readline()
    if not (first.startswith(b"#!") and (b"python" in first or second.startswith(b"'''exec' "))):
        raise click.UsageError(f"{path} is not a Python script.")
    return path


def _find_missing(module: str) -> str | None:
    """Return the name that `python -m` cannot find: a module, or the `__main__` of a package; None if it finds all."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            return error.name
        raise
    if spec is None or spec.submodule_search_locations is None:
        return module if spec is None else None
    return _find_missing(f"{module}.__main__")


def _set_first_search_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # a flag since Python 3.11; without it replace the command's entry
        sys.path[0] = folder


def _wait_for_threads() -> None:
    """Wait for all non-daemon threads, like the interpreter at its end, while the recording still runs.

    The interpreter's own function first shuts down pools of `concurrent.futures`, and wakes threads that join the main
    thread. Only joining the threads would wait for these forever.
    """
    threading._shutdown()  # type: ignore[attr-defined]


def _strip_runner_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Drop the frames of the code that started the script."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") in (
        __name__,
        "importlib.util",
        "runpy",
    ):
        traceback = traceback.tb_next
    return traceback


def _parser(option: Option) -> Callable[[str], Any]:
    """Return the option's parser with the errors of click."""

    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            raise click.BadParameter(f"{error}.") from None

    return parse


def _completion(option: Option) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return the function that completes the values of an option in a shell."""
    return lambda _context, _parameter, prefix: [text for text in option.suggestions if text.startswith(prefix)]


def _joined(separator: str) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], str | None]:
    """Return a callback that joins the values of a repeated option."""
    return lambda _context, _parameter, texts: separator.join(texts) if texts else None


def _recording_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(OPTIONS):
        flag = f"--{option.name.replace('_', '-')}"
        if option.metavar is None:
            negated = f"/--no-{flag[2:]}" if option.default else ""
            add = click.option(
                f"{flag}{negated}", option.name, is_flag=True, default=bool(option.default), help=option.help
            )
        else:
            add = click.option(
                flag,
                option.name,
                type=click.Path() if option.is_path else _parser(option),
                default=None if option.default is None else str(option.default),
                show_default=True,
                multiple=bool(option.separator),
                callback=_joined(option.separator) if option.separator else None,
                metavar=option.metavar,
                help=option.help,
                shell_complete=_completion(option) if option.suggestions else None,
            )
        function = add(function)
    return function


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.Path())
@click.option("-m", "kind", flag_value="module", help="SCRIPT is a module, like python -m.")
@click.option("-c", "kind", flag_value="code", help="SCRIPT is code, like python -c.")
@value_option("-o --output", click.Path(), "OUT", "Trace to write; the suffix picks the format. [SCRIPT.pftrace]")
@click.option("--save-on-term/--no-save-on-term", default=False, help="Save OUT if SIGTERM ends SCRIPT.")
@_recording_options
@value_option("--device-depth", click.IntRange(1), "N", "Record device times of N levels of calls.")
@value_option("--device-modules", str, "PATTERN", "Record device times of matching calls, such as 'GPT.blocks.*'.")
def run_command(
    script: str,
    arguments: tuple[str, ...],
    kind: str | None,
    output: str | None,
    save_on_term: bool,
    device_depth: int | None,
    device_modules: str | None,
    **options: Any,
) -> None:
    """Run SCRIPT with its ARGUMENTS, unchanged, and record its modules.

    SCRIPT may be a command on PATH, such as torchrun or accelerate. It runs like under python: sys.argv, sys.path,
    __main__, exit code and traceback are the same. In OUT and FILE, %r is the rank, %p the process id and %h a hash of
    the host. Under torchrun, without %r and %p, each rank writes its own file, such as OUT.rank3.pftrace.
    """
    from ..._ranks import absolute_path, add_rank, expand_path
    from ...integrations.auto_recording import AutoRecording
    from ...write import check_writable

    if kind is None:
        script = _find_script(script)
    check_can_record()
    if device_modules or device_depth:
        options["device_times"] = ",".join([device_modules or "*", *([str(device_depth)] if device_depth else [])])
    _check_conditions(options["keep_when"], options["ring"])
    path = add_rank(output or f"{_stem(script, kind)}.pftrace".replace("%", "%%"), os.environ)
    trace = expand_path(path, os.environ)
    check_writable(trace)
    for option in OPTIONS:
        if option.is_path and options[option.name] is not None:
            # The script may change its directory.
            options[option.name] = absolute_path(add_rank(options[option.name], os.environ))
    auto = AutoRecording(
        {"path": absolute_path(path), **options},
        unattended=False,
        prepare=lambda: _build_engine(options["engine"]),
        save_on_term=save_on_term,
    )
    finish = partial(
        hold_ctrl_c, partial(_finish, auto, trace), lambda: say(f"saving {trace}; press Ctrl-C again to abort")
    )
    try:
        {"module": run_module, "code": run_code}.get(kind or "", run_file)(script, arguments)
    except ScriptError as script_error:
        if isinstance(auto.error, ModtraceError) and script_error.error is auto.error:
            raise auto.error from None
        try:
            finish()
        except ModtraceError as error:
            say(error)  # the script's own error matters more, and is raised below
        except KeyboardInterrupt:
            pass  # the script has ended already
        raise
    finish()


def _stem(script: str, kind: str | None) -> str:
    """Return the default name of a trace, without its suffix."""
    if kind == "module":
        return script.removesuffix(".__main__").rpartition(".")[2]
    return "command" if kind == "code" else Path(script).stem


def _check_conditions(keep_when: str | None, ring: str | None) -> None:
    """Check the conditions before the script starts; `record` would check them only while it runs."""
    if keep_when is None:
        return
    from ...live.triggers import parse_conditions

    if ring is None:
        raise click.UsageError("--keep-when needs a ring, which another process reads; add --ring run.modtrace.")
    try:
        parse_conditions(keep_when)
    except ModtraceError as error:
        raise click.UsageError(f"--keep-when: {error}.") from None


def _build_engine(engine: EngineName) -> None:
    from ...track.native.build import build_if_missing  # imports torch

    build_if_missing(engine, say)


def _finish(auto: "AutoRecording", trace: str) -> None:
    """Stop and save the recording, and print the files on stderr.

    Raises WriteError if the trace cannot be saved; ModtraceError if the recording could not be started, but the script
    continued.
    """
    if not auto.in_starting_process:
        return
    auto.finish()
    if auto.recording is None:
        return
    from ...timeline.contents import WHOLE_RUN  # only here: scripts without torch return before, and need no numpy

    files = [os.path.join(os.path.dirname(trace), os.path.basename(path)) for path in auto.recording.saved_paths]
    internal = auto.recording.internal
    if internal.replaced_by is not None:
        paths = ", ".join(internal.replaced_by.saved_paths)
        say(f"the script recorded itself{f', to {paths},' if paths else ''} which ended this recording")
    if not files:
        if auto.recording.steps:
            say(f"the schedule records none of the script's {auto.recording.steps} steps")
        return
    timeline, spans = internal.saved_timeline()
    # Without optimizer steps, backward passes may end steps, which only the timeline counts.
    step_count = auto.recording.steps or timeline.metadata[WHOLE_RUN]["steps"]
    end_of = "the end of " if timeline.stats.overwritten else ""
    steps = f" of {end_of}{counted(step_count, 'step')}" if step_count else ""
    if len(files) == 1:
        say(f"{counted(spans, 'span')}{steps} {'is' if spans == 1 else 'are'} in {files[0]}")
    else:
        say(f"{len(files)} parts{steps} are in {', '.join(files)}")
    if (lines := internal.lines_path) is not None:
        say(f"the windows that --keep-when kept are in {lines.parent}; {lines.parent / 'watch.log'} describes them")
    say(next_step_hint(files[-1]))
