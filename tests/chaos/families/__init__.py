"""Logits and gradients of every Hugging Face family next to those of `transformers`, on drawn configurations."""
