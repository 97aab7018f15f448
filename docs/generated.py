"""Pages of the website that are made from files of the project and from the code, so that nothing is said twice.

``mkdocs.yml`` names this file as its hook. The README becomes the first page.
"""

import argparse
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from llama_core.config.run import RunConfig
from llama_core.config.settings import KEYS_OF_TRACKERS
from llama_core.trackers.registry import TRACKERS
from llama_core.trackers.traits import TrackerSettings
from training_infra.cli import COMMANDS, make_parser
from training_infra.commands.command import Command
from training_infra.flags import FLAGS
from training_infra.parser import Parser

ROOT = Path(__file__).parents[1]
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Files above the folder of the documentation, and the pages that they become."""
PUBLIC_MODULES = (
    "training_infra",
    "training_infra.distributed",
    "training_infra.models.llama",
    "training_infra.models.moe",
    "training_infra.parallelism",
    "training_infra.benchmarking",
)
"""What users import. Each name in ``__all__`` is described, or else each that the module defines."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, as MkDocs asks its hooks to."""
    pages = {page: _moved_into_docs((ROOT / name).read_text()) for name, page in FROM_ROOT.items()}
    pages["reference/commands.md"] = "\n".join(_commands())
    pages["reference/configuration.md"] = "\n".join(_configuration())
    pages["reference/python.md"] = "\n".join(_python())
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def _moved_into_docs(text: str) -> str:
    """Return a page of the project's folder with its links as they are from the folder ``docs``.

    A link to a file that is no page, such as a script, keeps only its text.
    """

    def moved(link: re.Match[str]) -> str:
        label, target = link["label"], link["target"]
        if re.match(r"https?:|#", target):
            return link[0]
        path, _, anchor = target.partition("#")
        page = FROM_ROOT.get(path) or path.removeprefix("docs/")
        if page == path:  # neither in docs/ nor moved into it
            return label
        return f"[{label}]({page}{'#' if anchor else ''}{anchor})"

    return re.sub(r"\[(?P<label>[^\]]*)\]\((?P<target>[^)\s]+)\)", moved, text)


def _commands() -> Iterator[str]:
    """Yield the lines of the page about the command line."""
    parser = make_parser()
    yield "# Commands\n"
    yield f"{parser.description} {_sentence(parser.epilog)}\n"
    for when, commands in COMMANDS.items():
        yield f"## {when[0].upper()}{when[1:]}\n"
        for command in commands:
            yield from _command(command)
    yield "## Flags of a run\n"
    yield "Every flag sets a key of the [configuration](configuration.md), and `--set KEY=VALUE` sets any other one.\n"
    yield from _table(("flag", "key", "meaning"), _flags())


def _command(command: Command) -> Iterator[str]:
    yield f"### {command.name}\n"
    yield f"{_sentence(command.help)}\n"
    yield "```bash"
    yield from (f"training-infra {command.name} {example}" for example in command.examples)
    yield "```\n"
    alone = Parser(prog=command.name)
    for argument in command.arguments:
        alone.add_argument(*argument.names, **argument.options)
    own = [action for action in alone._actions if action.dest != "help"]
    if own:
        yield from _table(("argument", "meaning"), [(_spelled(action), _cell(action.help)) for action in own])
    if command.flags:
        yield "Also takes `--config run.yaml`, `--set`, `--json` and the [flags of a run](#flags-of-a-run).\n"


def _spelled(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else None
    if action.choices:
        value = "|".join(map(str, action.choices))
    names = ", ".join(action.option_strings)
    takes_value = action.nargs != 0 and value
    return _code(f"{names} {value}".strip() if takes_value else names)


def _flags() -> Iterator[tuple[str, ...]]:
    texts = {known.name: known.text for known in RunConfig.known_keys()}
    for flag in FLAGS:
        names = ", ".join((flag.name, *flag.also))
        yield _code(f"{names} {flag.example}".strip()), _code(flag.key), _cell(texts[flag.key])


ON_RESUME = {
    "allow": "may change",
    "extend": "may change with the steps",
    "record": "may change, and is recorded",
    "refuse": "",
}
"""What the page says about another value of a key on resume."""


def _configuration() -> Iterator[str]:
    """Yield the lines of the page about the keys of a configuration."""
    yield "# Configuration\n"
    yield (
        "A run is described by a YAML file (`--config run.yaml`), by flags, by `--set KEY=VALUE`, or by all three; "
        "`configs/` has examples. An unknown key, a wrong type and settings that contradict each other are errors. "
        "The last column says which keys may get another value when a run is resumed.\n"
    )
    schema = RunConfig.model_json_schema()
    sections: dict[str, list[tuple[str, ...]]] = {}
    for known in RunConfig.known_keys():
        section, _, name = known.name.rpartition(".")
        described = _described(schema, known.name)
        cells = (_code(name), _kind(described), _default(described), _cell(known.text), ON_RESUME[known.key.on_resume])
        sections.setdefault(section, []).append(cells)
    for section, rows in sections.items():
        yield f"## {f'`{section}`' if section else 'The run'}\n"
        yield from _table(("key", "value", "default", "meaning", "on resume"), rows)
    for kind in TRACKERS.values():
        if kind.name not in KEYS_OF_TRACKERS:
            yield f"## `tracking.trackers.{kind.name}`\n"
            yield from _table(("key", "value", "default", "meaning"), _settings_of(kind.settings))


def _settings_of(settings: type[TrackerSettings]) -> Iterator[tuple[str, ...]]:
    for name, described in settings.model_json_schema()["properties"].items():
        yield _code(name), _kind(described), _default(described), _cell(described.get("description"))


def _described(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the JSON schema of the key with the dotted name ``key``."""
    described = schema
    for name in key.split("."):
        described = described["properties"][name]
        if "$ref" in described:
            described = schema["$defs"][described["$ref"].rpartition("/")[2]]
    return described


def _kind(described: dict[str, Any]) -> str:
    """Return the values that a key takes, such as ``integer ≥ 1`` or ``none, bf16``."""
    if "anyOf" in described:
        return " or ".join(dict.fromkeys(_kind(choice) for choice in described["anyOf"]))
    if "enum" in described:
        return ", ".join(_code(value) for value in described["enum"])
    if "const" in described:
        return _code(described["const"])
    kind: str = described.get("type", "any")
    words = {"boolean": "true or false", "string": "text", "array": "list", "object": "mapping"}
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {described[name]:,}" for name, sign in bounds.items() if name in described]
    return " ".join([words.get(kind, kind), ", ".join(limits)]).strip()


def _default(described: dict[str, Any]) -> str:
    default = described.get("default")
    if default is None or default == []:
        return ""
    return _code(str(default).lower() if isinstance(default, bool) else default)


def _python() -> Iterator[str]:
    """Yield the lines of the page about the Python API, which mkdocstrings fills from the docstrings."""
    yield "# Python\n"
    for name in PUBLIC_MODULES:
        module = import_module(name)
        yield f"## `{name}`\n"
        yield f"{module.__doc__}\n"
        for member in getattr(module, "__all__", None) or _defined_in(module):
            value = getattr(module, member)
            yield f"::: {value.__module__}.{value.__qualname__}"
            yield f"    options: {{heading: {name}.{member}, toc_label: {member}}}\n"


def _defined_in(module: ModuleType) -> list[str]:
    """Return the public classes and functions that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _sentence(text: str | None) -> str:
    words = text or ""
    return f"{words[:1].upper()}{words[1:]}."


def _code(value: object) -> str:
    return f"`{value}`".replace("|", "\\|")


def _cell(text: str | None) -> str:
    """Return a text as a cell of a table; only its backticks are Markdown."""
    one_line = " ".join((text or "").replace("%%", "%").split())
    return re.sub(r"([|*_<])", r"\\\1", one_line)
