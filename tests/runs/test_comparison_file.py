"""comparison.json: which of a comparison's methods the others are compared with."""

import pytest

from holdfast.core.errors import HoldfastError
from holdfast.runs.comparison import COMPARISON, is_baseline, write_baseline


def test_the_baseline_is_known_from_a_runs_directory(tmp_path):
    runs = [tmp_path / method / "seed-0" for method in ("fedavg", "fedntd-beta=2")]
    assert not any(map(is_baseline, runs))
    write_baseline(tmp_path, "fedntd-beta=2")
    assert [is_baseline(run) for run in runs] == [False, True]
    write_baseline(tmp_path, "fedavg")
    assert [is_baseline(run) for run in runs] == [True, False]


def test_an_unchanged_baseline_is_not_written_again(tmp_path):
    write_baseline(tmp_path, "fedavg")
    before = (tmp_path / COMPARISON).stat()
    write_baseline(tmp_path, "fedavg")
    assert (tmp_path / COMPARISON).stat().st_ino == before.st_ino


@pytest.mark.parametrize("content", ["{", "[]", "{}", '"x"'])
def test_a_damaged_file_is_one_sentence(tmp_path, content):
    (tmp_path / COMPARISON).write_text(content)
    with pytest.raises(HoldfastError, match=r"comparison\.json is damaged; remove it"):
        is_baseline(tmp_path / "fedavg" / "seed-0")
