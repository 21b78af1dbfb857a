"""Models of Hugging Face `transformers`, in and out: settings and tensor names of each family, and safetensors files.

Needs safetensors only, never `transformers` itself.
"""
