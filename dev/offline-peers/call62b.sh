#!/usr/bin/env bash
# Issue 62, at most 8 minutes on four GPUs: all 32 layers at 512k. A step is expected to take 160 to 220 s: a warm-up step and a
# timed step. with .whl in the clone: bash .gate/call62b.sh
source "$(dirname "$0")/call_common.sh"
source .gate/install_site.sh || exit 1
timeout -k 20 475 python3 -m benchmarks shapes benchmarks/training/shapes_long.toml --nproc 4 --only "512k, 32 layers" \
  --gemm-seconds 1 --out $OUT/512k.json
