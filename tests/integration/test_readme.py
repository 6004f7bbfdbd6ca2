"""Each code block of the README, in order, on both engines, in a virtual environment that has what the README installs.

torch and the other dependencies are not downloaded: a `.pth` file of the environment leads to those of the tests. pip
builds and installs modtrace itself from a copy of the checkout, as the README says, without an index to ask.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import modtrace
from modtrace.record_options import EngineName
from tests.support.python_process import STARTUP
from tests.support.test_scale import PYTHON_IN_FULL
from tests.support.view_process import see_page

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_blocks() -> list[tuple[str, str]]:
    """Language and text of each block; blocks without a language hold output of a program, and no line to run."""
    blocks: list[tuple[str, str]] = BLOCK.findall((ROOT / "README.md").read_text())
    assert {language for language, _ in blocks} == {"console", "python", ""}
    assert not any("$ " in text for language, text in blocks if not language)
    return blocks


class BareEnvironment:
    """A virtual environment without modtrace, and a folder with a checkout in which commands run.

    Args:
        folder: the folder to make both in.
        cache: the folder of engines.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder / "checkout"
        venv = folder / "venv"
        shutil.copytree(ROOT / "src", self.folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.folder)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (packages,) = venv.glob("lib/python*/site-packages")
        found = [path for path in sys.path if path.endswith("-packages")]
        (packages / "dependencies.pth").write_text("\n".join([*found, str(STARTUP)]))
        for name, module in (("pip", "pip._internal.cli.main"), ("torchrun", "torch.distributed.run")):
            script = venv / "bin" / name
            script.write_text(f"#!{venv}/bin/python\nfrom {module} import main\nraise SystemExit(main())\n")
            script.chmod(0o755)
        self.environment = {
            "PATH": f"{venv}/bin:/usr/bin:/bin",
            "HOME": str(folder),
            "OMP_WAIT_POLICY": "passive",  # as in all tests
            "MODTRACE_CACHE": str(cache),
            "MODTRACE_BUILD": "0",
            "PIP_CONFIG_FILE": os.devnull,  # a machine's configuration may cap torch
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # 0 turns it off: the build backend is one of the dependencies
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def run(self, command: str, *, status: int = 0, cache: Path | None = None) -> str:
        """Run a command of a console, which must end with a status; return its output."""
        changes = {} if cache is None else {"MODTRACE_CACHE": str(cache)}
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=self.folder,
            env=self.environment | changes,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == status, f"$ {command}\n{done.stdout}"
        return done.stdout

    def view(self, command: str) -> None:
        """Run `modtrace view`, fetch the page from the printed address, and end it by Ctrl-C as the README says."""
        server = subprocess.Popen(
            ["bash", "-euc", f"exec {command}"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = see_page(server)
        assert server.returncode in (0, 1, 130), said


@PYTHON_IN_FULL
@pytest.mark.timeout(1800)
def test_each_line_of_the_readme_runs(
    engine: EngineName, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    built = Path(os.environ.get("MODTRACE_CACHE") or "~/.cache/modtrace").expanduser()
    bare = BareEnvironment(tmp_path, built if engine == "native" else tmp_path_factory.mktemp("empty"))

    words = {word for language, text in code_blocks() if language == "console" for word in text.split()}
    ran = 0
    for language, text in code_blocks():
        if language == "python":
            name = text.splitlines()[0].removeprefix("# ") if text.startswith("# ") else f"block{ran}.py"
            (bare.folder / name).write_text(text)
            if name not in words:  # otherwise a line runs it
                bare.run(f"python {name}")
            ran += 1
        for command in [line[2:] for line in text.splitlines() if language == "console" and line.startswith("$ ")]:
            if command.startswith("scripts/"):
                # They set up a machine, which takes minutes; CI runs them.
                assert os.access(ROOT / command.split()[0], os.X_OK)
            elif command.startswith("modtrace view"):
                bare.view(command)
            elif command.startswith("modtrace where run-"):
                for rank in range(4):  # the rings of the job that the README speaks of
                    shutil.copy(bare.folder / "run.modtrace", bare.folder / f"run-{rank}.modtrace")
                bare.run(command)
            elif command.startswith("modtrace summary --memory") and engine == "python":
                assert "has no memory" in bare.run(command, status=2)
            else:
                # The Python engine records if no engine is built; this test is not about builds.
                bare.run(command, cache=built if command == "modtrace build" else None)
            ran += 1

    assert ran == 22
    assert modtrace.load(bare.folder / "train.pftrace").metadata["engine"] == engine
    assert modtrace.load(bare.folder / "steps.pftrace").metadata["engine"] == engine
    installed = bare.run("python -c 'import modtrace; print(modtrace.__file__)'")
    assert installed.startswith(str(tmp_path / "venv"))
    (trace,) = (bare.folder / "traces").iterdir()
    assert "GELU" in {name.module_class for name in modtrace.load(trace).names}


def test_the_sample_of_where_has_the_columns_of_the_command() -> None:
    sample = (ROOT / "README.md").read_text().partition("$ modtrace where run-*.modtrace\n")[2].splitlines()

    assert sample[0] == "rank 3 is in GPT.blocks.3.mlp, the other 3 in GPT.blocks.4.attention"
    assert sample[4].split() == ["pid", "state", "step", "thread", "in", "for", "usually"]


def test_each_file_that_the_readmes_link_to_is_there() -> None:
    for readme in [ROOT / "README.md", *sorted((ROOT / "src").rglob("README.md"))]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", readme.read_text()):
            assert target.startswith("https://") or (readme.parent / target).exists(), f"{readme}: {target}"
