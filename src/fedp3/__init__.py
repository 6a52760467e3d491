"""Train one network over devices that cannot all hold, compute or upload it."""

__version__ = "0.1.0.dev0"
