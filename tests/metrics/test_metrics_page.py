import re
from pathlib import Path

import numpy as np
import pytest

from holdfast import metrics

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_every_metric_is_on_the_page_and_nothing_else():
    assert set(re.findall(r"^\|.*?`(\w+)\(", PAGE, flags=re.MULTILINE)) == set(metrics.__all__)


def test_the_example_prints_what_the_page_says(capsys):
    example = re.search(r"```python\n(.*?)```", PAGE, flags=re.DOTALL).group(1)
    with np.printoptions(precision=3):
        exec(example, {})
    printed = capsys.readouterr().out.splitlines()
    assert float(printed[0]) == pytest.approx(0.0667, abs=1e-4)
    assert printed[1:] == ["[0.133 0.133 0.   ]", "[0.2   0.167]", "[0.82 0.7 ] [0.09 0.4 ]", "3"]
