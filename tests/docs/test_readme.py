"""The README as it is printed."""

from pathlib import Path

import pytest
from blocks import ROOT, Outcome, blocks, run_page

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_page(README, tmp_path_factory.mktemp("page"))


def test_the_example_learns(page: Outcome) -> None:
    run = page.names["run"]
    assert run.accuracy > 0.7
    assert run.class_accuracy.shape == (30, 10)


def test_the_commands_train_and_write_a_report(page: Outcome) -> None:
    assert (page.folder / "runs/x/model.safetensors").exists()
    assert "<html" in Path(page.folder, "runs/x/report.html").read_text(encoding="utf-8")


def test_the_first_page_of_the_site_has_the_same_example() -> None:
    (example,) = [block.text for block in blocks(README) if block.language == "python"]
    lines = example.split("\n\n")[1].splitlines()[:3]
    assert "\n".join(lines) in (ROOT / "docs/index.md").read_text(encoding="utf-8")


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 120
