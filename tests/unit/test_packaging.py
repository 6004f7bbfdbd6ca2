"""Public names beside what the README lists, what imports what, and what the distributions hold."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import subprocess
import tarfile
import textwrap
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import modtrace
from tests.support.gpt_timeline import gpt_timeline
from tests.support.python_process import run_python

ROOT = Path(__file__).parents[2]
READING = {"numpy", "orjson", "perfetto", "protobuf", "click", "rich"}
PACKAGE = Path(modtrace.__file__).parent


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built wheel and source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run_python("-m", "hatchling", "build", "--directory", folder, cwd=ROOT)
    return folder


def test_options_of_a_recording_are_exactly_those_that_its_readme_documents() -> None:
    section = (ROOT / "src/modtrace/recording/README.md").read_text().split("| --- | --- |\n")[1].split("\n\n")[0]
    documented = [line.split("`")[1] for line in section.splitlines()]

    assert sorted(documented) == sorted(inspect.signature(modtrace.record).parameters)


def test_source_files_that_the_readmes_name_exist() -> None:
    files = [path for folder in ("src", "tests", "scripts", "viewer/src") for path in (ROOT / folder).rglob("*.*")]
    readmes = [*ROOT.glob("*.md"), *(path for path in files if path.suffix == ".md")]
    suffix = r"`((?:[\w*]+/)*[\w*]+\.(?:py|cpp|h|tsx?))`"
    names = {(readme, name) for readme in readmes for name in re.findall(suffix, readme.read_text())}

    assert len(names) > 30
    assert [(str(readme), name) for readme, name in names if not any(path.match(name) for path in files)] == []


def test_public_names_are_exactly_those_that_the_readme_documents() -> None:
    section = (ROOT / "src/modtrace/README.md").read_text().split("## Names in Python\n")[1].strip().split("\n\n")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines()]

    assert sorted(name for cell in first_cells for name in re.findall(r"`(\w+)", cell)) == modtrace.__all__


def test_each_public_name_can_be_imported_and_listed() -> None:
    assert dir(modtrace) == modtrace.__all__ == sorted(set(modtrace.__all__))
    for name in modtrace.__all__:
        assert getattr(modtrace, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        modtrace.absent  # noqa: B018


def names_returned(value: object) -> set[str]:
    """Return the names in the annotations of what a public function returns, or a public class's methods and fields."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return set()
    bases = value.__mro__ if inspect.isclass(value) else (value,)
    sources = [inspect.getsource(base) for base in bases if base.__module__.startswith("modtrace")]
    defined = [node for source in sources for node in ast.parse(textwrap.dedent(source)).body]
    annotations = []
    for node in [inner for outer in defined for inner in (outer.body if isinstance(outer, ast.ClassDef) else [outer])]:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            annotations.append(node.returns)
        elif isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            annotations.append(node.annotation)
    texts = [ast.unparse(annotation).replace("'", "") for annotation in annotations if annotation is not None]
    return {node.id for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def exported_names(module: ModuleType) -> set[str]:
    """Return what type checkers take for public: what `__all__` lists, the file defines, or is imported as itself."""
    body = ast.parse(inspect.getsource(module)).body
    aliases = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    defined = {node.name for node in body if isinstance(node, ast.ClassDef)}
    return {*getattr(module, "__all__", ()), *(alias.name for alias in aliases if alias.asname == alias.name), *defined}


def test_types_that_public_functions_return_are_public_or_documented() -> None:
    section = (
        (ROOT / "src/modtrace/README.md").read_text().split("### Types of results and attributes\n")[1].split("\n#")[0]
    )
    documented = {
        name: module
        for module, names in re.findall(r"^\| `(modtrace\.[\w.]+)` \| (.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    public = [getattr(modtrace, name) for name in modtrace.__all__]
    results = {name for value in public if inspect.isfunction(value) for name in names_returned(value)}
    public += [getattr(importlib.import_module(documented[name]), name) for name in results & documented.keys()]
    returned = {name for value in public for name in names_returned(value)}
    of_python = {*dir(builtins), "Any", "Iterator", "Mapping", "Path", "Sequence"}
    arrays = {"AnyArray", "BoolArray", "Float32Array", "Int8Array", "Int32Array", "Int64Array"}

    assert {"Timeline", "Spans", "Summary", "ThreadStack", "MergeResult", "Report", "CheckResult"} <= returned
    assert returned - of_python - arrays <= {*modtrace.__all__, *documented}
    for name, module in documented.items():
        assert name in exported_names(importlib.import_module(module))


def test_type_checkers_know_the_public_names() -> None:
    tree = ast.parse(Path(modtrace.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    names: dict[str, tuple[str, ...]] = {}
    for node in typed.body:
        assert isinstance(node, ast.ImportFrom)
        (alias,) = node.names
        assert alias.asname == alias.name
        names[f".{node.module}"] = (*names.get(f".{node.module}", ()), alias.name)

    assert names == modtrace._NAMES


def test_reading_a_trace_imports_no_torch() -> None:
    code = (
        "import sys, modtrace\n"
        "from modtrace import Span, Timeline, load, merge, TraceError\n"
        "import modtrace.checking, modtrace.write, modtrace.view\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )

    run_python("-c", code)


def test_importing_modtrace_alone_imports_nothing_heavy() -> None:
    code = "import sys, modtrace; print(sorted({'torch', 'numpy', 'orjson', 'rich', 'click'} & set(sys.modules)))"

    done = run_python("-c", code)

    assert done.stdout == "[]\n"


def test_asking_a_folder_of_ranks_imports_no_extra() -> None:
    code = "import sys, modtrace; modtrace.find_slow_ranks, modtrace.load_ranks; print('pyarrow' in sys.modules)"

    assert run_python("-c", code).stdout == "False\n"


def test_loading_a_saved_json_imports_no_writer_and_no_protobuf(tmp_path: Path) -> None:
    gpt_timeline(1, 1).save(tmp_path / "saved.json")
    heavy = "('google', 'perfetto', 'rich', 'click', 'modtrace.write', 'modtrace.profiler.handler')"
    code = f"import sys, modtrace; modtrace.load(sys.argv[1]); print([name for name in {heavy} if name in sys.modules])"

    done = run_python("-c", code, str(tmp_path / "saved.json"))

    assert done.stdout == "[]\n"


def test_the_wheel_holds_every_file_of_the_package(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())

    tracked = subprocess.run(["git", "ls-files", "src/modtrace"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {path.removeprefix("src/") for path in tracked.stdout.splitlines()} <= held
    for needed in ("py.typed", "track/native/cpp/module.cpp", "track/native/cpp/backward.h", "view/viewer.html"):
        assert f"modtrace/{needed}" in held
    assert [name for name in held if not name.startswith(("modtrace/", "modtrace-"))] == []


def test_the_wheel_names_its_command_license_and_dependencies(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    info = f"modtrace-{modtrace.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        license_text = archive.read(f"{info}/licenses/LICENSE").decode()

    assert "modtrace = modtrace.cli:main" in entry_points
    assert "Apache License" in license_text
    assert "License-Expression: Apache-2.0" in metadata
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*(.*)$", metadata, re.M)
    assert {name for name, extra in required if not extra} == READING
    assert ("torch", "; extra == 'torch'") in required


def test_the_source_distribution_can_test_itself(distributions: Path) -> None:
    (source,) = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}

    for needed in (
        "README.md",
        "LICENSE",
        "scripts/constraints.txt",
        "scripts/test",
        "tests/conftest.py",
        "viewer/package.json",
    ):
        assert needed in held
    assert not any("node_modules" in name for name in held)


def test_no_distribution_ships_the_traces_of_others(distributions: Path) -> None:
    (source,) = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        held = [name for name in archive.getnames() if "kineto" in name and not name.endswith(".py")]

    assert held == []


def test_a_package_lists_what_it_gives_and_a_file_gives_what_has_no_underscore() -> None:
    faults = []
    for path in PACKAGE.rglob("*.py"):
        docstring, *body = ast.parse(path.read_text()).body
        assert isinstance(docstring, ast.Expr), path
        assigned = [node for node in body if isinstance(node, ast.Assign)]
        named = {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}
        imports = [node for inner in body for node in ast.walk(inner) if isinstance(node, ast.ImportFrom)]
        of_files = [node for node in imports if node.level and node.module]
        is_listed = "__all__" in named or any(name.name == name.asname for node in of_files for name in node.names)
        if body and not is_listed and path.name == "__init__.py":
            faults.append(f"{path.relative_to(PACKAGE)} has no __all__, and imports nothing as itself")
        private = [name.name for node in of_files for name in node.names if re.match("_(?!_)", name.name)]
        faults += [f"{path.relative_to(PACKAGE)} imports {name}" for name in private]

    assert faults == []


def test_workflows_run_what_others_made_by_its_hash() -> None:
    workflows = "".join(path.read_text() for path in (ROOT / ".github/workflows").iterdir())
    used = re.findall(r"uses: (.*)", workflows)

    assert len(used) == 10
    assert [one for one in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", one)] == []
