#!/usr/bin/env bash
# FlashAttention-4 and cuDNN's frontend into /tmp/fa4/site, from the repository root, from what is there of .fa4 and .fa4b:
# bash dev/offline-peers/install_fa4.sh. With limits on the size of a copy: once with .fa4, once with .fa4b and .whl.
set -e
site=/tmp/fa4/site
packages=$site/nvidia_cutlass_dsl/dsl_packages
libraries=$packages/cutlass/_mlir/_mlir_libs
library=$libraries/_cutlass_ir.cu13.cpython-312-x86_64-linux-gnu.so
mkdir -p $libraries $site/nvidia_cutlass_dsl/cu13/lib /tmp/fa4/parts
for part in .fa4/a.so.xz* .fa4b/a.so.xz*; do
  if [ -e $part ]; then cp $part /tmp/fa4/parts; fi
done
if [ ! -e $library ] && { [ -e /tmp/fa4/parts/a.so.xz ] || [ -e /tmp/fa4/parts/a.so.xz.01 -a -e /tmp/fa4/parts/a.so.xz.00 ]; }; then
  cat /tmp/fa4/parts/a.so.xz* | xz -T0 -dc >$library.part
  mv $library.part $library
fi
if [ -e .fa4b/fa4_site.tar.xz ]; then
  tar -xJf .fa4b/fa4_site.tar.xz -C /tmp/fa4
  xz -dc .fa4b/fa4_runtime.so.xz >$site/nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so
fi
if [ -e $library ] && [ -e $site/flash_attn ]; then
  PYTHONPATH=$PYTHONPATH:$site:$packages python3 -c "import flash_attn.cute, cudnn; print('cudnn', cudnn.__version__)"
  touch /tmp/fa4/ready
fi
