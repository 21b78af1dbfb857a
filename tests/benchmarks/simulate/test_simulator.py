"""The targets that need no data of others hold; those that do skip and say what they skip."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.simulate import report as validation_report
from benchmarks.simulate.band_evidence import (
    another_series,
    conformal,
    spread_per_doubling,
    unfitted_machine_spread,
    unfitted_spread,
    unfitted_stack_and_machine_spread,
    unfitted_stack_spread,
    unseen_spread,
    vtrain_unfitted,
    without_power,
)
from benchmarks.simulate.held_out_checks import (
    check_a100_stacks,
    check_bands,
    check_nemo,
    check_unseen_runs,
    unfitted_evidence,
)
from benchmarks.simulate.published_rows import (
    LARGE,
    TRACE_FILE,
    VTRAIN_FILE,
    ablation,
    anchor_file,
    find_data_folder,
    h200_peers,
    later_peers,
    list_rounds,
    load_first_round,
    load_h100_runs,
    load_round_predictions,
    nemo_development,
    nemo_h100,
    paper_development,
    strong_scaling,
    vtrain,
    weak_scaling,
)
from benchmarks.simulate.report import check_runs, check_trace
from benchmarks.simulate.score import (
    TABLE_CONSTANTS,
    affine_control,
    calibration_of,
    check_extrapolation,
    check_headline,
    check_left_out,
    check_mfu,
    check_vtrain,
    column,
    fit_rows,
    percent,
    predict,
)
from megascale.errors import DataError
from megascale.observe.analysis.operation_trace import read_trace
from megascale.observe.analysis.whatif import WhatIf, analyse_trace
from megascale.simulate import prediction_band
from megascale.simulate.calibration import Calibration, Constants, load_calibration
from megascale.simulate.case import Case
from megascale.simulate.cluster import list_shipped_clusters, load_cluster
from megascale.simulate.measured_runs import match_predictions
from megascale.simulate.prediction_band import FEATURES, compute_band_ends
from megascale.simulate.scenario import Scenario, make_engine_software
from megascale.simulate.software import find_stack
from megascale.simulate.step import estimate_step
from tests.simulate.simulator_cases import with_part
from tests.simulate.test_measured_runs import write_run


def invoke(*arguments):
    return CliRunner().invoke(app, arguments)


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("a100-roce")


FOLDER = find_data_folder()


def test_the_table_is_the_paper_s():
    """MFU that the table prints follows from its seconds: Megatron's rows within rounding, MegaScale's within 1%."""
    from benchmarks.simulate.published_rows import anchor_file

    rows = strong_scaling()
    mfu = 100 * np.asarray(rows.cases.flops) / (rows.seconds * rows.gpus * 312e12)
    printed = np.array([r[4] for r in anchor_file("megascale")["strong_scaling"]["rows"]])
    anomalous = np.array(["megascale 768 " in n for n in rows.names])
    assert np.abs(mfu - printed)[rows.first].max() < 0.25
    assert np.abs(mfu - printed)[~rows.first & ~anomalous].max() < 0.6


def test_table_checks_fit_on_development_rows_alone(cluster):
    built = [check_left_out(cluster), check_extrapolation(cluster), check_headline(cluster)]
    checks = {c.key: c for c in built}
    assert checks["A1"].passed, checks["A1"].figures
    assert checks["A3"].passed, checks["A3"].figures
    # Missed, and said so: docs/planning.md tells what bounds it. A change that makes it worse shows here.
    assert checks["A2"].figures["mean"][0] < 4.2
    assert "anomalous row kept" in " ".join(checks["A2"].notes)
    assert [used for *_, used in checks["A2"].rows] == [g < LARGE for g in strong_scaling().gpus]
    assert all(gpus < LARGE for gpus in checks_ranges(cluster))
    for check in checks.values():
        assert [c.name.split()[0] for c in check.columns] == ["nothing", "fitted", "control"]
        assert all(0 <= c.covered <= 1 and 0 < c.width < 0.5 for c in check.columns[:2])


def checks_ranges(cluster):
    """GPUs of the rows that the table's constants come from."""
    rows = strong_scaling()
    fitted = calibration_of(cluster, rows, TABLE_CONSTANTS, rows.gpus < LARGE)
    return fitted.ranges["GPUs"]


def test_ablation_and_weak_scaling(cluster):
    checks = {c.key: c for c in check_mfu(cluster)}
    assert checks["A5"].passed, checks["A5"].figures
    # Missed and said so, see docs/planning.md; a change that makes it worse shows here.
    assert checks["A6"].figures["mean"][0] < 6.6


def test_bands_are_scored_with_their_width(cluster):
    (check,) = check_bands(cluster, None)
    assert {c.name for c in check.columns} == {"paper from 3,072 GPUs", "530B", "own second round"}
    # Without vTrain's rows, whose errors and therefore bands are wider.
    assert check.figures["width"][0] < 15
    beyond = {c.name: c for c in check.columns}["paper from 3,072 GPUs"]
    assert beyond.covered >= 0.8
    # A band of nothing covers nothing.
    rows = strong_scaling()
    assert column("none", cluster, rows).covered > column("x", cluster, rows, narrow(cluster)).covered


def test_widths_of_bands_are_what_development_rows_give():
    """Constants come from fits, not from manual edits or from held-out rows."""
    widths = {
        prediction_band.MIN_SPREAD: another_series(),
        prediction_band.UNFITTED_STACK: unfitted_stack_spread(),
        prediction_band.UNFITTED_MACHINE: unfitted_machine_spread(),
        prediction_band.UNFITTED_STACK_AND_MACHINE: unfitted_stack_and_machine_spread(),
        prediction_band.NO_POWER: without_power(),
    }
    for shipped_width, match in widths.items():
        assert match == pytest.approx(shipped_width, abs=6e-4)
    folder = find_data_folder()
    if folder is None or not (folder / VTRAIN_FILE).is_file():
        pytest.skip("vTrain's rows are not here")
    assert pytest.approx(spread_per_doubling(folder), abs=6e-4) == prediction_band.EACH_GPU_DOUBLING
    assert unfitted_spread(folder) == pytest.approx(prediction_band.NOTHING_FITTED, abs=6e-4)
    assert unseen_spread(folder) == pytest.approx(prediction_band.UNSEEN, abs=6e-4)
    pair = prediction_band.MEASURED_PAIRS[("a100-hdr", "megatron-deepspeed")]
    assert compute_band_ends(vtrain_unfitted(folder)) == pytest.approx(pair, abs=6e-4)


def test_quantiles_of_errors():
    """Nine errors: four of five below the eighth by size; the ends go outwards to a rank."""
    errors = np.array([0.01, -0.02, 0.03, -0.04, 0.05, -0.06, 0.07, -0.08, 0.09])
    assert conformal(errors) == pytest.approx(0.08)
    assert compute_band_ends(errors) == pytest.approx((-0.08, 0.09))


def test_rows_with_nothing_fitted_speak_for_their_own_kind(cluster):
    """The band of a series whose errors are known is that of its own errors, lopsided as they are."""
    rows = paper_development()
    expected = unfitted_evidence(cluster, rows)
    off = np.array(expected.residuals)
    assert off == pytest.approx(np.log(predict(cluster, rows) / rows.seconds))
    low, high = prediction_band.estimate_band_width(cluster, rows.cases, expected).around(1.0)
    assert (1 / float(high[0]), 1 / float(low[0])) == pytest.approx(tuple(np.exp(compute_band_ends(off))))
    # The two extremes lie on the ends, where rounding decides.
    assert column("own", cluster, rows, expected).covered >= 0.75


def narrow(cluster):
    """A calibration that is wrong and sure of itself."""
    return Calibration("sure", cluster.name, Constants(compute=0.5), {"compute": 0.1}, ("r",) * 9, (0.0001,) * 9)


def test_the_shipped_calibration_is_what_its_command_gives(cluster):
    """Fitted constants are not edited by hand."""
    for name, machine, rows, constants in (
        ("a100-roce", "a100-roce", paper_development(), ("fixed",)),
        ("h200-host", "h200-host", h200_peers(), ("compute",)),
        ("h200-engine", "h200-host", load_first_round(), ("compute", "tp_residual")),
        ("h100-engine", "h100-host", load_h100_runs(), ("compute", "tp_residual")),
        ("h100-host", "h100-host", later_peers("peers"), ("compute",)),
        ("h100-nemo", "h100-dgx", nemo_development(), ("compute",)),
    ):
        shipped = load_calibration(name, machine)
        repeated = fit_rows(load_cluster(machine), rows, constants, np.ones(len(rows), dtype=bool))
        assert set(shipped.fitted or {}) == set(constants)
        assert set(shipped.ranges) == set(FEATURES)
        for constant in constants:
            assert getattr(shipped.constants, constant) == pytest.approx(
                getattr(repeated.constants, constant), rel=1e-3
            )


def test_the_control_needs_no_physics():
    """A line a system scores about 0.7% within the rows to 1,024 GPUs: that table alone proves little."""
    rows = paper_development()
    errors = np.abs(percent(affine_control(rows, np.ones(len(rows), dtype=bool)), rows.seconds))
    assert errors.mean() < 1.0


def test_a_worse_model_misses(cluster):
    """The checks can fail: with overlap residuals of one, MegaScale's rows are predicted too slow."""
    wrong = with_part(cluster, "overlap", tp_residual=1.0, slowdown=0.9)
    assert not check_headline(wrong).passed


def test_peers_on_the_h200_host():
    """megatron-core's six steps within 5% with one fitted constant; host-bound ones within 10%, unfitted."""
    cluster, rows = load_cluster("h200-host"), h200_peers()
    result = fit_rows(cluster, rows, ("compute",), np.ones(len(rows), dtype=bool))
    assert np.abs(np.expm1(result.residuals)).max() < 0.05
    bound = h200_peers(host_bound=True)
    assert np.abs(percent(predict(cluster, bound, result.constants), bound.seconds)).max() < 10


def test_steps_on_h100s_need_the_power_limit():
    """Without it this engine's H100 steps come out a tenth too fast, with it they are as good as on H200s."""
    limited, rows = load_cluster("h100-host"), load_h100_runs()
    errors = percent(predict(limited, rows), rows.seconds)
    assert np.abs(errors).mean() < 2.0
    unlimited = limited.model_copy(update={"power": None})
    assert percent(predict(unlimited, rows), rows.seconds).mean() < -10
    # The band of a cluster without the figure says so and reaches what is missing.
    calibration = load_calibration("h100-engine", "h100-host")
    assert column("unlimited", unlimited, rows, calibration).covered > 0.8
    scalar = Case(**{key: value[0].item() for key, value in vars(rows.cases).items()})
    assert any("no [power]" in text for text in prediction_band.list_cautions(unlimited, scalar, calibration))
    assert not any("[power]" in text for text in prediction_band.list_cautions(limited, scalar, calibration))


def test_every_shipped_gpu_has_a_power_limit():
    for name in list_shipped_clusters():
        assert load_cluster(name).power is not None, name


def test_other_stacks_on_h100s():
    """NVIDIA's development rows with nothing fitted, and Megatron-Core measured here with one constant."""
    rows = nemo_development()
    errors = percent(predict(load_cluster("h100-dgx"), rows), rows.seconds)
    assert np.abs(errors).mean() < 3.5
    cluster, peers = load_cluster("h100-host"), later_peers("peers")
    fitted = load_calibration("h100-host", cluster.name).constants
    assert np.abs(percent(predict(cluster, peers, fitted), peers.seconds)).mean() < 3.0


def test_unseen_runs_meet_their_targets():
    """Check 55 configurations measured after the model was frozen: mean 3%, worst 10%, bands 80 ± 10%."""
    check = check_unseen_runs()
    assert check.passed, check.figures
    overall, *columns = check.columns
    assert overall.rows == 55
    controls = [column.mean for column in columns if "control" in column.name]
    assert len(controls) == 2
    assert overall.mean < 0.25 * min(controls)


def test_published_h100_rows_that_were_held_out_meet_what_was_asked():
    """Mean 4%, bands 80 ± 10%; 40% of the rows were developed on, by a rule committed before any was scored."""
    check = check_nemo()
    assert check.passed, check.figures
    rows, development = nemo_h100()
    assert check.columns[0].rows == int((~development).sum())
    assert 0.3 < development.mean() < 0.5
    # Float8 scales worse than bfloat16, and by more than compute alone: 340B from 128 to 2,048 GPUs.
    cluster, constants = load_cluster("h100-dgx"), load_calibration("h100-nemo", "h100-dgx").constants
    seconds = dict(zip(rows.names, predict(cluster, rows, constants), strict=True))
    rise = {}
    for precision in ("bfloat16", "float8"):
        small, large = (
            seconds[f"nemotron-340b {precision} {gpus} GPUs TP8 PP8(x12), micro-batch 1"] for gpus in ("128", "2,048")
        )
        rise[precision] = large / small - 1
    assert 0.04 < rise["bfloat16"] < rise["float8"] < 0.12


def test_bands_of_other_stacks_on_a100s():
    check = check_a100_stacks(FOLDER)
    assert {item.rows for item in check.columns} >= {7, 8}
    if FOLDER is not None and (FOLDER / VTRAIN_FILE).is_file():
        assert check.passed, check.figures
    korthikanti_rows = check.columns[0]
    assert korthikanti_rows.mean < 4


def test_anchor_cases_divide():
    local = [later_peers("peers"), later_peers("peers-h200"), nemo_h100()[0]]
    for rows in (strong_scaling(), ablation()[0], weak_scaling()[0], h200_peers()) + tuple(local):
        assert np.all(rows.cases.fits())


def replay(file: Path) -> WhatIf:
    return analyse_trace(read_trace(file))


def test_absent_data_is_skipped_and_said(tmp_path, monkeypatch):
    def without_third(name):
        return {key: value for key, value in anchor_file(name).items() if key != "h200-third"}

    monkeypatch.setattr(validation_report, "anchor_file", without_third)
    for check in (
        *check_vtrain(None),
        *check_trace(None, replay),
        *check_vtrain(tmp_path),
        *check_trace(tmp_path, replay),
    ):
        assert check.passed is None
        assert "not here" in check.skipped
    for check in check_runs(None):
        waiting = check.passed is None
        measured = any(f"predictions {name} made" in check.title for name in list_rounds() if name != "h200-third")
        assert waiting != measured
        assert waiting == ("wait for their measurement" in check.skipped)
    with pytest.raises(DataError, match="not a folder"):
        find_data_folder(tmp_path / "nowhere")


def test_damaged_data_is_refused(tmp_path):
    (tmp_path / "steps").mkdir()
    (tmp_path / VTRAIN_FILE).write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="cannot be read"):
        vtrain(tmp_path)


@pytest.mark.skipif(FOLDER is None or not (FOLDER / VTRAIN_FILE).is_file(), reason="vTrain's rows are not here")
def test_vtrain_scores():
    """Targets are 6 and 8%, missed and said so (docs/planning.md); a change that makes them worse shows here."""
    (check,) = check_vtrain(FOLDER)
    assert check.figures["not fitted"][0] < 7.25
    assert check.figures["fitted"][0] < 8.7
    plain, _, _, fitted, control = check.columns
    assert plain.rows == 40
    assert fitted.mean < control.mean


@pytest.mark.skipif(FOLDER is None or not (FOLDER / TRACE_FILE).is_file(), reason="the ByteDance trace is not here")
def test_trace_targets():
    pytest.importorskip("pyarrow")
    (check,) = check_trace(FOLDER, replay)
    assert check.passed, check.figures


@pytest.mark.parametrize("name", ["h200", "h200-fourth"])
def test_predictions_were_made_for_configurations_that_lay_out(name):
    built, output = load_round_predictions(name)
    assert "before" in built
    assert len({p.name for p in output}) == len(output) >= 10
    for p in output:
        config = p.config()
        assert config.train.name == p.name
        scenario = Scenario(
            config,
            p.gpus,
            load_cluster("h200-host"),
            load_calibration(None, "h200-host"),
            make_engine_software(config, find_stack(p.software)),
        )
        assert scenario.memory_gib() < 139
        assert p.low < p.seconds < p.high
        # The model has changed since; a prediction stays what it was when it was made.
        if "host-memory" not in p.name:  # on links of another machine
            assert 0.8 < estimate_step(scenario).seconds / p.seconds < 1.25


def test_own_runs_are_compared(tmp_path):
    _, output = load_round_predictions("h200")
    for p, factor in zip(output[:2], (1.02, 1.2), strict=True):
        write_run(tmp_path / p.name, p.settings, p.seconds * factor, p.gpus)
    peers = check_runs(tmp_path)
    check = next(item for item in peers if "predictions h200 made" in item.title)
    # Rounds of which the folder has no run fall back on the shipped measurements.
    result = {
        round_: next(entry for entry in peers if round_ in entry.title) for round_ in ("second", "third", "fourth")
    }
    assert {name: len(one.rows) for name, one in result.items()} == {"second": 8, "third": 8, "fourth": 12}
    # The third round was predicted of an engine without graphs, so that its small models missed; the model that stood
    # when it was measured had not seen it.
    assert result["third"].passed is False
    today = next(one for one in result["third"].columns if one.name.startswith("fitted"))
    assert today.mean < 2.5
    assert today.worst < 4.5
    assert check.passed is False
    assert len(check.rows) == 2
    assert any("not measured" in note for note in check.notes)
    write_run(tmp_path / output[2].name, list(output[2].settings) + ["parallel.tensor=2"], 1.0, 2)
    with pytest.raises(DataError, match="parallel"):
        match_predictions(output, tmp_path)


def test_validate_prints_pass_or_miss():
    result = invoke("simulator", "--only", "A3", "--rows")
    assert result.exit_code == 0
    assert "pass" in result.stdout
    assert "held out" in result.stdout
    result = invoke("simulator", "--only", "A7")
    assert result.exit_code == 1
    for word in ("miss", "pass", "nothing fitted", "control"):
        assert word in result.stdout


def test_checks_as_json_and_as_pictures(tmp_path):
    result = invoke("simulator", "--only", "A3,A5", "--json", "--plot", str(tmp_path))
    checks = json.loads(result.stdout)
    assert [check["key"] for check in checks] == ["A3", "A5"]
    assert all(check["title"] for check in checks)
    assert {file.name for file in tmp_path.iterdir()} >= {"a3.png", "a5-mfu.png"}


def test_a_calibration_is_fitted_to_a_published_table():
    result = invoke("calibration", "paper", "--cluster", "a100-roce", "--fit", "fixed")
    fitted = tomllib.loads(result.stdout)
    shipped = load_calibration("a100-roce", "a100-roce")
    assert fitted["constants"]["fixed"] == pytest.approx(shipped.constants.fixed, rel=1e-3)
    refused = invoke("calibration", "moon", "--cluster", "a100-roce")
    assert "own-h100" in str(refused.exception)
