"""Plugins of this repository: parts that need an extra, such as `pip install 'megascale[redis]'`.

No other package imports them. A registry imports the module of a name that it does not know, and the module registers
the name (config/registry.py).
"""
