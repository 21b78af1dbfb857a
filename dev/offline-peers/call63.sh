#!/usr/bin/env bash
# Issue 63, at most 8 minutes on four GPUs: half of gpt-13b, each shape in new processes: six rows of ours, then Megatron-Core.
# with .gate and .whl in the clone: bash .gate/call63.sh; the other rows: bash .gate/call63b.sh
FRESH=--fresh
source "$(dirname "$0")/call_common.sh"
run_call benchmarks/training/shapes_13b.toml 4 475 --only "f8 TP2 DP2" --only "f8 DP4, f8 gathers" --only "f8 TP2 PP2" \
  --only "f8 TP2 PP2, parallel block" --only "bf16 TP2 PP2" --only "bf16 TP2 PP2, micro-batch 1"
