"""Write a config as TOML: complete, or as the commented file of `fedp3 init`."""

from fedp3.config.load import parse
from fedp3.config.schema import SECTIONS, Config, describe_keys, describe_method
from fedp3.config.toml import toml_document, toml_value
from fedp3.methods import METHODS

# for the digits, so that a first run learns within seconds
START = ("model.width=0.25", "local.lr=0.2")
DECIDED = ("plan", "prune", "upload", "aggregate", "hooks")  # sections that methods decide


def to_toml(config: Config) -> str:
    """The complete config, every key with its value."""
    tables: dict[str, object] = {"method": config.method}
    for section in SECTIONS:
        settings = getattr(config, section)
        tables[section] = {key.name: getattr(settings, key.name) for key in describe_keys(section)}
    return toml_document(tables)


def template() -> str:
    """The config that `fedp3 init` writes: every key with its value and what it means.

    What the method decides is commented out, so that changing the method is changing one line.
    """
    config = parse({}, START)
    lines = ["# A fedp3 run.  Look at it with `fedp3 plan`, start it with `fedp3 run`.", ""]
    lines.append(f"method = {toml_value(config.method)}  # {describe_method()}")
    set_by_methods = {
        (s, k) for row in METHODS.values() for s, keys in row.settings.items() for k in keys
    }
    for section, settings in SECTIONS.items():
        about = f"# {settings.__doc__}"
        if section in DECIDED:
            about += "  The method sets these; remove a # to decide yourself."
        lines += ["", about, f"[{section}]"]
        for key in describe_keys(section):
            commented = section in DECIDED or (section, key.name) in set_by_methods
            value = getattr(getattr(config, section), key.name)
            pair = f"{'# ' if commented else ''}{key.name} = {toml_value(value)}"
            lines.append(f"{pair:<30} # {key.description}")
    return "\n".join(lines) + "\n"
