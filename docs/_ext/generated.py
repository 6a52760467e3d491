"""Text that comes from the code: public names, commands, keys of a config, settings of methods.

While the site is built, each line `<!-- generated: NAME -->` on a page is replaced by the text that
`TEXTS[NAME]` returns, and the card of a method gets a table of its settings.  On any other viewer
of Markdown the line is a comment, and the page still reads well.  Four functions know the code:
`public_names`, `root_command`, `config_sections` and `method_settings`.
"""

import inspect
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sphinx.application import Sphinx

# --------------------------------------------------------------------------- read from the code


def public_names() -> dict[str, Any]:
    """The public names of the package and what they stand for, in the order of `fedp3.__all__`.

    A submodule hides a public name that is spelled the same; such a name is left out.
    """
    import fedp3

    names = {name: getattr(fedp3, name) for name in fedp3.__all__ if not name.startswith("_")}
    return {name: thing for name, thing in names.items() if not inspect.ismodule(thing)}


def root_command() -> Any:
    """The library's command line as click's tree of commands, without those of other packages."""
    from typer.main import get_command

    from fedp3.cli import command_line

    return get_command(command_line(()))


@dataclass(frozen=True)
class Key:
    """One key of a config."""

    name: str
    default: object
    description: str


@dataclass(frozen=True)
class Section:
    """One section of a config; the keys above all sections have the section name ''."""

    name: str
    about: str
    keys: Sequence[Key]


def config_sections() -> list[Section]:
    """Every section of a config with every key."""
    from fedp3.config import schema

    method = Key("method", schema.Config().method, schema.describe_method())
    about = "A method replaces some of the defaults below; its card lists which ones."
    sections = [Section("", about, [method])]
    for name, settings in schema.SECTIONS.items():
        first_paragraph = (inspect.getdoc(settings) or "").partition("\n\n")[0]
        keys = [Key(k.name, k.default, k.description) for k in schema.describe_keys(name)]
        sections.append(Section(name, first_paragraph, keys))
    return sections


def method_settings(method: str) -> list[tuple[str, object, object]]:
    """What a method sets: the key, its value, and the default that it replaces."""
    from fedp3.config import schema
    from fedp3.methods import METHODS

    rows = []
    for section, settings in METHODS[method].settings.items():
        defaults = {key.name: key.default for key in schema.describe_keys(section)}
        rows += [(f"{section}.{key}", value, defaults[key]) for key, value in settings.items()]
    return rows


# --------------------------------------------------------------------------- text


def prose(text: str) -> str:
    """One line of Markdown from a docstring or help text, with `code` and --options marked up."""
    parts = re.split(r"(`+[^`]+`+|(?<!\S)--[a-z][a-z-]*)", " ".join(text.split()))
    escaped = [re.sub(r"([\\*_\[\]<>|])", r"\\\1", part) for part in parts[::2]]
    code = [f"`{part.strip('`')}`".replace("|", r"\|") for part in parts[1::2]]
    return "".join(a + b for a, b in zip(escaped, [*code, ""], strict=True))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def toml(value: object) -> str:
    """A default as it would be written in a config."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case Mapping() if not value:
            return "{}"
        case _:
            return str(value)


# --------------------------------------------------------------------------- config


def config_text() -> str:
    """The keys of a config, one table per section."""
    parts = []
    for section in config_sections():
        parts.append(f"## `[{section.name}]`" if section.name else "## Above all sections")
        if section.about:
            parts.append(prose(section.about))
        rows = [
            (f"`{key.name}`", f"`{toml(key.default)}`", prose(key.description))
            for key in section.keys
        ]
        parts.append(table(("key", "default", "meaning"), rows))
    return "\n\n".join(parts)


# --------------------------------------------------------------------------- methods


def settings_text(method: str) -> str:
    """What a method sets, as a table."""
    rows = [
        (f"`{key}`", f"`{toml(value)}`", "the same" if value == default else f"`{toml(default)}`")
        for key, value, default in method_settings(method)
    ]
    if not rows:
        return f'`method = "{method}"` sets nothing: its settings are the defaults.'
    return f'`method = "{method}"` sets:\n\n{table(("key", "to", "default"), rows)}'


# --------------------------------------------------------------------------- command line


def cli_text() -> str:
    """The commands, each with its usage, arguments, options and example."""
    return "\n\n".join(_command(root_command(), "fedp3", 2))


def _command(command: Any, path: str, level: int, parent: Any = None) -> Iterator[str]:
    context = command.context_class(command, info_name=path.rpartition(" ")[2], parent=parent)
    yield f"{'#' * level} `{path}`"
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    yield from (prose(text) for text in paragraphs if not text.startswith("Example:"))
    yield f"```sh\n{path} {' '.join(command.collect_usage_pieces(context))}\n```"
    for kind in ("argument", "option"):
        rows = list(_parameters(command, context, kind))
        if rows:
            yield table((kind, "meaning"), rows)
    for text in paragraphs:
        if text.startswith("Example:"):
            example = inspect.cleandoc(text.removeprefix("Example:"))
            yield f"For example:\n\n```sh\n{example}\n```"
    nested_level = level if path == "fedp3" else min(level + 1, 4)
    for name, nested in getattr(command, "commands", {}).items():
        if not nested.hidden:
            yield from _command(nested, f"{path} {name}", nested_level, context)


def _parameters(command: Any, context: Any, kind: str) -> Iterator[tuple[str, str]]:
    """A row for each argument or option; what click adds in brackets is put in parentheses."""
    for parameter in command.get_params(context):
        if parameter.param_type_name != kind or "--help" in parameter.opts:
            continue
        record = parameter.get_help_record(context)
        if record is None:
            continue
        name, text = record
        note = re.fullmatch(r"(.*?)\s*\\?\[((?:default|required|x[<>]|\d)[^\]]*)\]", text)
        if note:
            text = f"{note[1]} ({note[2]})"
        yield f"`{name.replace(' RANGE', '').replace('|', ' or ')}`", prose(text)


# --------------------------------------------------------------------------- public names

KINDS: dict[str, Callable[[Any], bool]] = {
    "Functions": inspect.isroutine,
    "Exceptions": lambda thing: inspect.isclass(thing) and issubclass(thing, BaseException),
    "Classes": inspect.isclass,
    "Decorators": lambda thing: isinstance(thing, SimpleNamespace),
    "Types and constants": lambda thing: True,
}
DIRECTIVES = {
    "Functions": "autofunction:: fedp3.{}",
    "Exceptions": "autoexception:: fedp3.{}\n   :members:\n   :show-inheritance:",
    "Classes": "autoclass:: fedp3.{}\n   :members:",
    "Types and constants": "autodata:: fedp3.{}",
}
REGISTER = "Decorators that register a part of your own under a name that a config can use."


def kind_of(thing: Any) -> str:
    """The heading of the reference under which a public name belongs."""
    return next(kind for kind, belongs in KINDS.items() if belongs(thing))


def api_text() -> str:
    """The public names by kind, each with the start of its docstring and a link to its page."""
    names = public_names()
    parts = []
    for kind in KINDS:
        rows = [
            (f"[`{name}`](api/{name}.md)", prose(_about(thing)))
            for name, thing in names.items()
            if kind_of(thing) == kind
        ]
        if rows:
            parts.append(f"## {kind}\n\n{table(('name', 'what it is'), rows)}")
    pages = "\n".join(f"api/{name}" for name in names)
    return "\n\n".join([*parts, f"```{{toctree}}\n:hidden:\n\n{pages}\n```"])


def _about(thing: Any) -> str:
    if isinstance(thing, SimpleNamespace):
        return REGISTER
    if not inspect.isroutine(thing) and not inspect.isclass(thing):
        return ""
    return (inspect.getdoc(thing) or "").partition("\n\n")[0]


def _registers(name: str, decorators: SimpleNamespace) -> str:
    """The page of `fedp3.register`: a row for each decorator, with the names that exist already."""
    rows = []
    for kind, decorator in vars(decorators).items():
        registry = decorator.__self__
        rows.append((f"`{kind}`", ", ".join(f"`{entry}`" for entry in registry)))
    return "\n\n".join(
        (
            f"{REGISTER} [Add a part of your own](../../how-to/own-parts.md) shows how.",
            f'Write `@fedp3.{name}.KIND("name")` above a function, or call '
            f'`fedp3.{name}.KIND("name")(part)`. KIND is one of these:',
            table(("kind", "names that fedp3 registers itself"), rows),
        )
    )


def write_api_pages(app: Sphinx) -> None:
    """Write one page for each public name to reference/api."""
    folder = Path(app.srcdir) / "reference" / "api"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, thing in public_names().items():
        kind = kind_of(thing)
        if kind == "Decorators":
            text = _registers(name, thing)
        else:
            text = f"```{{eval-rst}}\n.. {DIRECTIVES[kind].format(name)}\n```"
        (folder / f"{name}.md").write_text(f"# fedp3.{name}\n\n{text}\n")


# --------------------------------------------------------------------------- Sphinx

TEXTS: dict[str, Callable[[], str]] = {"api": api_text, "cli": cli_text, "config": config_text}


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the markers on a page by generated texts."""
    source[0] = re.sub(r"<!-- generated: (\w+) -->", lambda marker: TEXTS[marker[1]](), source[0])


def add_settings(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add its settings to the card of a method, methods/NAME, unless it lists them itself."""
    from fedp3.methods import METHODS

    folder, _, name = docname.rpartition("/")
    if folder == "methods" and name in METHODS and "## Settings" not in source[0]:
        source[0] += f"\n\n{settings_text(name)}\n"


def attach_outside_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn links to Markdown files outside docs, such as paper/pages, into links to the file."""
    root = Path(app.srcdir).resolve()
    folder = Path(app.env.doc2path(docname)).resolve().parent

    def attach(link: re.Match[str]) -> str:
        path = (folder / link[1]).resolve()
        outside = path.is_file() and not path.is_relative_to(root)
        return f"](<path:{link[1]}>)" if outside else link[0]

    source[0] = re.sub(r"\]\(([^)#\s]+\.md)(?:#[^)\s]*)?\)", attach, source[0])


def protect_first_line(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Keep napoleon from reading the text before a colon in a property's first line as its type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment, whose first line has no colon


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", write_api_pages)
    app.connect("source-read", fill)
    app.connect("source-read", add_settings)
    app.connect("source-read", attach_outside_pages)
    app.connect("autodoc-process-docstring", protect_first_line, priority=400)  # napoleon has 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}
