#!/usr/bin/env bash
# bash .gate/install_peer.sh: Megatron-Core 0.19.2 and TransformerEngine 2.20.2 into /tmp/peer/site, from the repository
# root. Ends with code 0 and the file /tmp/peer/ready when both can be imported. Prints the seconds of each part.
#
# The torch part of TransformerEngine is taken from .gate/te_torch.so.xz if it is there; otherwise it is built (33 files,
# JOBS at a time, default 24) and left packed in $OUT/te_torch.so.xz: copy that into .gate for later calls.
# In the background beside a measurement: nice -n 19 taskset -c 40-63 bash .gate/install_peer.sh >$OUT/peer.log 2>&1 &
set -e
exec 9>/tmp/peer.lock
flock 9
[ -e /tmp/peer/ready ] && exit 0
began=$(date +%s.%N)
say() { python3 -c "import sys, time; print(f'{time.time() - float(sys.argv[1]):.1f} s: ' + sys.argv[2], flush=True)" "$began" "$1"; }
gate=$(cd "$(dirname "$0")" && pwd)
mkdir -p /tmp/peer
if command -v xz >/dev/null; then
  xz -T0 -dc "$gate/te.tar.xz" | tar -x -C /tmp/peer
else
  python3 -c "import tarfile, sys; tarfile.open(sys.argv[1], 'r:xz').extractall('/tmp/peer', filter='data')" "$gate/te.tar.xz"
fi
say "unpacked"
lib=/tmp/peer/site/transformer_engine/wheel_lib
if [ -e "$gate/te_torch.so.xz" ]; then
  python3 -c "import lzma, sys; sys.stdout.buffer.write(lzma.open(sys.argv[1]).read())" "$gate/te_torch.so.xz" \
    >$lib/transformer_engine_torch.so
else
  cd /tmp/peer/src/te_torch
  export CPATH=$(python3 - <<'P'
import os, sysconfig
root = os.path.join(sysconfig.get_paths()["purelib"], "nvidia")
folders = []
for base, names, _ in os.walk(root):
    if base.count(os.sep) - root.count(os.sep) > 2:
        names[:] = []
        continue
    if os.path.basename(base) == "include":
        folders.append(base)
        names[:] = []
print(":".join(sorted(folders)))
P
)
  NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_FRAMEWORK=pytorch NVTE_WITH_NCCL_EP=0 MAX_JOBS=${JOBS:-24} \
    PYTHONPATH=/tmp/peer/site python3 setup.py build_ext --inplace >/tmp/peer/build.log 2>&1 \
    || { tail -30 /tmp/peer/build.log; exit 1; }
  say "built"
  cp transformer_engine_torch*.so $lib/
  strip --strip-unneeded $lib/transformer_engine_torch*.so 2>/dev/null || true
  if [ -n "$OUT" ]; then
    python3 -c "import lzma, sys; lzma.open(sys.argv[2], 'w', preset=6).write(open(sys.argv[1], 'rb').read())" \
      $lib/transformer_engine_torch*.so "$OUT/te_torch.so.xz"
  fi
fi
cd /
PYTHONPATH=/tmp/peer/site:/tmp/site python3 -c "
import transformer_engine.pytorch, transformer_engine, megatron.core
print('TransformerEngine', transformer_engine.__version__, 'Megatron-Core', megatron.core.__version__)"
touch /tmp/peer/ready
say "imported"
