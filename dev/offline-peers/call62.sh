#!/usr/bin/env bash
# Issue 62, at most 8 minutes on four GPUs: CP4 at 32k and 64k ours and Megatron-Core (a2a, p2p); all 32 layers at 256k, last.
# with .gate and .whl in the clone: bash .gate/call62.sh
source "$(dirname "$0")/call_common.sh"
shapes=benchmarks/training/shapes_long.toml
run_call $shapes 1.5 270 --only 32k --only 64k
# A step at 262,144 tokens is expected to take 55 to 65 s: one warm-up step and two timed steps.
timeout -k 20 $((475 - SECONDS)) python3 -m benchmarks shapes $shapes --nproc 4 --only "256k, 32 layers" --minutes 3.2 \
  --gemm-seconds 1 --out $OUT/256k.json
