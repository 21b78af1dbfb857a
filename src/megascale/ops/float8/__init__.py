"""Float8: tensors cast to eight bits with a scale, and the GEMMs of them on tensor cores.

`formats` has the two formats, scales and the plain references, `cast` the fused kernels, `gemm` the matmuls in eight
bits with the references beside them, `cublaslt` the calls of cuBLASLt that torch does not offer.
"""
