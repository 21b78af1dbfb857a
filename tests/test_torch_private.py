"""Private names of torch: this release has all, one file uses them, and an error names a missing one."""

from __future__ import annotations

import ast
import tomllib
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megascale import torch_private
from megascale.errors import TrainingError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", sorted(torch_private.PRIVATE_NAMES))
def test_every_name_is_there(name: str) -> None:
    if name in torch_private.CUDA_ONLY and torch.version.cuda is None:
        with pytest.raises(TrainingError, match=rf"{torch_private.PRIVATE_NAMES[name][1]}.*tested with torch >= 2\.11"):
            getattr(torch_private, name)
        return
    assert getattr(torch_private, name) is torch_private.lookup(*torch_private.PRIVATE_NAMES[name])
    assert isinstance(torch_private.dump_flight_recorder(), str)


def test_flight_records_are_nccls_where_there_are_any_else_gloos(monkeypatch: pytest.MonkeyPatch) -> None:
    output = {"_dump_nccl_trace_json": b'{"pg_config":{}}', "_dump_fr_trace_json": '{"entries":[]}'}
    monkeypatch.setattr(torch_private, "lookup", lambda _, first, second: lambda: output[first])
    assert torch_private.dump_flight_recorder() == output["_dump_fr_trace_json"]
    output["_dump_nccl_trace_json"] = b'{"entries":[1]}'
    assert torch_private.dump_flight_recorder() == '{"entries":[1]}'


def test_a_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(torch_private), "scaled_mm", raising=False)
    monkeypatch.delattr(torch, "_scaled_mm")
    with pytest.raises(TrainingError) as caught:
        _ = torch_private.scaled_mm
    for word in (torch.__version__, "torch._scaled_mm") + torch_private.TESTED_RELEASES:
        assert word in str(caught.value)
    with pytest.raises(AttributeError, match="no attribute 'scaled'"):
        _ = torch_private.scaled


def test_a_function_with_other_arguments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = distributed_c10d._process_group_name
    with torch_private.name_process_group("ours"):
        assert distributed_c10d._process_group_name([0], use_hashed_name=False) == "ours"
    assert distributed_c10d._process_group_name is original
    monkeypatch.setattr(distributed_c10d, "_process_group_name", lambda ranks: "")
    with pytest.raises(TrainingError, match="use_hashed_name"), torch_private.name_process_group("ours"):
        pass


def test_gloo_groups_share_one_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def group(number: int) -> dist.ProcessGroup:
        store = dist.FileStore(str(tmp_path / f"store {number}"), 1)
        return distributed_c10d.ProcessGroupGloo(store, 0, 1, timeout=timedelta(seconds=7))

    original = distributed_c10d.ProcessGroupGloo
    with torch_private.share_gloo_loop():
        first = group(0)  # which makes the loop, unless another test of this process has
        before = threads()
        peers = [group(number) for number in range(1, 4)]
    assert distributed_c10d.ProcessGroupGloo is original
    assert threads() == before + 3 * 2  # each group's two that call what has ended
    separate = group(4)
    assert threads() == before + 3 * 2 + 2 + 1
    for each in (first, *peers, separate):
        assert isinstance(each, original)
        assert each.options._timeout == timedelta(seconds=7)
    monkeypatch.delattr(original, "create_default_device")
    with pytest.raises(TrainingError, match="create_default_device"), torch_private.share_gloo_loop():
        pass


def test_a_group_is_connected_and_bound_to_its_device() -> None:
    device = torch.device("cpu", 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        assert group.bound_device_id is None
        torch_private.connect_nccl(group, device)  # gloo is connected already, by the same method of the backend
        assert group.bound_device_id == device
        assert dist.group.WORLD.bound_device_id is None
    finally:
        dist.destroy_process_group()


def test_the_range_is_the_one_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, below = torch_private.TESTED_RELEASES
    assert f"torch>={oldest},<{below}" in project["dependencies"]
    assert f"OLDEST := torch=={oldest}." in (ROOT / "Makefile").read_text()


def _private_uses(tree: ast.AST) -> list[str]:
    """Return the private names of torch in a file's code: attributes and imports of torch's modules."""
    modules = {"torch": "torch"}
    result = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.asname or "torch": name.name for name in node.names if name.name.startswith("torch")}
            result += [name.name for name in node.names if name.name.startswith("torch") and "._" in name.name]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [f"{node.module}.{name.name}" for name in node.names]
            modules |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
            result += [name for name in names if "._" in name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            base = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in modules:
                result.append(ast.unparse(node))
    return result


def test_private_names_are_used_in_one_file() -> None:
    assert _private_uses(ast.parse("import torch.distributed as dist\ndist._a\ntorch.nn._b.c\n")) == [
        "dist._a",
        "torch.nn._b",
    ]
    assert _private_uses(ast.parse("from torch._C import x\nfrom torch import _y\n")) == ["torch._C.x", "torch._y"]
    source = ROOT / "src" / "megascale"
    used = {}
    for file in sorted(source.rglob("*.py")):
        text = file.read_text()
        # Parsing takes a millisecond per page. A file without the word uses nothing of torch.
        if file.name != "torch_private.py" and "torch" in text and (names := _private_uses(ast.parse(text))):
            used[str(file.relative_to(source))] = names
    assert used == {}


def test_an_autograd_function_that_is_called_directly_is_one_like_any_other():
    def build_class() -> type[torch.autograd.Function]:
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, factor, label):
                ctx.save_for_backward(x)
                ctx.factor = factor
                return x * factor, x.detach() + 1

            @staticmethod
            def backward(ctx, dy, dz):
                (x,) = ctx.saved_tensors
                assert ctx.needs_input_grad == (True, False, False)
                return dy * ctx.factor + dz * x, None, None

        return Scaled

    plain, direct = build_class(), torch_private.call_directly(build_class())
    x, results = torch.randn(5, requires_grad=True), []
    for function in (plain, direct):
        y, z = function.apply(x, 3.0, "a label")
        assert y.requires_grad
        results.append((y, z) + torch.autograd.grad(y.sum() + 2 * z.sum(), x))
        with torch.no_grad():
            assert not function.apply(x, 3.0, None)[0].requires_grad
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert "apply" not in plain._backward_cls.__dict__
    assert direct._backward_cls.__dict__["apply"] is direct.backward, "this torch is called as before"


def test_the_limit_of_compiled_versions_is_raised_but_not_lowered() -> None:
    config = torch_private.lookup("torch._dynamo", "config")
    with config.patch(recompile_limit=8):
        torch_private.raise_recompile_limit(256)
        assert config.recompile_limit == 256
        torch_private.raise_recompile_limit(16)
        assert config.recompile_limit == 256
    assert config.recompile_limit < 256
