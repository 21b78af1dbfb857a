"""Plugins of this repository: modules that need an extra, such as `pip install 'megascale[redis]'`.

No other package imports a plugin. If a configured name is not registered, its registry imports the plugin module of
that name. The module then registers the name (config/registry.py).
"""
