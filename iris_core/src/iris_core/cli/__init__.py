"""The command `iris`.

Each subcommand is a module of this package with `add_parser(subparsers)` and `run(args) -> int`.  Only the module of
the chosen subcommand is imported; modules import heavy packages inside `run`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from iris_core.errors import ArgumentError, BenchmarkError, IrisError, PluginError, SettingsError
from iris_core.logs import logger
from iris_core.types import VERSION

COMMANDS = ("demo", "check", "plugins", "config", "doctor", "tune", "bench")
"""Subcommands, which are the names of their modules."""


class _Parser(argparse.ArgumentParser):
    """A parser, of subcommands as well, that says in one line what is wrong, with the nearest choice or option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is not known here, where the options are: the parser of all commands has few."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1, 0.7)
            hint = "".join(f"; did you mean {name}?" for name in near)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), 1, 0.7)
            message += "".join(f"; did you mean {name}?" for name in near)
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help says more\n")


def build_parser(commands: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Make the parser with these subcommands; the reference is made from it, too."""
    parser = _Parser(prog="iris", description="Symmetric memory for multi-GPU programs in Triton.")
    version = f"iris-core {VERSION}"
    parser.add_argument("--version", action="version", version=version, help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in commands:
        _module(name).add_parser(subparsers)
    return parser


def _module(command: str) -> Any:
    return importlib.import_module(f"{__name__}.{command}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Returns:
        The exit status: 0 if all is well, 1 if something is broken or failed, 2 if the command cannot begin so, here.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - it is None where a shell has closed it
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = next((argument for argument in arguments if not argument.startswith("-")), "")
    parser = build_parser([first] if first in COMMANDS else COMMANDS)
    try:
        args = parser.parse_args(arguments)
        if args.command is None:
            parser.print_help(sys.stderr)
            return 2
        if args.command != "doctor":  # whose report has them
            _module("_arguments").say_unknown_variables()
        return int(_module(args.command).run(args))
    except ModuleNotFoundError as error:  # of torch or another requirement, in an environment that is not complete
        logger.debug("", exc_info=True)
        name = str(error.name).partition(".")[0]
        print(f"iris: {name} is not installed for {sys.executable}: pip install {name}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `iris plugins | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (IrisError, OSError) as error:  # whose text names the file
        logger.debug("", exc_info=True)
        print(f"iris: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError | BenchmarkError | PluginError | SettingsError) else 1
    except SystemExit as stop:  # argparse's
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 130
