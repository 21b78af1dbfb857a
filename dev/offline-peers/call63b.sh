#!/usr/bin/env bash
# Issue 63, the remaining rows, in the same processes: f8 DP4, five chunks in float8 and bfloat16, and Megatron-Core's graphs at
# micro-batch 1. At most 5 minutes on four GPUs. with .gate and .whl in the clone: bash .gate/call63b.sh
source "$(dirname "$0")/call_common.sh"
PEER_OPTIONS=(--only "bf16 TP2 PP2, micro-batch 1")
run_call benchmarks/training/shapes_13b.toml 2.2 300 --only "f8 DP4" --only "f8 TP2 PP2, 5 chunks" --only "bf16 TP2 PP2, 5 chunks"
