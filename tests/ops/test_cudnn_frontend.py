"""The graphs that cuDNN is given: its frontend checks them without a GPU, over a stand-in for the library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = """
#include <stddef.h>
int cudnnCreate(void **h) { *h = (void *)8; return 0; }
int cudnnDestroy(void *h) { return 0; }
size_t cudnnGetVersion(void) { return 91900; }
const char *cudnnGetErrorString(int s) { return ""; }
void cudnnGetLastErrorString(char *m, size_t n) { if (n) m[0] = 0; }
"""

# The frontend asks the CUDA runtime for the device before it looks at the graph.
RUNTIME = """
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceProperties(void *properties, int device) { return 0; }
const char *cudaGetErrorString(int error) { return ""; }
"""

PROGRAM = """
import functools
import cudnn, torch
from megascale.ops import attention_cudnn as ours

cudnn.pygraph = functools.partial(cudnn.pygraph, sm_version=90, sm_count=132)
S, B, N, G, D = 16, 2, 4, 2, 64
q, k, v = (ours.TensorLayout(t) for t in torch.zeros(S, B, N + 2 * G, D).split((N, G, G), dim=2))
o = ours.TensorLayout(torch.zeros(S, B, N, D))
for window in (None, 1, 5):
    graph = ours.new_graph(torch.bfloat16, None)
    inputs, outputs = ours.add_forward(graph, q, k, v, o, window)
    graph.validate()
    assert outputs["o"].get_stride() == [N * D, D, B * N * D, 1]
    assert outputs["stats"].get_dim() == [B, N, S, 1]
    assert set(inputs) | set(outputs) <= set(ours.UIDS)
    graph = ours.new_graph(torch.bfloat16, None)
    inputs, outputs = ours.add_backward(graph, q, k, v, o, (q, k, v), window, deterministic=window == 5)
    graph.validate()
    C = (N + 2 * G) * D
    assert all(outputs[name].get_stride() == [C, D, B * C, 1] for name in ("d_q", "d_k", "d_v"))
    assert outputs["d_k"].get_dim() == [B, G, S, D]
    assert set(inputs) | set(outputs) <= set(ours.UIDS)
from megascale.ops import attention_cudnn_documents as documents
T, COUNT, LONGEST = S * B, 5, S
q, k, v = torch.zeros(T, N + 2 * G, D).split((N, G, G), dim=1)
named = {"q": q, "k": k, "v": v, "o": torch.zeros(T, N, D), "stats": torch.zeros(T, N, 1)}
layouts = {name: documents.RaggedLayout(t, COUNT, LONGEST) for name, t in named.items()}
layouts |= {"d_o": layouts["o"], "d_q": layouts["q"], "d_k": layouts["k"], "d_v": layouts["v"]}
for window in (None, 5):
    ragged = documents.RaggedGraph(torch.bfloat16, None, COUNT)
    documents.add_forward(ragged, layouts, window)
    ragged.graph.validate()
    assert ragged.token_strides == [(N + 2 * G) * D, N * D, N]
    assert ragged.outputs["stats"].get_dim() == [COUNT, N, LONGEST, 1]
    assert set(ragged.inputs) | set(ragged.outputs) <= set(ours.UIDS)
    ragged = documents.RaggedGraph(torch.bfloat16, None, COUNT)
    documents.add_backward(ragged, layouts, window, tokens=T, deterministic=False)
    ragged.graph.validate()
    assert ragged.outputs["d_k"].get_dim() == [COUNT, G, LONGEST, D]
    assert set(ragged.inputs) | set(ragged.outputs) <= set(ours.UIDS)
print("checked")
"""


def test_graphs_are_valid(tmp_path: Path) -> None:
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed (extra: cudnn)")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in library")
    for name, text in (("libcudnn.so.9", STAND_IN), ("libcudart.so.13", RUNTIME)):
        source = tmp_path / f"{name}.c"
        source.write_text(text)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / name, source], check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "checked" in done.stdout
