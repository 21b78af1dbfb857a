"""The fit finds what made the data, and says what the data cannot decide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate.published_rows import strong_scaling
from benchmarks.simulate.score import predict
from megascale.errors import ConfigError
from megascale.simulate.calibration import BOUNDS, Calibration, Constants, load_calibration, shipped_calibrations
from megascale.simulate.cluster import list_shipped_clusters, load_cluster, validate_cluster
from megascale.simulate.fitting import fit_constants
from megascale.simulate.prediction_band import estimate_band_width, list_cautions, list_feature_ranges
from tests.simulate.simulator_cases import GPT_13B, case


@settings(max_examples=8, deadline=None)
@given(st.floats(0.7, 1.5), st.floats(0.1, 1.9))
def test_recovers_constants(compute, fixed):
    cluster, rows = load_cluster("a100-roce"), strong_scaling()
    truth = Constants(compute=compute, fixed=fixed)
    seconds = predict(cluster, rows, truth)
    result = fit_constants(("compute", "fixed"), lambda c: predict(cluster, rows, c), seconds)
    assert result.constants.compute == pytest.approx(compute, rel=1e-3)
    assert result.constants.fixed == pytest.approx(fixed, rel=1e-2, abs=1e-3)
    assert np.abs(result.residuals).max() < 1e-4
    assert not result.warnings


def test_warns_of_what_cannot_be_told_apart():
    """Two constants that only ever act as their product."""
    x = np.linspace(1, 3, 6)
    result = fit_constants(("compute", "overhead"), lambda c: c.compute * c.overhead * x, 1.2 * x)
    assert any("cannot tell apart" in w and "compute" in w and "overhead" in w for w in result.warnings)


def test_warns_at_a_bound():
    x = np.linspace(1, 3, 6)
    result = fit_constants(("compute",), lambda c: c.compute * x, 5.0 * x)
    assert result.constants.compute == BOUNDS["compute"][1]
    assert any("stands at its bound" in w for w in result.warnings)


def test_more_constants_than_rows_is_said():
    x = np.array([1.0])
    result = fit_constants(("compute", "fixed"), lambda c: c.compute * x + c.fixed, 2.0 * x)
    assert any("cannot tell apart" in w for w in result.warnings)


@settings(max_examples=30, deadline=None)
@given(
    st.floats(0.5, 2.0),
    st.text(min_size=1, max_size=20).filter(lambda t: t.isprintable()),
    st.lists(st.floats(-0.2, 0.2), max_size=9),
)
def test_calibration_files_round_trip(tmp_path_factory, compute, text, residuals):
    path = tmp_path_factory.mktemp("calibration") / "mine.toml"
    built = Calibration("mine", "a100-roce", Constants(compute=compute), {"compute": 0.1}, (text,), tuple(residuals))
    path.write_text(built.to_toml())
    read = load_calibration(str(path), "a100-roce")
    assert read.constants.compute == pytest.approx(compute, rel=1e-5)
    assert read.rows == (text,)
    assert read.residuals == pytest.approx(residuals, abs=1e-5)


def test_bands_hold_the_step_and_widen_with_the_residuals():
    cluster, single = load_cluster("a100-roce"), case()
    local = {"fitted": {"compute": 0.1}, "ranges": list_feature_ranges(single)}
    narrow = Calibration("a", "a100-roce", residuals=(0.01, -0.01, 0.01, -0.01, 0.01), **local)
    wide = Calibration("b", "a100-roce", residuals=(0.1, -0.1, 0.1, -0.1, 0.1), **local)
    bands = [estimate_band_width(cluster, single, c).around(10.0) for c in (wide, narrow)]
    assert bands[0][0] < bands[1][0] < 10.0 < bands[1][1] < bands[0][1]
    assert estimate_band_width(cluster, single, narrow).reasons == ()


def test_bands_of_the_uncalibrated_reach_further_up():
    """Without a fit, steps take longer than predicted: P90 lies further away than P10."""
    cluster = load_cluster("a100-hdr")
    low, high = estimate_band_width(cluster, case(), Calibration("none", cluster.name)).around(10.0)
    assert 10.0 / low < 1.06 < 1.09 < high / 10.0


def test_bands_widen_outside_what_was_fitted_and_say_why():
    cluster, single = load_cluster("a100-roce"), case()
    fitted = Calibration(
        "a", "a100-roce", fitted={"compute": 0.1}, residuals=(0.01,) * 9, ranges=list_feature_ranges(single)
    )
    inside = estimate_band_width(cluster, single, fitted)
    for peer, word in (
        (case(data=192, batch=6144), "GPUs"),
        (case(micro=4), "micro-batch"),
        (case(model=GPT_13B), "layer weights"),
    ):
        outside = estimate_band_width(cluster, peer, fitted)
        assert outside.spread > inside.spread
        assert word in " ".join(outside.reasons)
        assert "outside what was fitted" in " ".join(list_cautions(cluster, peer, fitted))
    foreign = estimate_band_width(load_cluster("a100-hdr"), single, fitted)
    assert foreign.spread > 1.5 * inside.spread
    assert "is of cluster a100-roce, not a100-hdr" in foreign.reasons[0]
    assert "assumed, not measured" in " ".join(list_cautions(load_cluster("h200-host"), single, fitted))
    assert "assumed, not measured" not in " ".join(
        list_cautions(load_cluster("h200-host"), case(1, 1, 1, 8, 1, 8), fitted)
    )


def test_shipped_files_load_and_tell_their_sources():
    for name in list_shipped_clusters():
        cluster = load_cluster(name)
        assert all(len(source) > 3 for source in cluster.sources.values())
    for name in shipped_calibrations():
        assert load_calibration(name, name).rows
    assert {"h100-dgx", "h800", "a800", "b200-dgx"} <= set(list_shipped_clusters())


def test_constants_that_rows_do_not_decide_are_flagged():
    """A constant whose error is larger than itself, one that no row sees, one at its bound."""
    cluster, rows = load_cluster("a100-roce"), strong_scaling()
    rng = np.random.default_rng(0)
    noisy = predict(cluster, rows, Constants(fixed=0.002)) * np.exp(rng.normal(0, 0.02, len(rows)))
    result = fit_constants(("fixed",), lambda c: predict(cluster, rows, c), noisy)
    assert "fixed" in " ".join(result.warnings)
    unseen = fit_constants(
        ("compute", "tp_residual"), lambda c: predict(cluster, rows.subset(rows.first), c), noisy[rows.first]
    )
    assert "cannot tell apart" in " ".join(unseen.warnings)


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"gpu": {"name": "x"}}, "gpu.peak_tflops"),
        ({"surprise": 1}, "surprise"),
        ({"sources": {}}, "no source"),
    ],
)
def test_a_wrong_cluster_is_refused(change, output):
    tree = load_cluster("a100-roce").model_dump() | change
    with pytest.raises(ConfigError, match=output):
        validate_cluster(tree)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither"):
        load_cluster("nowhere")
    with pytest.raises(ConfigError, match="neither"):
        load_calibration("nowhere", "a100-roce")
    bad = tmp_path / "bad.toml"
    bad.write_text("name = 'x'")
    with pytest.raises(ConfigError, match="constants"):
        load_calibration(str(bad), "a100-roce")
    bad.write_text("name = 'x'\ncluster = 'y'\n[constants]\nwhat = 1.0\n")
    with pytest.raises(ConfigError, match="what"):
        load_calibration(str(bad), "a100-roce")
