# source .gate/install_site.sh: install the wheels of .whl into /tmp/site and set PYTHONPATH; from the repository root.
# Once they are installed, .whl need not be there. With FlashAttention-4 installed (install_fa4.sh), it is on PYTHONPATH too.
if [ ! -e /tmp/site/ready ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || return 1
  touch /tmp/site/ready
fi
export PYTHONPATH=$PWD/src:$PWD:/tmp/site PYTHONUNBUFFERED=1
if [ -e /tmp/fa4/ready ]; then
  export PYTHONPATH=$PYTHONPATH:/tmp/fa4/site:/tmp/fa4/site/nvidia_cutlass_dsl/dsl_packages
fi
unset PYTHONDONTWRITEBYTECODE  # the ranks would compile all sources again
# Compiled kernels and modules of an earlier call (save_cache below), so that the first shape starts 15 s sooner.
export TRITON_CACHE_DIR=/tmp/cache/triton TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor PYTHONPYCACHEPREFIX=/tmp/cache/pyc
mkdir -p /tmp/cache
if [ -e .gate/cache.tar.xz ] && [ ! -e /tmp/cache/unpacked ]; then
  tar -xJf .gate/cache.tar.xz -C /tmp/cache && touch /tmp/cache/unpacked
fi
# save_cache: pack them into $OUT/cache.tar.xz (at most 15 MB); copy it into .gate for later calls
save_cache() {
  (cd /tmp/cache && find triton inductor pyc/tmp/peer -type f 2>/dev/null | tar -c -T - 2>/dev/null | xz -T0 -3 -c >$OUT/cache.tar.xz)
  if [ "$(stat -c %s $OUT/cache.tar.xz)" -gt 15000000 ]; then
    (cd /tmp/cache && find triton inductor -type f 2>/dev/null | tar -c -T - | xz -T0 -3 -c >$OUT/cache.tar.xz)
  fi
  ls -l $OUT/cache.tar.xz
}
