"""A notebook whose cells train, one of them twice, executed by nbclient; with `--record FOLDER ENGINE` cells record.

The kernel's truth is printed by its last cell.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

SET_UP = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
import truth
from small_training import Net, train_epoch

torch.manual_seed(0)
torch.set_num_threads(1)
model = Net()
truth.watch(model)
optimizer = torch.optim.Adam(model.parameters())
"""
TRAIN = "train_epoch(model, optimizer, steps=2)\ntruth.report('kernel')\ntruth.restart()"
RECORDED = """
import modtrace
with modtrace.record({path!r}, engine={engine!r}) as recording:
    train_epoch(model, optimizer, steps=2)
truth.report('kernel')
truth.restart()
"""


def run(folder: str | None, engine: str | None) -> None:
    path = None if folder is None else os.path.join(folder, "%p-notebook.json")
    cell = TRAIN if path is None else RECORDED.format(path=path, engine=engine)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (SET_UP, cell)])
    client = NotebookClient(notebook, timeout=60, kernel_name="python3")
    with client.setup_kernel(stdout=subprocess.DEVNULL):
        for index in (0, 1, 1):
            client.execute_cell(notebook.cells[index], index)
            for output in notebook.cells[index].outputs:
                print(output.get("text", output), end="", flush=True)


run(*(sys.argv[2:] if sys.argv[1:2] == ["--record"] else (None, None)))
