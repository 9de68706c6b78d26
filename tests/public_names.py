"""Public names of `src`, found by reading: those that nothing in `src` uses, and those that two files define.

Neither tests nor benches count as users.

A function, class or constant of a module is used where a file names it that imports it from there, or its own module
does; a method or property where anything named so is read from any object, which some dead ones get away with. What a
decorator takes (routes, commands), and what is named as a whole string (commands by name), counts as used.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

Name = tuple[str, str]  # module, and what it defines there; of a method with its class: Class.method

# A process begins at its module's `main`: one in each such module, and only that module calls it.
ENTRY_POINTS = {"main"}


def names_in_two_files(trees: Iterable[tuple[str, ast.Module]]) -> dict[str, list[str]]:
    """Public classes and functions that more than one file defines, with these files. Entry points are left out, and
    so are aliases and constants."""
    files: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees:
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                files[node.name].append(file)
    return {name: found for name, found in files.items() if len(found) > 1 and name not in ENTRY_POINTS}


def unused_names(modules: Mapping[str, ast.Module]) -> set[str]:
    """As module.name or module.Class.method."""
    used: set[Name] = set()
    attributes: set[str] = set()
    for module, tree in modules.items():
        found = _Uses(module, modules.keys())
        found.visit(tree)
        used |= found.used
        attributes |= found.attributes
    used |= set(_through_packages(used, modules))
    names = {f"{module}.{name}" for module, name in _defined(modules) if (module, name) not in used}
    methods = {f"{module}.{name}.{method}" for module, name, method in _methods(modules) if method not in attributes}
    texts = {node.value for tree in modules.values() for node in ast.walk(tree) if _is_text(node)}
    return {name for name in names | methods if name.rpartition(".")[2] not in texts}


class _Uses(ast.NodeVisitor):
    def __init__(self, module: str, modules: object) -> None:
        self.used: set[Name] = set()
        self.attributes: set[str] = set()
        self._module, self._modules = module, modules
        self._from: dict[str, Name] = {}
        self._as: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._as[alias.asname or alias.name] = alias.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            here, whole = alias.asname or alias.name, f"{node.module}.{alias.name}"
            if whole in self._modules:  # type: ignore[operator]
                self._as[here] = whole
            else:
                self._from[here] = (node.module or "", alias.name)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.used |= {(self._module, node.id), self._from.get(node.id, ("", ""))}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.attributes.add(node.attr)
        self.used.add((self._place(node.value), node.attr))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and not node.value.isidentifier() and len(node.value) < 200:
            try:  # a type in quotes
                self.visit(ast.parse(node.value, mode="eval"))
            except SyntaxError:
                return

    def _place(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self._as.get(node.id, node.id)
        return f"{self._place(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _through_packages(used: set[Name], modules: Mapping[str, ast.Module]) -> Iterator[Name]:
    """What a package gives out under its own name is used where that is."""
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (module, alias.asname or alias.name) in used:
                        yield node.module or "", alias.name


def _defined(modules: Mapping[str, ast.Module]) -> Iterator[Name]:
    for module, tree in modules.items():
        for node in tree.body:
            names: list[str] = []
            if isinstance(node, ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [] if node.decorator_list else [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            yield from ((module, name) for name in names if not name.startswith("_"))


def _methods(modules: Mapping[str, ast.Module]) -> Iterator[tuple[str, str, str]]:
    for module, tree in modules.items():
        for owner in tree.body:
            if isinstance(owner, ast.ClassDef):
                for node in owner.body:
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                        yield module, owner.name, node.name


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()
