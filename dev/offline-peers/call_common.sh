# source .gate/call_common.sh: what the calls share. Use: run_call SHAPES MINUTES_OURS SECONDS_IN_ALL [OPTION_OF_OURS...]
# With FRESH=--fresh each shape has new processes (10 to 20 s more per shape; a shape that the host bounds is slower after others).
# Writes $OUT/ours.json, $OUT/peer.json (both after each row), $OUT/peer.log, $OUT/te_torch.so.xz (copy it into .gate).
: "${OUT:?set OUT to a folder for the results}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run_call() {
  local shapes=$1 minutes=$2 total=$3 left
  shift 3
  source .gate/install_site.sh || return 1
  echo "site installed after $SECONDS s"
  (nice -n 19 bash .gate/install_peer.sh >$OUT/peer.log 2>&1) &
  timeout -k 20 $((${minutes%.*} * 60 + 90)) python3 -m benchmarks shapes $shapes --nproc 4 --minutes $minutes \
    --gemm-seconds 1 $FRESH "$@" --out $OUT/ours.json
  echo "ours ended after $SECONDS s"
  wait
  cat $OUT/peer.log
  echo "peer installed after $SECONDS s"
  left=$((total - SECONDS - 10))
  PYTHONPATH=$PWD/src:$PWD:/tmp/site:/tmp/peer/site CUDA_DEVICE_MAX_CONNECTIONS=8 timeout -k 10 $left python3 -m benchmarks shapes \
    $shapes --nproc 4 --trainer megatron-core --minutes $(python3 -c "print(max(0.2, ($left - 25) / 60))") \
    --gemm-seconds 1 $FRESH "${PEER_OPTIONS[@]}" --out $OUT/peer.json
  echo "peer ended after $SECONDS s"
  python3 -m benchmarks peers $shapes --rows $OUT/ours.json --rows $OUT/peer.json
  save_cache
  nvidia-smi --query-gpu=name,power.limit --format=csv,noheader
}
