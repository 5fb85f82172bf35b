"""Small mutations of Cython sources, all of them in one text, each behind a switch that is read at run time.

`a < b` becomes `(a <= b if mutant(17) else a < b)`, `x = 1` becomes `if not mutant(18): x = 1`. So one build has every
mutant, and with no switch set it does what the sources do.

An expression is read by Python's own parser: what is Cython's alone (casts, `&x`) is first replaced by as many
characters of Python, so that each node's place is its place in the source. At most one mutant is switched on at a time,
so what a mutant puts in has no switches inside. Only what runs is mutated: no declarations, tables, types, asserts or
docstrings. Nor are hints (prefetching, and what it guesses from), on which no result depends.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

CAST = re.compile(r"<(?:const )?\w+\**>")
ADDRESS = re.compile(r"&(?=[\w(<~])")
ENUM = re.compile(r"^ *cdef enum[^\n]*:\n((?: +[^\n]*\n|\n)+)", re.MULTILINE)
MEMBER = re.compile(r"^ +([A-Z][A-Z0-9_]*) = ", re.MULTILINE)
ARRAY = re.compile(r"^ +(?:u?int\d+_t (?=\w+\[)|\w+\[\w+\] )(\w+)", re.MULTILINE)
LOCAL_ARRAY = re.compile(r"^ +cdef \w+\[\w+\] (\w+)", re.MULTILINE)
FUNCTION = re.compile(r"(?:cp?def|def) (?!class )[^=]*?(\w+)\(")
HEADER = re.compile(r"(?:if|elif|while|for|else|try|finally|except|with)\b")
DECLARED = re.compile(r"cdef (?:const )?[\w.]+(?:\[[^\]]*\])*\** ")
HINTS = re.compile(r"prefetch|index_peek")
NOT_MUTATED = re.compile(r"debug_check\(|requirement\(|audit_|prefetch\(|index_prefetch\(|pass\b|\"")

FLIPPED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
SWAPPED = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"), ast.Div: ("/", "*"),
}  # fmt: skip
OTHER = {"min": "max", "max": "min"}
TRUTHS = (ast.If, ast.While, ast.BoolOp, ast.UnaryOp, ast.Return, ast.IfExp)
OPAQUE = (ast.JoinedStr, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.Lambda, ast.Dict)


@dataclass(frozen=True)
class Mutant:
    number: int
    path: str
    line: int
    function: str
    source: str  # the line
    before: str
    after: str

    def __str__(self) -> str:
        path = self.path.removeprefix("src/counterd/")
        return f"{path}, {self.function}(): {self.source} | {self.before} -> {self.after}"


class Statement(NamedTuple):
    start: int
    end: int
    indent: int
    text: str


def statements(source: str) -> Iterator[Statement]:
    """Yields the logical lines without comments."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first = last = None
    for token in tokenize.generate_tokens(io.StringIO(source.replace("except?", "except ")).readline):
        if token.type == tokenize.NEWLINE and first and last:
            start, end = (starts[row - 1] + column for row, column in (first.start, last.end))
            yield Statement(start, end, first.start[1], source[start:end])
            first = None
        elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE):
            first, last = first or token, token


def pythonic(text: str) -> str:
    """Returns text of the same length that Python's parser accepts."""
    text = ADDRESS.sub("~", CAST.sub(lambda match: "~".ljust(len(match[0])), text))
    return text.replace("*)", " )").replace("elif ", "if   ")


def enum_members(text: str) -> set[str]:
    """Returns the names of compile-time constants."""
    return {name for body in ENUM.findall(text) for name in MEMBER.findall(body)}


class Rewriter:
    """A file of `sources`. Its mutants have numbers from `first` on. dropped: the mutants that do not compile."""

    def __init__(self, path: str, sources: dict[str, str], first: int, dropped: Collection[int]):
        source = sources[path]
        if not source.isascii():
            raise ValueError(f"{path} is not ASCII: places in it could not be told")
        self.path = path
        self.source = source
        self.constants = {name for text in sources.values() for name in enum_members(text)}
        self.arrays = {name for text in sources.values() for name in ARRAY.findall(text)}
        self.local_arrays = set(LOCAL_ARRAY.findall(source))
        self.dropped = dropped
        self.first = first
        self.mutants: list[Mutant] = []
        self.statement = Statement(0, 0, 0, "")
        self.shift = 0  # offset in the source minus offset in the parsed text
        self.rows: list[int] = []
        self.function = ""
        self.signature = ""
        self.depth = 0  # indentation of the function

    def rewrite(self) -> str:
        pieces: list[str] = []
        position = 0
        for statement in statements(self.source):
            replaced = self.replaced(statement)
            if not position and re.match(r"from |c?import ", statement.text):
                replaced = f"from counterd._mutant cimport mutant\n{statement.text}"
            if replaced is None:
                continue
            pieces += self.source[position : statement.start], replaced
            position = statement.end
        return "".join((*pieces, self.source[position:]))

    def replaced(self, statement: Statement) -> str | None:
        text = statement.text
        if statement.indent <= self.depth:
            self.function = ""
        if match := FUNCTION.match(text) if text.endswith(":") else None:
            self.function, self.signature, self.depth = match[1], text, statement.indent
            return None
        if not self.function or HINTS.search(self.function) or NOT_MUTATED.match(text) or self.function == "audit":
            return None
        self.statement = statement
        if text.startswith("cdef "):
            return self.declaration()
        if HEADER.match(text):
            return self.header()
        return self.simple()

    def parse(self, start: int, end: int, tail: str = "") -> ast.stmt:
        """Parses the statement between two offsets in the source."""
        text = pythonic(self.source[start:end])
        self.shift = start
        self.rows = [0]
        for line in text.splitlines(keepends=True):
            self.rows.append(self.rows[-1] + len(line))
        return ast.parse(text + tail).body[0]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Returns the node's offsets in the source: its start and its end."""
        return (
            self.shift + self.rows[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self.shift + self.rows[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    # ---- mutants -----------------------------------------------------------------------------------------------------

    def add(self, place: int, before: str, after: str) -> int:
        """Adds a mutant. Returns its number, or 0 if it does not compile."""
        line = self.source.count("\n", 0, place) + 1
        whole = self.source.splitlines()[line - 1].strip()
        before, after = (" ".join(part.split()) for part in (before, after))
        number = self.first + len(self.mutants)
        self.mutants.append(Mutant(number, self.path, line, self.function, whole, before, after))
        return 0 if number in self.dropped else number

    def expression(self, node: ast.AST, parent: ast.AST | None = None) -> str:
        """Returns the node's text with the switches of its mutants and of its children's mutants."""
        start, end = self.span(node)
        # In a condition, `not not` gives all alternatives one type. With different types, Cython would make objects.
        truth = "not not " if isinstance(node, (ast.BoolOp, ast.UnaryOp)) and isinstance(parent, TRUTHS) else ""
        pieces = []
        for other in self.others(node, parent):
            if number := self.add(start, self.source[start:end], other):
                # Each mutant has its own line, because errors of the compiler name lines.
                pieces.append(f"\n{truth}({other}) if mutant({number}) else\n{truth}")
        inner = self.inside(node)
        return f"({''.join(pieces)}({inner}))" if pieces else inner

    def inside(self, node: ast.AST) -> str:
        start, end = self.span(node)
        if isinstance(node, OPAQUE):
            return self.source[start:end]
        children = [child for child in ast.walk(node) if child is not node and isinstance(child, ast.expr)]
        inner = {id(below) for child in children for below in ast.walk(child) if below is not child}
        pieces = []
        for child in sorted((child for child in children if id(child) not in inner), key=self.span):
            below, above = self.span(child)
            pieces += self.source[start:below], self.expression(child, node)
            start = above
        return "".join((*pieces, self.source[start:end]))

    def others(self, node: ast.AST, parent: ast.AST | None) -> Iterator[str]:
        """Yields the mutations of the node."""
        text = self.text(node)
        if isinstance(node, ast.Compare):
            left = node.left
            for kind, right in zip(node.ops, node.comparators, strict=True):
                yield self.between(node, left, right, *FLIPPED[type(kind)])
                left = right
        elif isinstance(node, ast.BinOp):
            if self.is_array(node.left):
                return  # a conditional expression cannot have the type of an array in C
            yield self.between(node, node.left, node.right, *SWAPPED[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            swap = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            start, end = self.span(node)
            pieces = []
            for left, right in zip(node.values, node.values[1:], strict=False):
                below, above = self.span(left)[1], self.span(right)[0]
                pieces += self.source[start:below], re.sub(rf"\b{swap[0]}\b", swap[1], self.source[below:above])
                start = above
            yield "".join((*pieces, self.source[start:end]))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self.text(node.operand)
        elif isinstance(node, ast.IfExp):
            start, end = self.span(node.test)
            whole, beyond = self.span(node)
            yield f"{self.source[whole:start]}not ({self.source[start:end]}){self.source[end:beyond]}"
        elif isinstance(node, ast.Call) and text.startswith(("min(", "max(")):
            yield OTHER[text[:3]] + text[3:]
        elif isinstance(node, (ast.Constant, ast.Name)):
            yield from self.other_constant(node, text, parent)

    def is_array(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr in self.arrays
        return isinstance(node, ast.Name) and node.id in self.local_arrays

    def other_constant(self, node: ast.Constant | ast.Name, text: str, parent: ast.AST | None) -> Iterator[str]:
        if text in ("True", "False"):
            yield str(text == "False")
        elif isinstance(node, ast.Name):
            if text in self.constants and isinstance(parent, ast.BinOp):
                yield f"<int>({text} + 1)"
        elif isinstance(node.value, int) and not isinstance(parent, ast.Compare):
            succeeds = isinstance(parent, ast.Return) and re.search(r"cdef int .*except", self.signature, re.DOTALL)
            if not succeeds:  # otherwise only Cython sees the number returned
                yield f"<int>{node.value + 1}" if node.value < 1 << 30 else f"{node.value + 1}"

    def between(self, node: ast.AST, left: ast.AST, right: ast.AST, old: str, new: str) -> str:
        """Returns the node's text with another operator between the two operands."""
        (start, end), below, above = self.span(node), self.span(left)[1], self.span(right)[0]
        gap = self.source[below:above].replace(old, new, 1)
        return self.source[start:below] + gap + self.source[above:end]

    # ---- statements --------------------------------------------------------------------------------------------------

    def declaration(self) -> str | None:
        """Mutates only the values that it assigns."""
        start, end = self.statement.start, self.statement.end
        match = DECLARED.match(self.statement.text)
        if " = " not in self.statement.text or not match:
            return None
        pieces = [match[0]]
        start += match.end()
        for stop in (*self.commas(start, end), end):
            if "=" in self.source[start:stop]:
                lead = len(self.source[start:stop]) - len(self.source[start:stop].lstrip(" ,"))
                pieces += self.source[start : start + lead], self.assigned(self.parse(start + lead, stop))
            else:
                pieces.append(self.source[start:stop])
            start = stop
        return "".join(pieces)

    def commas(self, start: int, end: int) -> Iterator[int]:
        """Yields the offsets of the commas between the declarators."""
        depth = 0
        for place in range(start, end):
            depth += (self.source[place] in "([{") - (self.source[place] in ")]}")
            if self.source[place] == "," and not depth:
                yield place

    def assigned(self, node: ast.stmt) -> str:
        """Returns an assignment with mutants of its value and of the subscripts of its target."""
        assert isinstance(node, (ast.Assign, ast.AugAssign))
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        start, end = self.span(node)
        below, above = self.span(target)
        value, beyond = self.span(node.value)
        head, tail = self.source[start:below], self.source[beyond:end]
        return head + self.inside(target) + self.source[above:value] + self.expression(node.value, node) + tail

    def header(self) -> str | None:
        start, end = self.statement.start, self.statement.end
        if not re.match(r"(?:if|elif|while|for)\b", self.statement.text):
            return None
        node = self.parse(start, end, " pass")
        subject = node.iter if isinstance(node, ast.For) else node.test  # type: ignore[attr-defined]
        below, above = self.span(subject)
        inner = self.expression(subject, node)
        if isinstance(node, ast.If) and not (
            isinstance(subject, ast.Compare) and isinstance(subject.ops[0], (ast.Eq, ast.NotEq, ast.Is, ast.IsNot))
        ):
            condition = self.source[below:above]
            if number := self.add(below, condition, f"not ({condition})"):
                inner = f"(\nnot ({condition}) if mutant({number}) else\nnot not ({inner}))"
        return self.source[start:below] + inner + self.source[above:end]

    def simple(self) -> str | None:
        start, end, indent, text = self.statement
        node = self.parse(start, end)
        body = text
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            body = self.assigned(node)
        elif isinstance(node, (ast.Expr, ast.Return)) and node.value:
            below, above = self.span(node.value)
            body = self.source[start:below] + self.expression(node.value, node) + self.source[above:end]
        if isinstance(node, ast.Return) and indent == self.depth + 4:
            return body  # a function needs its last return
        head = "if"
        pieces = []
        if isinstance(node, ast.AugAssign) and type(node.op) in (ast.Add, ast.Sub, ast.BitOr, ast.BitAnd):
            old, new = SWAPPED[type(node.op)]
            other = text.replace(f" {old}= ", f" {new}= ", 1)
            if number := self.add(start, text, other):
                pieces.append(f"if mutant({number}): {other}\n{' ' * indent}")
                head = "elif"
        if number := self.add(start, text, "(nothing)"):
            return "".join((*pieces, f"{head} not mutant({number}): {body}"))
        return "".join((*pieces, f"else: {body}")) if pieces else body


def rewritten(sources: dict[str, str], dropped: Collection[int] = ()) -> tuple[list[Mutant], dict[str, str]]:
    """Returns all mutants of the files, numbered from 1, and the text of each file with its mutants."""
    mutants: list[Mutant] = []
    texts = {}
    for path in sources:
        rewriter = Rewriter(path, sources, len(mutants) + 1, dropped)
        texts[path] = rewriter.rewrite()
        mutants += rewriter.mutants
    return mutants, texts
