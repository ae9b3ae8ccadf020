"""The rules of the code base that no tool checks: who may import whom, what may appear where, what is committed."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).resolve().parent.parent

#: What each folder may import beyond the standard library and itself; None means anything that is declared.
ALLOWED: dict[str, set[str] | None] = {
    "stages": {"torch", "anyio", "attrs"},
    "streamflow": None,
    "tools": None,
}

#: The one import that goes up, in a branch that runs only as a program.
ENTRY_POINT = ("streamflow/__main__.py", "streamflow.tools.cli")

#: Where a construct that breaks structured concurrency is used all the same: path to names, each with a reason there.
EXCEPTIONS: dict[str, set[str]] = {
    # the loop thread of the sync facade: there is no loop yet whose task could own it; `close` joins it
    "streamflow/facade.py": {"threading.Thread"},
}


@attrs.frozen
class Module:
    """A parsed module of ours: ``name`` as it is imported, ``path`` as it is committed."""

    path: Path
    name: str
    tree: ast.Module

    @property
    def place(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def folder(self) -> str:
        return self.path.relative_to(ROOT).parts[0]


def import_name(path: Path) -> str:
    """The name under which the module at ``path`` is imported."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "streamflow":
        parts.insert(0, "streamflow")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files(folder: str) -> list[Path]:
    """The real Python files of a top-level folder; links to folders are not entered."""
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if path.resolve() == path]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


MODULES = [Module(path, import_name(path), parse(path)) for folder in ALLOWED for path in python_files(folder)]
BY_NAME = {module.name: module for module in MODULES}
EVERY_FILE = [path for folder in (*ALLOWED, "tests", ".ci") for path in python_files(folder)]

each_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)


@functools.cache
def imports(tree: ast.AST) -> frozenset[str]:
    """Every module that is imported anywhere in ``tree``, in functions and for type checkers too.

    ``from package import name`` counts as ``package.name`` where that is a module of ours, else as ``package``.
    """
    return frozenset(_imports(tree))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide which copy of a module is meant"
            package = node.module or ""
            for alias in node.names:
                full = f"{package}.{alias.name}"
                yield full if full in BY_NAME else package


def is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def goes_up(module: Module, name: str) -> bool:
    """Whether importing ``name`` in ``module`` points from a lower folder to a higher one."""
    if (module.place, name) == ENTRY_POINT:
        return False
    if module.folder == "stages":
        return is_inside(name, "streamflow") and not is_inside(name, "streamflow.stages")
    return module.folder == "streamflow" and is_inside(name, "streamflow.tools")


def is_pure(module: Module) -> bool:
    return "Pure: no torch" in (ast.get_docstring(module.tree) or "")


def reachable(module: Module) -> dict[str, str]:
    """Everything that ``module`` imports, directly or through modules of ours, each with the module that does."""
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        for name in imports(current.tree):
            if name not in found:
                found[name] = current.name
                waiting += [BY_NAME[name]] if name in BY_NAME else []
    return found


def names_used(tree: ast.AST) -> Iterator[str]:
    """Calls, attributes and definitions of the kinds that `FORBIDDEN` speaks of, as ``name`` or ``owner.name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FORBIDDEN = {
    "threading.Thread": "a thread belongs to a task that waits for it: use streamflow.stages.threads",
    "ThreadPoolExecutor": "a thread belongs to a task that waits for it: use streamflow.stages.threads",
    "create_task": "a task belongs to a task group",
    "ensure_future": "a task belongs to a task group",
    "spawn_system_task": "a task belongs to a task group",
    "__del__": "closing is explicit: a finaliser runs in any thread, at any time, or never",
    "record_stream": "when memory may be used again is said by events",
    "torch.cuda.synchronize": "one request must not stall all others: wait for an event",
    "torch.accelerator.synchronize": "one request must not stall all others: wait for an event",
}


def test_there_is_something_to_check() -> None:
    assert {module.folder for module in MODULES} == set(ALLOWED)
    assert any(is_pure(module) for module in MODULES)
    assert set(EXCEPTIONS) <= {module.place for module in MODULES}


@each_module
def test_a_module_says_what_it_is_for(module: Module) -> None:
    assert ast.get_docstring(module.tree), f"{module.place} has no docstring"


@each_module
def test_imports_go_down_only(module: Module) -> None:
    upward = sorted({name for name in imports(module.tree) if goes_up(module, name)})
    assert not upward, f"{module.place} imports {upward}; imports go tools -> streamflow -> stages"


@each_module
def test_a_folder_imports_only_what_it_may(module: Module) -> None:
    allowed = ALLOWED[module.folder]
    if allowed is None:
        return
    tops = {name.partition(".")[0] for name in imports(module.tree)}
    foreign = tops - allowed - sys.stdlib_module_names - {"streamflow"}
    assert not foreign, f"{module.place} imports {sorted(foreign)}; {module.folder}/ may use {sorted(allowed)}"


@pytest.mark.parametrize("path", EVERY_FILE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_is_imported_as_a_second_copy(path: Path) -> None:
    copies = sorted({name for name in imports(parse(path)) if name.partition(".")[0] in ("stages", "tools")})
    assert not copies, f"imports {copies}; write streamflow.{copies[0]}"


@pytest.mark.parametrize("module", [m for m in MODULES if is_pure(m)], ids=lambda module: module.name)
def test_a_pure_module_reaches_neither_torch_nor_a_clock(module: Module) -> None:
    impure = {
        name: by for name, by in reachable(module).items() if name.partition(".")[0] in ("torch", "time", "datetime")
    }
    assert not impure, f"{module.place} says that it is pure, but reaches {impure} (what: imported by)"


@each_module
def test_nothing_breaks_structured_concurrency(module: Module) -> None:
    used = set(names_used(module.tree)) & FORBIDDEN.keys() - EXCEPTIONS.get(module.place, set())
    assert not used, f"{module.place}: " + "; ".join(f"{name} ({FORBIDDEN[name]})" for name in sorted(used))


@pytest.mark.parametrize("name", ["stages", "tools"])
def test_the_package_holds_links_to_the_top_level_folders(name: str) -> None:
    link = ROOT / "streamflow" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_every_folder_with_modules_is_a_package(folder: str) -> None:
    """A folder without ``__init__.py`` would be left out of the wheel, and nobody would notice here."""
    folders = {path.parent for path in python_files(folder)}
    assert [parent for parent in folders if not (parent / "__init__.py").is_file()] == []


def committed_files() -> list[Path]:
    """Files that are committed or would be; without git, those of the folders we know."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        folders = (*ALLOWED, "tests", "docs", ".ci")
        listed = [str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*")]
        listed += [path.name for path in ROOT.glob("*.*")]
    files = [ROOT / name for name in listed if name]
    return [path for path in files if path.is_file() and path.resolve() == path]


# Put together here, so that this file does not hold what they look for.
MACHINE_PATHS = re.compile(r"(?<![\w.~*}])/(?:" + "|".join(("work", "root", "home", "tmp", "opt", "workspace")) + ")/")
REGISTRY_HOSTS = re.compile("pypi" + r"\.org|python" + r"hosted|download\.py" + r"torch|index" + "-url|find" + "-links")


@pytest.mark.parametrize("pattern", [MACHINE_PATHS, REGISTRY_HOSTS], ids=["paths of one machine", "registry hosts"])
def test_no_committed_text_names(pattern: re.Pattern[str]) -> None:
    found = []
    for path in committed_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}:{i}: {line}" for i, line in enumerate(lines, 1) if pattern.search(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("before", ["see ", "'", "(", "`", "=", ""])
def test_the_pattern_for_paths_finds_them(before: str) -> None:
    assert MACHINE_PATHS.search(f"{before}/{'tmp'}/x")


@pytest.mark.parametrize("text", ["https://example.com/work/", "../tmp/x", "{scratch}/tmp/x", "a/home/b", "~/work/x"])
def test_the_pattern_for_paths_leaves_others_alone(text: str) -> None:
    assert not MACHINE_PATHS.search(text)
