#!/usr/bin/env bash
# FlashAttention-4 and cuDNN's frontend into /tmp/fa4/site, from the repository root; prints what to add to PYTHONPATH.
# bash .fa4b/install_fa4.sh; with `library` it unpacks .fa4/a.so.xz only (the rest may not be there yet).
set -e
site=/tmp/fa4/site
packages=$site/nvidia_cutlass_dsl/dsl_packages
libraries=$packages/cutlass/_mlir/_mlir_libs
mkdir -p $libraries $site/nvidia_cutlass_dsl/cu13/lib
library=$libraries/_cutlass_ir.cu13.cpython-312-x86_64-linux-gnu.so
if [ -e .fa4/a.so.xz ] && [ ! -e $library ]; then
  xz -T0 -dc .fa4/a.so.xz >$library.part
  mv $library.part $library
fi
if [ "$1" != library ]; then
  tar -xJf .fa4b/fa4_site.tar.xz -C /tmp/fa4
  xz -dc .fa4b/fa4_runtime.so.xz >$site/nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so
  PYTHONPATH=$PYTHONPATH:$site:$packages python3 -c "import flash_attn.cute, cudnn; print('cudnn', cudnn.__version__)" >&2
  echo $site:$packages
fi
