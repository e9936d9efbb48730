"""Tables and plots of the estimator."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from remat.sac import SACEstimator, greedy_order, upper_envelope
from remat.sac.estimation.estimator import tradeoff_figure
from tests.sac.estimation.test_estimator import Block
from tests.sac.planned import example, ran


@pytest.fixture
def found() -> SACEstimator:
    def make() -> nn.Module:
        model = nn.Sequential()
        model.add_module("a/b", Block())
        return model

    return ran(make, (2, 5, 8))


@pytest.mark.parametrize("tabular", [True, False])
def test_tables_are_plain_where_nobody_looks(
    tabular: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = SACEstimator()
    stats = example()
    found.display_sac_stats(stats, tabular)
    found.display_sac_tradeoff_stats(greedy_order(stats), stats, tabular)
    out = capsys.readouterr().out
    assert out.isascii()
    assert "Total Memory: 420 B Total Runtime: 63 ms Store Random: False" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["1", "add", "5.000000", "100"] in rows
    assert ["6", "t", "1.000000", "0", "yes"] in rows
    assert ["7", "relu_", "5.000000", "0", "5"] in rows
    # Each group, with cumulative freed bytes and recompute time.
    assert ["6", "t", "0.0000", "0", "0.0159", "1.000000", "recomputed"] in rows
    both = ["5", "7", "linear,", "relu_", "1.0000", "420", "0.6825", "43.000000", "7.14e+00"]
    assert both in rows
    assert ["0", "copy_", "1.0000", "420", "1.0000", "63.000000", "stored"] in rows


def test_modules_are_shown_to_a_depth(
    found: SACEstimator, capsys: pytest.CaptureFixture[str]
) -> None:
    found.display_modulewise_sac_stats(depth=1)
    assert capsys.readouterr().out.count("Module: ") == 2
    found.display_modulewise_sac_stats(depth=2)
    assert "Module: Sequential.a/b\n" in capsys.readouterr().out


def test_pictures(found: SACEstimator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found.pwlf_sac_tradeoff_curve(2, save_tradeoff_graphs=True)
    names = sorted(p.name for p in (tmp_path / "tradeoff_graphs").iterdir())
    assert names == ["Sequential.a%2Fb.png", "Sequential.png"], "a slash becomes no folder"


def test_the_picture_shows_the_curve_and_its_lines() -> None:
    stats = example()
    fitted = upper_envelope(stats, greedy_order(stats), 2)
    greedy, *lines = tradeoff_figure(fitted, "M").axes[0].get_lines()
    assert list(greedy.get_xdata()) == list(fitted.tradeoff_curve)
    assert len(lines) == fitted.n_segments == 2
