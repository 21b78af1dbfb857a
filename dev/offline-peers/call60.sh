#!/usr/bin/env bash
# Issue 60, at most 8 minutes on four GPUs: Qwen 12 layers forced even, Mixtral 6 layers forced even, Qwen with its own router after
# 100 steps with a balancing loss; ours, then Megatron-Core. with .gate and .whl in the clone: bash .gate/call60.sh
source "$(dirname "$0")/call_common.sh"
run_call benchmarks/training/shapes_experts.toml 3.5 470
