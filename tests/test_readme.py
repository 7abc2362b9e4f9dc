"""The examples on the first pages, as they are printed."""

import re
from pathlib import Path

import pytest

import holdfast as hf

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def example():
    """The Python example, which both pages print, and what it leaves behind."""
    (code,) = re.findall(
        r"```python\n(import holdfast as hf\n.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    names = {}
    exec(code, names)
    return code, names


def test_the_example_learns(example):
    run = example[1]["run"]
    assert run.accuracy > 0.7
    assert run.class_accuracy.shape == (30, 10)


def test_the_first_page_has_the_same_example(example):
    federation_and_training = example[0].split("\n\n")[1].splitlines()[:2]
    assert "\n".join(federation_and_training) in (ROOT / "docs/index.md").read_text()


def test_the_experiment_files_on_the_first_page_are_valid():
    import yaml

    for text in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.S):
        assert hf.Experiment.from_mapping(yaml.safe_load(text)).rounds
