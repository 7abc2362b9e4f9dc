"""docs/sites.md as it is written: its script, its command lines and its Python, in a folder of their own."""

import json

import numpy as np
import pytest
import yaml
from blocks import ROOT, run_page
from typer.testing import CliRunner

from holdfast.cli import app

PAGE = (ROOT / "docs/sites.md").read_text(encoding="utf-8")
SITES = ["bern", "lyon", "oslo", "rome", "turin"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The folder, the names that the page's Python defines, and what its commands print."""
    outcome = run_page(PAGE, tmp_path_factory.mktemp("page"))
    return outcome.folder, outcome.names, {command.split()[1]: text for command, text in outcome.printed}


def test_every_site_is_a_client(page):
    folder, names, printed = page
    assert all(site in printed["partition"] for site in SITES)
    described = json.loads((folder / "runs/one/federation.json").read_text())
    assert described["domains"]["names"] == SITES
    rows = [len(np.loadtxt(folder / f"clinics/{site}.csv", str, skiprows=1)) for site in SITES]
    assert rows == [120, 180, 240, 300, 360]
    assert names["federation"].sizes().tolist() == pytest.approx([0.8 * n for n in rows], abs=1)


def test_results_are_recorded_by_site_and_better_than_chance(page):
    folder, names, _ = page
    last = json.loads((folder / "runs/one/metrics.jsonl").read_text().splitlines()[-1])
    assert list(last["site_accuracy"]) == SITES
    assert last["accuracy"] > 0.75
    assert last["accuracy"] == names["run"].records[-1]["accuracy"]
    recorded = yaml.safe_load((folder / "runs/one/experiment.yaml").read_text())
    assert recorded["data"] == f"{folder}/clinics:target=readmitted,task=binary,drop=[patient]"
    assert recorded["encoder"]["columns"] == ["age", "sex", "pressure", "smoker", "ward"]
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "runs/clinics/comparison.json").exists()


def test_new_patients_have_the_risk_that_they_should(page):
    risk = page[1]["risk"].tolist()
    assert risk[0] > 0.9
    assert risk[1] < 0.3


def test_a_run_of_the_page_is_resumed_from_its_directory(page):
    assert CliRunner().invoke(app, ["resume", str(page[0] / "runs/one")]).exit_code == 0
