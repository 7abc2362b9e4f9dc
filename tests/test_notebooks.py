"""The notebooks, cell by cell in a kernel: without errors, and with results worth showing."""

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
from jupyter_client.manager import KernelManager  # noqa: E402
from nbclient import NotebookClient  # noqa: E402

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))

WORTH_SHOWING = {
    "quickstart": "assert run.accuracy > 0.7 and len(comparison.rows) == 3",
    "own_method": "assert min(comparison.rows[1].accuracy) > 0.7",
    "what_is_forgotten": "assert fedavg.forgetting > 0.1 and fedntd.accuracy > 0.6",
    "hospital_federation": "assert together.score > 0.8 and federation.clients == len(names) == 4",
    "tuning": "assert min(final.value for final in tuning.final) > 0.8 and found.table",
}
FIGURES = {"quickstart": 1, "own_method": 1, "what_is_forgotten": 3}


@pytest.fixture(scope="module")
def kernel():
    """One kernel for all notebooks, which import torch once; each of them starts with an empty namespace."""
    manager = KernelManager()
    yield manager
    manager.shutdown_kernel(now=True)


def executed(name, kernel, folder, environment):
    """The code cells of a notebook after they have run."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    first = f"%reset -f\nimport os\nos.environ.update({environment!r})\n%cd -q {folder}"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
    notebook.cells.append(nbformat.v4.new_code_cell(WORTH_SHOWING[name]))
    NotebookClient(notebook, km=kernel, timeout=300).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cells):
    return "".join(output.get("text", "") for cell in cells for output in cell.outputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, kernel, tmp_path):
    nowhere = {"HOLDFAST_DATA": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    cells = executed(name, kernel, tmp_path, nowhere)
    shown = [output.get("data", {}) for cell in cells for output in cell.outputs]
    assert sum("image/png" in data for data in shown) == FIGURES.get(name, 0)
    assert "Warning" not in printed(cells)
    if name == "hospital_federation":
        assert "the hospitals are invented" in printed(cells)


@pytest.mark.realdata
def test_the_real_hospitals(kernel, tmp_path):
    data = Path(os.environ.get("HOLDFAST_DATA", tmp_path))
    if not [*data.glob("**/processed.cleveland.data")]:
        pytest.skip("HOLDFAST_DATA has no heart-disease")
    text = printed(executed("hospital_federation", kernel, tmp_path, {"HOLDFAST_DATA": str(data)}))
    assert "invented" not in text
    assert "cleveland" in text


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_stored_short_and_without_outputs(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    assert len(cells) < 12
    assert 'find_spec("holdfast") is None' in cells[0].source
