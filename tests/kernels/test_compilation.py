"""Whether compiling the kernels pays off for a run."""

from torch import nn

from holdfast import kernels


def test_compilation_pays_off_for_long_runs_and_compiled_networks(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    small, other = (nn.Sequential(nn.Conv2d(1, channels, 3), nn.Flatten()) for channels in (4, 8))
    assert kernels.compilation_pays_off(small, (1, 8, 8), 16, kernels.MIN_SAMPLES_TO_COMPILE)
    assert not kernels.compilation_pays_off(small, (1, 8, 8), 16, 1000)
    kernels.mark_compiled(small, (1, 8, 8), 16)
    assert kernels.compilation_pays_off(small, (1, 8, 8), 16, 1000)
    assert not kernels.compilation_pays_off(small, (1, 8, 8), 32, 1000)
    assert not kernels.compilation_pays_off(other, (1, 8, 8), 16, 1000)


def test_a_read_only_cache_is_not_an_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(blocked))
    kernels.mark_compiled(nn.Conv2d(1, 1, 1), (1, 2, 2), 1)
    assert not kernels.compilation_pays_off(nn.Conv2d(1, 1, 1), (1, 2, 2), 1, 0)
