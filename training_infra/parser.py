"""The command line's parser: one-line errors, and help in groups with an example for every flag."""

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from llama_core.config.names import keys_called
from llama_core.config.run import config_keys
from llama_core.errors import ask_for, did_you_mean, safe
from training_infra.flags import Flag, group_of
from training_infra.other_tools import COMMANDS_OF_OTHER_TOOLS, FLAGS_OF_OTHER_TOOLS

_UNKNOWN_CHOICE = re.compile(r"argument (\S+): invalid choice: '([^']*)'")
_WIDEST = 110
"""Most columns that help takes."""
_LEFT = 30
"""Columns for flags, beside their descriptions."""

SET: dict[str, Any] = {
    "action": "append",
    "default": [],
    "metavar": "training.beta2=0.98",
    "dest": "overrides",
    "help": "set any configuration key, with a value in YAML; may be repeated",
}
"""The options of the argument ``--set``."""

Rows = list[tuple[str, str]]
"""The left and the right text of each row of a table."""


class Parser(argparse.ArgumentParser):
    """A parser of a command. Its short help has the common flags, and says how to see the others.

    Args:
        flags: the flags of a run, if the command takes them; it then takes ``--config`` and ``--set`` too.
        examples: arguments of the command, for its help.
        **options: as for ``argparse.ArgumentParser``.
    """

    def __init__(self, *, flags: Iterable[Flag] = (), examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options, add_help=False)
        self.examples = examples
        self.tables: dict[str, Rows] = {}
        """Tables that the short help shows before those of the arguments, by title."""
        self._flags: dict[str, tuple[Flag, argparse.Action]] = {}
        texts = config_keys()
        for flag in flags:
            self._flags[flag.key] = (flag, self._add_flag(flag, texts[flag.key]))
        if self._flags:
            self._add_configuration()
        more: dict[str, Any] = {"nargs": "?", "metavar": "WORD"} if self._flags else {"nargs": 0}
        self.add_argument("-h", "--help", action=_Help, help="show this help", **more)

    def _add_flag(self, flag: Flag, text: str) -> argparse.Action:
        kind: dict[str, Any] = {"metavar": flag.example}
        if flag.constant is not None and flag.example:
            text += f" Without a value: {flag.constant}."
            kind |= {"nargs": "?", "const": flag.constant}
        elif flag.constant is not None:
            kind = {"action": "store_const", "const": flag.constant}
        elif flag.takes_several:
            kind |= {"action": "extend", "nargs": "+"}
        return self.add_argument(flag.name, *flag.also, dest=flag.key, help=text.replace("%", "%%"), **kind)

    def _add_configuration(self) -> None:
        self.add_argument("--config", type=Path, metavar="run.yaml", help="configuration in YAML; flags override it")
        self.add_argument("--set", **SET)
        everything = "show all flags and configuration keys"
        self.add_argument("--help-all", action=_Help, nargs=0, dest="help", help=everything)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and let the chosen command report unknown arguments."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser: Parser = getattr(options, "parser", self)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options

    def error(self, message: str) -> NoReturn:
        """Exit with one line that suggests the flag that was meant."""
        hint = ""
        if message.startswith("unrecognized arguments: "):
            unknown = message.removeprefix("unrecognized arguments: ").partition(" ")[0].partition("=")[0]
            answer = FLAGS_OF_OTHER_TOOLS.get(unknown)
            hint = f"; {answer}" if answer else self._suggestion(unknown)
        elif found := _UNKNOWN_CHOICE.match(message):
            message, hint = self._unknown_choice(message, *found.groups())
        elif message.startswith("the following arguments are required"):
            hint = f"; see {self.prog} --help"
        self.exit(2, f"error: {safe(message)}{hint}\n")

    def _unknown_choice(self, message: str, argument: str, name: str) -> tuple[str, str]:
        """Return the message about a value that is none of an argument's, and what was meant."""
        if argument != "COMMAND":
            named = (action for action in self._actions if "/".join(action.option_strings) == argument)
            known = next((action.choices for action in named), None) or ()
            return message, did_you_mean(name, map(str, known))
        commands = [command for rows in self.tables.values() for command, _ in rows]
        begun = [command for command in commands if name and command.startswith(name)]
        answer = COMMANDS_OF_OTHER_TOOLS.get(name)
        hint = f"; {answer}" if answer else ask_for(begun) or did_you_mean(name, commands)
        return f"{name} is no command", hint or f"; see {self.prog} --help"

    def _suggestion(self, unknown: str) -> str:
        keys = keys_called(unknown.lstrip("-"), config_keys()) if self._flags and unknown.startswith("--") else []
        meant = [self._flags[key][0].name if key in self._flags else f"--set {key}=..." for key in keys]
        own = [name for action in self._actions for name in action.option_strings]
        return ask_for(meant) or did_you_mean(unknown, own)

    def format_help(self) -> str:
        """Return the short help."""
        others = [action for action in self._actions if action.dest not in self._flags]
        others.sort(key=lambda action: action.dest in {"debug", "help"})
        own = [_row(action) for action in others if action.nargs != argparse.PARSER]
        tables = dict(self.tables)
        if self._flags:
            common = [_row(action) for flag, action in self._flags.values() if flag.is_common]
            tables |= {"common flags, each with an example": common, "this command": own}
            tables |= {f"more flags: {self.prog} --help GROUP, --help PART_OF_A_NAME or --help-all": self._index()}
        else:
            tables |= {"arguments": own}
        return self._page(self.examples, tables)

    def help_on(self, word: str | None) -> str:
        """Return the help on flags and keys in the group ``word``, or with ``word`` in their names; None means all."""
        groups = self._groups()
        tables = dict[str, Rows]()
        for key, text in config_keys().items():
            flag, action = self._flags.get(key, (None, None))
            names = (key, flag.name, *flag.also) if flag else (key,)
            is_named = word not in groups and any((word or "").lstrip("-") in name for name in names)
            if is_named or word == group_of(key):
                row = _row(action, f" [{key}]") if action else (f"--set {key}=", text)
                tables.setdefault(group_of(key), []).append(row)
        for rows in tables.values():
            rows.sort(key=lambda row: row[0].startswith("--set "))  # flags first
        if not tables:
            self.error(f"no flag or key is called {word!r}; groups: {', '.join(groups)}")
        return self._page((), tables)

    def _groups(self) -> dict[str, list[str]]:
        """Return the names of the flags that the short help leaves out, by group."""
        names: dict[str, list[str]] = {group_of(key): [] for key in config_keys()}
        for flag, _ in self._flags.values():
            if not flag.is_common:
                names[flag.group].append(flag.name)
        return names

    def _index(self) -> Rows:
        """Return the groups with the names of their flags, and those that have none in one row."""
        groups = self._groups()
        rows = [(group, " ".join(flags)) for group, flags in groups.items() if flags]
        without = ", ".join(group for group, flags in groups.items() if not flags)
        return [*rows, (without, "keys only")] if without else rows

    def _page(self, examples: Sequence[str], tables: dict[str, Rows]) -> str:
        width = min(_WIDEST, shutil.get_terminal_size().columns)
        arguments = [str(action.metavar) for action in self._actions if not action.option_strings]
        usage = " ".join([f"usage: {self.prog}", *arguments, "[flags]"])
        sections = [usage, textwrap.fill(self.description or "", width)]
        if examples:
            sections.append("\n".join(["examples:", *(f"  {self.prog} {example}" for example in examples)]))
        sections += ["\n".join([f"{title}:", *_lines(rows, width)]) for title, rows in tables.items()]
        sections += [textwrap.fill(self.epilog, width)] if self.epilog else []
        return "\n\n".join(sections) + "\n"


class _Help(argparse.Action):
    """Prints the short help, the help on a word, or all of it, and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        assert isinstance(parser, Parser)
        is_short = not values and "--help" in self.option_strings
        sys.stdout.write(parser.format_help() if is_short else parser.help_on(values or None))
        parser.exit(0)


def _row(action: argparse.Action, suffix: str = "") -> tuple[str, str]:
    """Return an argument with an example of its value, and its description."""
    value = {"?": f"[{action.metavar}]", "+": f"{action.metavar} ..."}.get(str(action.nargs), action.metavar)
    names = ", ".join(action.option_strings)
    return f"{names} {value or ''}".strip(), f"{action.help}{suffix}".replace("%%", "%")


def _lines(rows: Rows, width: int) -> Iterator[str]:
    """Yield a table's lines; a left text that is too long gets a line of its own."""
    for left, text in rows:
        if len(left) > _LEFT - 4:
            yield f"  {left}"
        begin = "" if len(left) > _LEFT - 4 else left
        first = f"  {begin:<{_LEFT - 2}}"
        rest = " " * _LEFT
        one_line = " ".join(text.split())
        yield from textwrap.wrap(one_line, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
