"""The page on Python and its notebook: every block and every cell runs, the notebook in a real kernel, with a bar."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import paceline

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "python.md").read_text(encoding="utf-8")
NOTEBOOK = DOCS / "examples" / "notebook.ipynb"


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """torch's settings, which building changes, are put back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("own_names", "torch_settings")
def test_blocks_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.zeros((28, 28), np.uint8)).save("photo.png")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    for block in blocks:
        small = block if "my_net" in block or "Recipe" in block else block.replace("{", '{"model.widths": [2], ', 1)
        exec(small, names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[0] == "top1"
    steps = [line.split()[0] for line in printed if re.fullmatch(r"(\d+)( [\d.e-]+){3}", line)]
    assert steps == ["20", "40", "60"]
    assert names["result"].history[-1]["step"] == 94


def test_every_function_is_on_the_page() -> None:
    assert [name for name in paceline.__all__ if name != "Task" and f"paceline.{name}" not in PAGE] == []


def test_the_notebook_has_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_the_notebook_runs_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    for folder in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder.lower()))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    first, plot, image, prediction, _, loop = [cell["outputs"] for cell in notebook.cells if cell.cell_type == "code"]
    bars = [output["data"]["text/html"] for output in first if "text/html" in output.get("data", {})]
    assert len(bars) == 1
    assert re.match(r'<progress value="94" max="94"', bars[0])
    assert "94/94" in bars[0]
    assert not [output for output in first if output.get("name") == "stderr"]
    assert "TrainResult(" in first[-1]["data"]["text/plain"]
    assert "history" not in first[-1]["data"]["text/plain"]
    assert "image/png" in plot[-1]["data"]
    assert "image/png" in image[-1]["data"]
    assert re.fullmatch(r"\('.+', '.+'\)", prediction[-1]["data"]["text/plain"])
    text = "".join(output["text"] for output in loop if output.get("name") == "stdout")  # in parts, as they came
    assert [line.split()[0] for line in text.splitlines()[:3]] == ["10", "20", "30"]
    mine, theirs = re.findall(r"[\d.]+", loop[-1]["data"]["text/plain"])
    assert 0 < float(mine) < 1
    assert float(theirs) > 0
