"""Import and export of Hugging Face models: settings and tensor names of each family, and safetensors files.

Only safetensors is needed, not `transformers`.
"""
