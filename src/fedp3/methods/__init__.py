"""FedP3 and its baselines: every method is a row of settings, and a few have hooks.

`METHODS` lists what the name of a method sets in a config.  `make_hooks` makes the hooks that the
[hooks] section of a config names.
"""

from fedp3.methods.catalogue import METHODS, Method
from fedp3.methods.hook_settings import HookSettings, clashes, make_hooks

__all__ = ["METHODS", "HookSettings", "Method", "clashes", "make_hooks"]
