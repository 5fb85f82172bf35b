"""Writes docs/api/client.md: signatures and docstrings of the clients' public names. Run it with `make docs`.

Needs the standard library and the installed package. Public names have no underscore. Their order is that of `__all__`,
or of definition. Repetitions are omitted: a name of two modules is described in the module that it comes from, a method
of two classes with the same docstring in the first class.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterd.client._command import AsyncBase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    Said = dict[tuple[str, str | None], str]  # a method's name and words: the class that has them

PAGE = Path(__file__).parents[1] / "docs" / "api" / "client.md"
MODULES = (
    "counterd.client",
    "counterd.client.aio",
    "counterd.errors",
    "counterd.client.throttr",
    "counterd.client.sentinel",
    "counterd.client.beanstalk",
    "counterd.client.smockron",
    "counterd.client.smockron_asgi",
    "counterd.client.smockron_wsgi",
)
LINE_MAX = 100

INTRODUCTION = """\
# The clients

Signatures and docstrings, written by `make docs`: change those, not this page. Sections are those of
[the counter protocol's document](https://github.com/cybozu/yrmcds/blob/master/docs/counter.md); what counterd does in
another way is in [protocols/counter.md](../protocols/counter.md). How the clients are used is in the
[guides](../guides/).
"""

ALIAS = re.compile(r"\bwire\.(\w+)")
# Begins a paragraph for developers of counterd, which is omitted.
INSIDE = re.compile(r"Floor\b")
# In a docstring, begins a line that explains names.
MEANING = re.compile(r"[a-z_]+(, [a-z_]+)*: ")


def page() -> str:
    """Returns the whole page."""
    said: Said = {}
    parts = [INTRODUCTION]
    for name in MODULES:
        parts += of_module(importlib.import_module(name), said)
    return "\n".join(parts)


def of_module(module: ModuleType, said: Said) -> Iterator[str]:
    yield f"## {module.__name__}\n"
    yield prose(module)
    elsewhere: dict[str, list[str]] = {}
    for name, value in public(module):
        if value.__module__ != module.__name__ and value.__module__ in MODULES:
            elsewhere.setdefault(value.__module__, []).append(name)
        elif inspect.isclass(value):
            yield from of_class(module.__name__, name, value, said)
        else:
            yield from described("###", name, signature(name, value), value)
    for origin, names in elsewhere.items():
        yield wrapped(f"Also here, from {origin}: {', '.join(names)}.") + "\n"


def public(module: ModuleType) -> list[tuple[str, Any]]:
    """Returns names and values: those of __all__, Client first, or those that the module defines."""
    if hasattr(module, "__all__"):
        return [(name, getattr(module, name)) for name in sorted(module.__all__, key="Client".__ne__)]
    return [
        (name, value)
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def of_class(module: str, name: str, cls: type, said: Said) -> Iterator[str]:
    yield from described("###", name, declaration(name, cls), cls)
    if issubclass(cls, enum.Enum):
        yield "".join(f"- {member.name} = {member.value}\n" for member in cls)
        return
    again: dict[str, list[str]] = {}
    for member, value in members(cls):
        key = (member, value.__doc__)
        if key in said:
            is_command = hasattr(value, "__wrapped__")
            is_awaited = inspect.iscoroutinefunction(value) or (is_command and issubclass(cls, AsyncBase))
            awaited = ", with `await`" if is_awaited else ""
            again.setdefault(f"As those of {said[key]}{awaited}", []).append(member)
        else:
            said[key] = f"{module}.{name}"
            code = signature(member, value) if inspect.isfunction(value) else property_line(member, value)
            yield from described("####", f"{name}.{member}", code, value)
    for text, names in again.items():
        yield wrapped(f"{text}: {', '.join(names)}.") + "\n"


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yields public methods and properties, those of bases first. The fields of a tuple are in its signature."""
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("counterd.")]
    found = {name: getattr(cls, name, None) for base in ours for name in vars(base)}
    for name, value in found.items():
        shown = not name.startswith("_") or (name == "__call__" and value.__doc__)
        if shown and (inspect.isfunction(value) or isinstance(value, property)):
            yield name, value


def described(marks: str, title: str, code: str, value: Any) -> Iterator[str]:
    yield f"{marks} {title}\n"
    yield f"```python\n{code}\n```\n"
    yield prose(value)


def property_line(name: str, value: property) -> str:
    return f"{name}: {value.fget.__annotations__['return']}"


def declaration(name: str, cls: type) -> str:
    """Returns the signature of a class that a user creates, else only its name and base."""
    if issubclass(cls, (Exception, enum.Enum)):
        return f"class {name}({cls.__mro__[1].__name__})"
    parameters = [each for each in inspect.signature(cls).parameters if each != "self"]
    return f"class {name}" if parameters[:1] == ["client"] else signature(name, cls, "class ")


def signature(name: str, value: Any, before: str = "") -> str:
    """Returns a signature as in the source, with the values of defaults. A long one has one parameter per line."""
    described = inspect.signature(value)
    words: list[str] = []
    kinds = [each.kind for each in described.parameters.values()]
    for number, each in enumerate(described.parameters.values()):
        if each.name == "self":
            continue
        if each.kind == each.KEYWORD_ONLY and each.KEYWORD_ONLY not in kinds[:number]:
            words.append("*")
        annotated = "" if each.annotation is each.empty else f": {annotation(each.annotation)}"
        words.append(f"{each.name}{annotated}{'' if each.default is each.empty else ' = ' + shown(each.default)}")
    if not before and inspect.iscoroutinefunction(value):
        before = "async "
    returned = described.return_annotation
    after = "" if before == "class " or returned is described.empty else f" -> {annotation(returned)}"
    after = ALIAS.sub(lambda match: alias(getattr(inspect.unwrap(value).__globals__["wire"], match[1])), after)
    line = f"{before}{name}({', '.join(words)}){after}"
    if len(line) <= LINE_MAX:
        return line
    return f"{before}{name}(\n{''.join(f'    {word},' + chr(10) for word in words)}){after}"


def annotation(value: Any) -> str:
    """Returns an annotation as in the source, whether Python keeps it as text, as a reference, or as an object."""
    if isinstance(value, str):
        return value.replace("'", '"')
    return getattr(value, "__forward_arg__", None) or getattr(value, "__name__", str(value))


def alias(value: Any) -> str:
    """Returns the meaning of an alias of the wire module, which users do not see, such as list[ListEntry]."""
    return re.sub(r"[\w.]+\.", "", str(value))


def shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def prose(value: Any) -> str:
    """Returns the docstring. Lines that explain names become a list."""
    paragraphs = inspect.cleandoc(value.__doc__ or "").split("\n\n")
    lines: list[str] = []
    in_list = False
    for line in "\n\n".join(each for each in paragraphs if not INSIDE.match(each)).splitlines():
        begins = not lines or not lines[-1] or lines[-1].endswith((".", ":", ")"))  # else a sentence goes on
        if begins and MEANING.match(line):
            if not in_list and lines and lines[-1]:
                lines.append("")
            in_list = True
            lines.append(f"- {line}")
        else:
            in_list = in_list and bool(line)
            lines.append(f"  {line}" if in_list else line)
    return "\n".join(lines) + "\n"


def wrapped(text: str) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= LINE_MAX:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), "utf-8")
