"""The branches of `pallas_attn/kernels/` that no test reaches.

`pytest --reached=FOLDER` writes the branches that a run reached, a file for each process.
`python -m tests.support.reached FOLDER` names those that no run reached and that have no excuse,
and fails if there are any. It names excuses of branches that are reached, too
(tests/support/unreached.py).

A kernel's Python runs while it is traced, so a branch of it is a variant of the kernel. Branches
are: the condition of an `if`, a `while`, a conditional expression or a comprehension is true, or
false; a loop is entered; a function is called. Asserts do not count, nor does what runs at import.
A branch is named by its file, its function and its source, never by a line.
"""

import ast
import dataclasses
import dis
import json
import pathlib
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType

from pallas_attn import kernels
from tests.support.unreached import EXCUSED

ROOT = pathlib.Path(kernels.__file__).parent
Position = tuple[int, int, int, int]
Outcomes = Mapping[Position, set[bool]]  # whether the expression at a position was true


class Watch:
    """Sees, from `start` on, which functions of the files in `root` are called and what their
    conditional jumps do. A jump that went both ways is not watched any longer.
    """

    def __init__(self, root: pathlib.Path = ROOT) -> None:
        self.root = f"{root}/"
        self.codes: dict[int, CodeType] = {}  # hashing a code object compares all that it has
        self.jumps: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        watch = sys.monitoring
        self.tool = next(n for n in range(6) if watch.get_tool(n) is None)

    def start(self) -> None:
        watch = sys.monitoring
        watch.use_tool_id(self.tool, "reached")
        watch.register_callback(self.tool, watch.events.PY_START, self._called)
        watch.register_callback(self.tool, watch.events.BRANCH, self._jumped)
        watch.set_events(self.tool, watch.events.PY_START)

    def stop(self) -> None:
        sys.monitoring.set_events(self.tool, 0)
        for code in self.codes.values():
            sys.monitoring.set_local_events(self.tool, code, 0)
        sys.monitoring.free_tool_id(self.tool)

    def _called(self, code: CodeType, _: int) -> object:
        if code.co_filename.startswith(self.root):
            self.codes[id(code)] = code
            sys.monitoring.set_local_events(self.tool, code, sys.monitoring.events.BRANCH)
        return sys.monitoring.DISABLE

    def _jumped(self, code: CodeType, at: int, to: int) -> object:
        targets = self.jumps[id(code), at]
        targets.add(to)
        return sys.monitoring.DISABLE if len(targets) > 1 else None

    @property
    def count(self) -> int:
        """How many functions were called, and ways of jumps taken."""
        return len(self.codes) + sum(map(len, self.jumps.values()))

    def branches(self) -> dict[str, list[str]]:
        """The names of the branches that were reached, by file."""
        called: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        outcomes: defaultdict[str, defaultdict[Position, set[bool]]]
        outcomes = defaultdict(lambda: defaultdict(set))
        for number, code in self.codes.items():
            called[code.co_filename].add((code.co_qualname, code.co_firstlineno))
            for position, taken in _outcomes(code, number, self.jumps):
                outcomes[code.co_filename][position] |= taken
        names = {}
        for file in sorted(called):
            path = pathlib.Path(file)
            reached = [
                branch.name
                for branch in branches_of(path.read_text())
                if branch.reached(called[file], outcomes[file])
            ]
            names[str(path.relative_to(self.root))] = reached
        return names

    def write(self, folder: pathlib.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.branches(), indent=0)
        (folder / f"{uuid.uuid4().hex}.json").write_text(text)


def _outcomes(
    code: CodeType, number: int, jumps: Mapping[tuple[int, int], set[int]]
) -> Iterator[tuple[Position, set[bool]]]:
    """Whether the expression before each jump was true or false. For a loop true means that it went
    on, for a comparison with None that it was None.
    """
    for instruction in dis.get_instructions(code):
        where, name = instruction.positions, instruction.opname
        targets = jumps.get((number, instruction.offset))
        if not targets or where is None:
            continue
        if name == "FOR_ITER":
            after = instruction.offset + 4  # the instruction and its cache
            values = {to == after for to in targets}
        else:
            if_jumped = name in ("POP_JUMP_IF_TRUE", "POP_JUMP_IF_NONE")
            values = {(to == instruction.argval) == if_jumped for to in targets}
        yield _position(where), values


def _position(where: dis.Positions | ast.expr | ast.stmt) -> Position:
    ends = where.lineno, where.end_lineno, where.col_offset, where.end_col_offset
    return tuple(x or 0 for x in ends)  # type: ignore[return-value]


def _values(test: ast.expr, outcomes: Outcomes) -> set[bool]:
    """Whether a condition was true, and whether it was false."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return {not x for x in _values(operand, outcomes)}
        case ast.BoolOp(op=op, values=parts):
            ends = isinstance(op, ast.Or)  # the value of a part that ends the condition
            early = any(ends in _values(x, outcomes) for x in parts)
            return {ends for _ in range(early)} | (_values(parts[-1], outcomes) - {ends})
        case ast.IfExp(body=body, orelse=orelse):
            return _values(body, outcomes) | _values(orelse, outcomes)
        case ast.Compare(ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return {not x for x in outcomes.get(_position(test), ())}
    return set(outcomes.get(_position(test), ()))


# ---- the branches that there are -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch: `source` is that of a condition, a loop or a function in `function`."""

    function: str
    source: str
    arm: str
    node: ast.AST

    @property
    def name(self) -> str:
        parts = (f"{self.function}:" if self.source else self.function, self.source, self.arm)
        return " ".join(filter(None, parts))

    def reached(self, called: set[tuple[str, int]], outcomes: Outcomes) -> bool:
        match self.node:
            case ast.FunctionDef() | ast.Lambda():
                return (self.function, _first_line(self.node)) in called
            case ast.For():
                return True in outcomes.get(_position(self.node), ())
            case ast.expr():
                return (self.arm == TRUE) in _values(self.node, outcomes)
        raise NotImplementedError(type(self.node))


TRUE, FALSE, ENTERED, CALLED = "is true", "is false", "is entered", "is called"


def _first_line(scope: ast.FunctionDef | ast.Lambda) -> int:
    decorators = getattr(scope, "decorator_list", ())
    return min(x.lineno for x in (scope, *decorators))


def branches_of(text: str) -> list[Branch]:
    """The branches of a file. Of equal ones in a function the second and later have a number."""
    branches: list[Branch] = []
    _visit(ast.parse(text), "", branches)
    times: defaultdict[str, int] = defaultdict(int)
    numbered = []
    for branch in branches:
        times[branch.name] += 1
        number = times[branch.name]
        source = f"{branch.source} #{number}".lstrip() if number > 1 else branch.source
        numbered.append(dataclasses.replace(branch, source=source))
    return numbered


def _visit(node: ast.AST, function: str, branches: list[Branch]) -> None:
    """Adds the branches in `node`, which lies in `function`. What runs at import has none."""
    around = function
    inner = f"{function}.<locals>." if function and not function.endswith(".") else function
    match node:
        case ast.ClassDef(bases=[*_, ast.Name(id="Protocol")]):
            return  # its functions are never called
        case ast.ClassDef(name=name):
            function = f"{inner}{name}."
        case ast.FunctionDef() | ast.Lambda():
            function = inner + getattr(node, "name", "<lambda>")
            source = ast.unparse(node) if isinstance(node, ast.Lambda) else ""
            branches.append(Branch(function, source, CALLED, node))
        case ast.For(target=target, iter=over):
            source = f"for {ast.unparse(target)} in {ast.unparse(over)}"
            branches.append(Branch(function, source, ENTERED, node))
    in_function = bool(function) and not function.endswith(".")
    for test in _conditions(node):
        if in_function and not isinstance(test, ast.Constant):
            branches += [Branch(function, ast.unparse(test), arm, test) for arm in (TRUE, FALSE)]
    for child in ast.iter_child_nodes(node):  # defaults of arguments are made around the function
        _visit(child, around if isinstance(child, ast.arguments) else function, branches)


def _conditions(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            return [test]
        case ast.comprehension(ifs=tests):
            return tests
    return []


def all_branches(root: pathlib.Path = ROOT) -> dict[str, list[Branch]]:
    """The branches of each file."""
    files = sorted(root.rglob("*.py"))
    return {str(x.relative_to(root)): branches_of(x.read_text()) for x in files}


# ---- branches that no run reached ----------------------------------------------------------------


def read(folder: pathlib.Path) -> dict[str, set[str]]:
    """The names of the branches that the runs of a folder reached, by file."""
    reached: defaultdict[str, set[str]] = defaultdict(set)
    for path in folder.glob("*.json"):
        for file, names in json.loads(path.read_text()).items():
            reached[file].update(names)
    return reached


def unreached(reached: Mapping[str, set[str]], root: pathlib.Path = ROOT) -> list[str]:
    """The branches that were not reached. Of a function that was not called: only this."""
    names = []
    for file, branches in all_branches(root).items():
        missing = [x for x in branches if x.name not in reached.get(file, ())]
        silent = {x.function for x in missing if x.arm == CALLED}
        for branch in missing:
            around = {*_outer(branch.function)}
            if branch.arm != CALLED:
                around.add(branch.function)
            if not silent & around:
                names.append(f"{file} {branch.name}")
    return names


def _outer(function: str) -> list[str]:
    """The functions around a function."""
    parts = function.split(".<locals>.")
    return [".<locals>.".join(parts[:n]) for n in range(1, len(parts))]


MISSING = "no test reaches this branch"


def complaints(
    reached: Mapping[str, set[str]], excuses: Iterable[str], root: pathlib.Path = ROOT
) -> list[str]:
    """Complaints, a line each."""
    missing, excused = unreached(reached, root), set(excuses)
    stale = sorted(excused - {*missing})
    lines = [f"{MISSING}: {x}" for x in missing if x not in excused]
    return lines + [f"a test reaches what is excused, or it is no branch: {x}" for x in stale]


def main(folder: str) -> int:
    """Prints the complaints. 1 where a branch is not reached; an excuse too many is only said."""
    reached = read(pathlib.Path(folder))
    if not reached:
        sys.stderr.write(f"{folder} has no runs of pytest with --reached={folder}\n")
        return 1
    lines = complaints(reached, EXCUSED)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(any(line.startswith(MISSING) for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
