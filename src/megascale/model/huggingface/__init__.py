"""Import and export of Hugging Face models: settings and tensor names of each family, and safetensors files.

The package needs safetensors but not `transformers`.
"""
