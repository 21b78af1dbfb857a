"""Float8: casts to eight bits with a scale, and GEMMs on tensor cores.

`formats` has the two formats, scales and the plain references, `cast` the fused kernels, `gemm` the float8 GEMMs with
their references, `cublaslt` the calls of cuBLASLt that torch does not offer.
"""
