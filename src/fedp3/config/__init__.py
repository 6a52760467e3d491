"""The config of a run: what users write.  No function below this level ever sees one."""

from fedp3.config.files import load, overruled, parse, template, to_toml
from fedp3.config.schema import ABOUT_METHODS, METHODS, OWN, Config

__all__ = ["ABOUT_METHODS", "METHODS", "OWN", "Config", "load", "overruled", "parse", "template", "to_toml"]
