"""The config of a run, as users write it.

Packages before this one know their settings only, never a config.
"""

from fedp3.config.contradictions import overruled
from fedp3.config.load import load, parse
from fedp3.config.schema import Config
from fedp3.config.write import template, to_toml

__all__ = ["Config", "load", "overruled", "parse", "template", "to_toml"]
