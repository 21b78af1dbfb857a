"""The program `megascale`: a module per command or topic, which `main.py` lists."""
