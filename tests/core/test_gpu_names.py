import pytest

from megascale.core.gpus import visible_gpu_names
from megascale.resilience.driver import start_driver


@pytest.mark.parametrize(
    ("visible", "present", "names"),
    [
        (None, 2, ["0", "1"]),
        ("2,3", 8, ["2", "3"]),
        ("GPU-abc, 5", 8, ["GPU-abc", "5"]),
        ("2,3", 1, ["2"]),
        ("", 8, []),
        ("-1", 8, []),
        ("1,-1,2", 8, ["1"]),
    ],
)
def test_names_are_those_of_the_gpus_that_the_process_may_use(monkeypatch, visible, present, names):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpu_names(present) == names


def test_the_nodes_of_one_machine_share_the_gpus_that_launch_was_given(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7,2,3")
    monkeypatch.setattr(start_driver, "count_gpus", lambda: 4)
    assert start_driver._name_devices([[0, 1], [2, 3]]) == (("6", "7"), ("2", "3"))
    assert start_driver._name_devices([]) == ()
