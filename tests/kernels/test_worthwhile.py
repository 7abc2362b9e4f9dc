"""When kernels of our own are worth compiling."""

from torch import nn

from holdfast import kernels


def test_long_runs_and_networks_met_before(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    small, other = (nn.Sequential(nn.Conv2d(1, channels, 3), nn.Flatten()) for channels in (4, 8))
    assert kernels.worthwhile(small, (1, 8, 8), 16, kernels.REPAID_AFTER)
    assert not kernels.worthwhile(small, (1, 8, 8), 16, 1000)
    kernels.remember(small, (1, 8, 8), 16)
    assert kernels.worthwhile(small, (1, 8, 8), 16, 1000)
    assert not kernels.worthwhile(small, (1, 8, 8), 32, 1000)
    assert not kernels.worthwhile(other, (1, 8, 8), 16, 1000)


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(blocked))
    kernels.remember(nn.Conv2d(1, 1, 1), (1, 2, 2), 1)
    assert not kernels.worthwhile(nn.Conv2d(1, 1, 1), (1, 2, 2), 1, 0)
