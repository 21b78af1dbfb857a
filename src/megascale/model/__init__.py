"""The transformer, its presets, and conversion from and to Hugging Face."""
