#!/usr/bin/env bash
# Issue 61, at most 8 minutes on four GPUs of 80 GB, most important first: sharded states of Llama 8B and GPT 13B; torchtitan's FSDP2
# at Llama 8B; then side by side a 3B class on two GPUs, offloaded state and 12 layers without it on one GPU each. A row whose
# time is over has its reason in its file. with .whl (torchtitan's too) in the clone: bash .gate/call61.sh
source "$(dirname "$0")/call_common.sh"
source .gate/install_site.sh || exit 1
shapes=benchmarks/training/shapes_sharded.toml
run_shapes() {  # run_shapes NAME GPUS MINUTES SHAPE...: rows of ours into $OUT/NAME.json
  local name=$1 gpus=$2 minutes=$3 options=()
  shift 3
  for shape in "$@"; do options+=(--only "$shape"); done
  CUDA_VISIBLE_DEVICES=$gpus timeout -k 5 $((475 - SECONDS)) python3 -m benchmarks shapes $shapes \
    --nproc $(($(tr -cd , <<<$gpus | wc -c) + 1)) --minutes $minutes --gemm-seconds 1 "${options[@]}" --out $OUT/$name.json
  echo "$name ended after $SECONDS s"
}
run_shapes four 0,1,2,3 5.0 "8B ZeRO-3" "8B ZeRO-3, float8, graphs" "13B, 20 layers, ZeRO-1" "13B ZeRO-3, copies in bfloat16" \
  "13B ZeRO-3, collectives" "8B, 16 layers, ZeRO-1" "8B, 16 layers, ZeRO-2, copies" "8B ZeRO-2, copies"
mkdir -p /tmp/substitutes && cp .gate/torchtitan_site.py /tmp/substitutes/sitecustomize.py
PYTHONPATH=$PYTHONPATH:/tmp/substitutes timeout -k 5 95 python3 -m benchmarks peers llama-8b --peer torchtitan --peers-only --turns 1 --steps 3 --warmup 2 --peer-seconds 85 \
  --peer-recompute selective --train.micro_batch=1 --train.global_batch=16 --parallel.data=4 --parallel.zero=3 \
  --parallel.recompute=selective --out $OUT/torchtitan.json
echo "torchtitan ended after $SECONDS s"
minutes=$(python3 -c "print(max(0.1, (470 - $SECONDS) / 60))")
run_shapes offload 2 $minutes "8B, offloaded state, one GPU" >$OUT/offload.log 2>&1 &
run_shapes half 3 $minutes "8B, 12 layers, one GPU" >$OUT/half.log 2>&1 &
run_shapes two 0,1 $minutes "3B ZeRO-1, two GPUs" "3B ZeRO-3, two GPUs"
wait
cat $OUT/offload.log $OUT/half.log
nvidia-smi --query-gpu=name,power.limit --format=csv,noheader
