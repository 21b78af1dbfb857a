"""The command line: commands by topic, in modules that `main.py` lists."""
