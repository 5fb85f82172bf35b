"""Writes the parts of the pages in man/ that come from the program, between two marks. Run it with `make docs`.

The part in counterd.conf(5) comes from the comments of the configuration file, those of commands from their --help. The
rest of the pages is written by hand. Needs the installed package with its extras.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

import counterd
from counterd.cli import bench, ctl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MAN = Path(__file__).parents[1] / "man"
BEGIN = '.\\" Written by `make docs` from here'
END = '.\\" to here'

SECTION = re.compile(r"# -+ (.+)")
KEY = re.compile(r"(?:# )?([a-z0-9_]+(?:\.[a-z0-9_]+)*) =(.*)")
LINE_MAX = 78


def renewed(page: str, text: str) -> str:
    """Renews the part of a page between the marks. Raises ValueError if the page has no marks."""
    head, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, tail = rest.partition(f"{END}\n")
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN!r} and {END!r}")
    return "".join((head, begin, *(f"{line}\n" for line in PARTS[page]()), end, tail))


# ---- counterd.conf(5) ------------------------------------------------------------------------------------------------


def configuration() -> Iterator[str]:
    """Yields a subsection for each section of the configuration file, with an item for each key."""
    lines = Path(counterd.__file__).with_name("counterd.conf").read_text("utf-8").splitlines()
    in_list = False
    words: list[str] = []
    for line in lines[lines.index("") :]:  # the first paragraph is about the file
        if section := SECTION.fullmatch(line):
            if in_list:
                yield ".El"
            yield f".Ss {section[1]}"
            yield ".Bl -tag -width Ds"
            in_list = True
        elif key := KEY.fullmatch(line):
            yield f".It Ic {key[1]} = {value(key[2].strip())}"
            yield from sentences(words)
            words = []
        elif line:
            words.append(line.removeprefix("#").strip())
    yield ".El"


def value(text: str) -> str:
    """Formats a default as an argument of a macro."""
    return f"Ar {quoted(text)}" if text else '""'


# ---- the commands of click -------------------------------------------------------------------------------------------
# Made from the declarations and not from the output of --help, whose layout differs between versions of click.


def commands(main: click.Group, name: str) -> Iterator[str]:
    """Yields the options of a command, then those of each of its subcommands."""
    yield f".Ss Options of {name}"
    yield from options(main.params)
    yield from inner(main, click.Context(main, info_name=name))


def inner(group: click.Group, parent: click.Context) -> Iterator[str]:
    """Yields the options of each subcommand except those that are as the group has them."""
    known = [item(above) for above in only_options(group.params)]
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=parent)
        yield f".Ss {context.command_path.partition(' ')[2]}"
        yield f".Dl {escaped(' '.join((name, *operands(command))))}"
        yield from prose(command.help or "")
        yield from options(each for each in only_options(command.params) if item(each) not in known)
        if isinstance(command, click.Group):
            yield from inner(command, context)


def operands(command: click.Command) -> Iterator[str]:
    """Yields the words after a command's name on the command line."""
    yield "[OPTIONS]"
    if isinstance(command, click.Group):
        yield "COMMAND [ARGUMENTS]..."
    for each in command.params:
        if isinstance(each, click.Argument):
            word = each.metavar or (each.name or "").upper() + ("..." if each.nargs == -1 else "")
            yield word if each.required or word.startswith("[") else f"[{word}]"


def only_options(parameters: Iterable[click.Parameter]) -> list[click.Option]:
    """Returns all options except --help, which every command has."""
    return [each for each in parameters if isinstance(each, click.Option)]


def options(parameters: Iterable[click.Parameter]) -> Iterator[str]:
    """Yields the list of all options."""
    if shown := only_options(parameters):
        yield ".Bl -tag -width Ds"
        for option in shown:
            yield from item(option)
        yield ".El"


def item(option: click.Option) -> list[str]:
    """Returns what a page says of an option."""
    names = " , ".join(flag(each) for each in option.opts)
    return [f".It {names}{argument(option)}", *sentences([option.help or "", *notes(option)])]


def flag(text: str) -> str:
    return f"Fl Fl {text[2:]}" if text.startswith("--") else f"Fl {text[1:]}"


def argument(option: click.Option) -> str:
    """Returns the argument of an option, as a macro after its flags."""
    if option.is_flag or option.count:
        return ""
    if isinstance(option.type, click.Choice):
        return f" Ar {quoted('|'.join(option.type.choices))}"
    return f" Ar {quoted(option.metavar or option.type.name.split()[0].upper())}"


def notes(option: click.Option) -> Iterator[str]:
    if option.show_default and option.default is not None:
        yield f"[default: {option.default}]"
    if option.show_envvar:
        yield f"[environment: {option.envvar}]"


def prose(text: str) -> Iterator[str]:
    """Formats help of click: paragraphs; one after a backspace keeps its lines."""
    for number, paragraph in enumerate(inspect.cleandoc(text).split("\n\n")):
        if paragraph.startswith("\b\n"):
            yield ".Bd -literal -offset 2n"
            yield from (guarded(escaped(line)) for line in inspect.cleandoc(paragraph[2:]).splitlines())
            yield ".Ed"
        else:
            if number:
                yield ".Pp"
            yield from sentences(paragraph.splitlines())


# ---- the language of the pages ---------------------------------------------------------------------------------------


def sentences(lines: Iterable[str]) -> list[str]:
    """Formats text with each sentence on a new line, as roff requires."""
    parts = re.split(r"(?<=[.?!])(?<!\.\.\.) (?=[A-Z(\[])", re.sub(r"\s+", " ", " ".join(lines)).strip())
    wrapped = (line for part in parts for line in textwrap.wrap(escaped(part), LINE_MAX, break_on_hyphens=False))
    return [guarded(line) for line in wrapped]


def escaped(text: str) -> str:
    """Escapes characters that are special in roff."""
    return text.replace("\\", "\\e").replace("`", "\\(ga").replace("^", "\\(ha").replace("~", "\\(ti")


def guarded(line: str) -> str:
    """Prevents a line from being read as a macro."""
    return f"\\&{line}" if line.startswith((".", "'")) else line


def quoted(text: str) -> str:
    """Quotes text as one argument of a macro."""
    return '"{}"'.format(escaped(text).replace('"', "\\(dq"))


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "counterd.conf.5": configuration,
    "counterctl.1": lambda: commands(ctl.main, "counterctl"),
    "counterbench.1": lambda: commands(bench.main, "counterbench"),
}


if __name__ == "__main__":
    for each in PARTS:
        (MAN / each).write_text(renewed(each, (MAN / each).read_text("utf-8")), "utf-8")
