"""The targets that need no data of others hold; those that do skip and say what they skip."""

from __future__ import annotations

import numpy as np
import pytest

from megascale.errors import DataError
from megascale.simulate.cluster import load_cluster
from megascale.simulate.validation.anchors import (
    TRACE_FILE,
    VTRAIN_FILE,
    ablation,
    data_folder,
    h200_peers,
    strong_scaling,
    vtrain,
    weak_scaling,
)
from megascale.simulate.validation.score import (
    affine_control,
    check_mfu,
    check_table,
    check_vtrain,
    fit_rows,
    percent,
    predict,
)
from megascale.simulate.validation.validation_report import check_runs, check_trace


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("a100-roce")


def test_the_table_is_the_paper_s():
    """MFU that the table prints follows from its seconds: Megatron's rows within rounding, MegaScale's within 1%."""
    from megascale.simulate.validation.anchors import anchor_file

    rows = strong_scaling()
    mfu = 100 * np.asarray(rows.cases.flops) / (rows.seconds * rows.gpus * 312e12)
    printed = np.array([r[4] for r in anchor_file("megascale")["strong_scaling"]["rows"]])
    anomalous = np.array(["megascale 768 " in n for n in rows.names])
    assert np.abs(mfu - printed)[rows.first].max() < 0.25
    assert np.abs(mfu - printed)[~rows.first & ~anomalous].max() < 0.6


def test_table_targets(cluster):
    checks = {c.key: c for c in check_table(cluster)}
    for key in ("A1", "A2", "A3"):
        assert checks[key].passed, checks[key].figures
    assert "control without physics" in " ".join(checks["A1"].notes)
    assert "anomalous row kept" in " ".join(checks["A1"].notes)
    assert sum(used for *_, used in checks["A1"].rows) == 6
    assert sum(used for *_, used in checks["A2"].rows) == 4
    assert [used for *_, used in checks["A3"].rows] == [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4


def test_ablation_and_weak_scaling_targets(cluster):
    checks = {c.key: c for c in check_mfu(cluster)}
    assert checks["A5"].passed, checks["A5"].figures
    assert checks["A6"].passed, checks["A6"].figures


def test_the_shipped_calibration_is_what_its_command_gives(cluster):
    """Nobody edits a fitted constant by hand."""
    from megascale.simulate.calibration import load_calibration

    for name, rows, constants in (
        ("a100-roce", strong_scaling(), ("compute", "fixed")),
        ("h200-host", h200_peers(), ("compute",)),
    ):
        shipped = load_calibration(name, name)
        again = fit_rows(load_cluster(name), rows, constants, np.ones(len(rows), dtype=bool))
        assert set(shipped.fitted or {}) == set(constants)
        for constant in constants:
            assert getattr(shipped.constants, constant) == pytest.approx(getattr(again.constants, constant), rel=1e-3)


def test_the_control_needs_no_physics(cluster):
    """A line a system scores about 1.8%, as the research behind the target says."""
    rows = strong_scaling()
    six = np.isin(rows.gpus, (256, 1024, 12288))
    errors = np.abs(percent(affine_control(rows, cluster, six), rows.seconds))[~six]
    assert 1.5 < errors.mean() < 2.2


def test_a_worse_model_misses(cluster):
    """The checks can fail: with overlap residuals of one, MegaScale's rows are predicted too slow."""
    from tests.simulate.simulator_cases import with_part

    wrong = with_part(cluster, "overlap", tp_residual=1.0, slowdown=0.9)
    assert not {c.key: c for c in check_table(wrong)}["A3"].passed


def test_peers_on_the_h200_host():
    """megatron-core's six steps within 6% with one fitted constant; host-bound ones within 30%, unfitted."""
    cluster, rows = load_cluster("h200-host"), h200_peers()
    result = fit_rows(cluster, rows, ("compute",), np.ones(len(rows), dtype=bool))
    assert np.abs(np.expm1(result.residuals)).max() < 0.06
    bound = h200_peers(host_bound=True)
    assert np.abs(percent(predict(cluster, bound, result.constants), bound.seconds)).max() < 30


def test_anchor_cases_divide():
    for rows in (strong_scaling(), ablation()[0], weak_scaling()[0], h200_peers()):
        assert np.all(rows.cases.fits())


def test_absent_data_is_skipped_and_said(tmp_path):
    for check in (*check_vtrain(None), *check_trace(None), *check_vtrain(tmp_path), *check_trace(tmp_path)):
        assert check.passed is None
        assert "not here" in check.skipped
    for check in check_runs(None):
        assert check.passed is None
        assert "wait for their measurement" in check.skipped
    with pytest.raises(DataError, match="no folder"):
        data_folder(tmp_path / "nowhere")


def test_damaged_data_is_refused(tmp_path):
    (tmp_path / "steps").mkdir()
    (tmp_path / VTRAIN_FILE).write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="cannot be read"):
        vtrain(tmp_path)


FOLDER = data_folder()


@pytest.mark.skipif(FOLDER is None or not (FOLDER / VTRAIN_FILE).is_file(), reason="vTrain's rows are not here")
def test_vtrain_targets():
    (check,) = check_vtrain(FOLDER)
    assert check.passed, check.figures
    assert sum(used for *_, used in check.rows) == 20


@pytest.mark.skipif(FOLDER is None or not (FOLDER / TRACE_FILE).is_file(), reason="the ByteDance trace is not here")
def test_trace_targets():
    pytest.importorskip("pyarrow")
    (check,) = check_trace(FOLDER)
    assert check.passed, check.figures
