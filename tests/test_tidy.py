"""Holds the import arrows and the habits of the code. A failure says which line broke which rule."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from public_names import names_in_two_files, unused_names

from dovetail.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "dovetail"
FILES = sorted(SOURCE.rglob("*.py"))
BENCHMARKS = ROOT / "benchmarks" / "dovetail_bench"
BENCH_FILES = sorted(BENCHMARKS.rglob("*.py"))

# Imports point left, never right: a unit may import units of a lower rank, and itself. Units of one rank do not know
# each other, except where ALSO says so.
RANKS = [
    {"codings", "machine", "guidance", "daytime"},
    {"errors", "modelspec", "layouts", "pulse", "confined"},
    {"types", "local_token", "plots", "logschema"},
    {"config", "eventlog", "grammars"},
    {"policy", "sched"},
    {"profiles"},
    {"node"},
    {"messages"},  # gateway and worker speak the node's protocol in them
    {"cluster"},
    {"native"},
    {"engine", "store", "gateway", "sim", "plan"},
    {"worker"},  # the one place where engine and store meet
    {"cli"},
]
RANK = {unit: rank for rank, units in enumerate(RANKS) for unit in units}
ALSO = {("types", "modelspec"), ("policy", "sched"), ("plan", "sim")}
ALSO |= {("plan", "store"), ("plan", "engine")}  # a function process runs some layers of a model, without a worker

PURE = {
    "types",
    "errors",
    "modelspec",
    "messages",
    "eventlog",
    "logschema",
    "policy",
    "profiles",
    "sched",
    "node",
    "cluster",
}
BANNED_IN_PURE = {"torch", "ray", "fastapi", "starlette", "uvicorn", "httpx", "zmq", "time", "random", "asyncio"}
EXEMPT = {"cluster/ray_backend.py"}  # the only file that imports ray
# The boundaries of each process.
BROAD_EXCEPT_ALLOWED = {
    "worker/runner.py",
    "worker/loading.py",
    "worker/fetching.py",
    "cli/main.py",
    "gateway/app.py",
    "gateway/text/tokenizer_errors.py",
    "gateway/mcp/child.py",
    "grammars.py",
    "dovetail_bench/peer_child.py",
    "dovetail_bench/engine_child.py",
}
# Public names that nothing in `src` uses, and why they are there all the same.
UNUSED = {
    "dovetail.engine.encoder.EncoderExecutor.wrap_native": "the benches time native code through it",
    "dovetail.engine.executor.CpuExecutor.wrap_native": "the benches time native code through it",
    "dovetail.gateway.admin.log_ring.LogRing.emit": "logging calls it",
    "dovetail.gateway.http.protocol.LimitedHttp.send_400_response": "uvicorn calls it",
    "dovetail.gateway.server.HttpServer.capture_signals": "uvicorn calls it",
    "dovetail.gateway.workers.standby.StandbyServer.capture_signals": "uvicorn calls it",
    # The control core, which is under reconstruction.
    "dovetail.logschema.EVENTS": "the log's records are held against it",
    "dovetail.node.ports.Executor": "the port that executors implement, written down",
    "dovetail.sched.scheduler.Scheduler.num_running": "a measurement reads it",
}
# Where a public class or function has one meaning.
ONE_MEANING = {"cluster", "node", "policy", "worker", "sched", "gateway"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
MAX_CLASS_LINES = 300


def unit_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def relative(path: Path) -> str:
    """To `src/dovetail`; a file of the benches has its package's name before it."""
    return path.relative_to(BENCHMARKS.parent if path.is_relative_to(BENCHMARKS) else SOURCE).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and whole name of everything that the file imports, wherever in it."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import; write the whole name"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return tuple(found)


def test_imports_point_left() -> None:
    wrong = []
    for path in FILES:
        unit = unit_of(path)
        if unit in ("__init__", "__main__"):
            continue
        for line, name in imports(path):
            target = name.split(".")[1] if name.startswith("dovetail.") else ""
            if target in RANK and target != unit and RANK[target] >= RANK[unit] and (unit, target) not in ALSO:
                wrong.append(f"{relative(path)}:{line}: {unit} (rank {RANK[unit]}) imports {target} ({RANK[target]})")
    assert not wrong


def test_serving_imports_no_simulator() -> None:
    served = [path for path in FILES if unit_of(path) in ("worker", "gateway")]
    assert not [
        f"{relative(path)}:{line}: serving imports {name}"
        for path in served
        for line, name in imports(path)
        if name.startswith("dovetail.sim")
    ]


def test_only_the_list_of_commands_names_the_benches() -> None:
    """They are a package of their own, which a server is installed without."""
    naming = {relative(path) for path in FILES if BENCHMARKS.name in path.read_text()}
    assert naming == {"cli/main.py"}
    assert not any(name.startswith(BENCHMARKS.name) for _, name in imports(SOURCE / "cli" / "main.py"))


def test_pure_packages_read_no_clock_and_do_no_io() -> None:
    pure = [path for path in FILES if unit_of(path) in PURE and relative(path) not in EXEMPT]
    assert not [
        f"{relative(path)}:{line}: {unit_of(path)} is pure and may not import {name}"
        for path in pure
        for line, name in imports(path)
        if name.split(".")[0] in BANNED_IN_PURE
    ]


def test_transformers_is_imported_nowhere() -> None:
    assert not [
        f"{relative(path)}:{line}: serving imports transformers"
        for path in FILES
        for line, name in imports(path)
        if name.split(".")[0] == "transformers"
    ]


def test_the_gateway_reads_no_tokenizer_in_its_own_process() -> None:
    """`tokenizers` keeps the interpreter to itself for as long as it reads a file, with every stream."""
    users = {path.name for path in (SOURCE / "gateway").rglob("*.py") if "from tokenizers import" in path.read_text()}
    assert users == {"tokenizer_child.py", "token_table.py"}
    assert (SOURCE / "gateway" / "text" / "token_table.py").read_text().count("Tokenizer.from_") == 1  # of a decoder


def test_every_unit_has_a_rank() -> None:
    units = {unit_of(path) for path in FILES} - {"__init__", "__main__"}
    assert units <= set(RANK), f"units without a rank in RANKS: {sorted(units - set(RANK))}"


def test_no_broad_except_outside_the_boundaries() -> None:
    wrong = []
    for path in (path for path in [*FILES, *BENCH_FILES] if relative(path) not in BROAD_EXCEPT_ALLOWED):
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler):
                names = [] if node.type is None else [n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)]
                if node.type is None or "Exception" in names or "BaseException" in names:
                    wrong.append(f"{relative(path)}:{node.lineno}: broad except; name what can happen")
    assert not wrong


def test_a_public_name_of_the_control_rooms_has_one_meaning() -> None:
    rooms = [(relative(path), tree_of(path)) for path in FILES if unit_of(path) in ONE_MEANING]
    wrong = [f"{name}: defined in {' and '.join(files)}" for name, files in names_in_two_files(rooms).items()]
    assert not wrong, "give each its own name"


def test_files_and_functions_stay_readable() -> None:
    wrong = []
    for path in [*FILES, *BENCH_FILES]:
        if len(path.read_text().splitlines()) > MAX_FILE_LINES:
            wrong.append(f"{relative(path)}: more than {MAX_FILE_LINES} lines")
        for node in nodes_of(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > (MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES):
                wrong.append(f"{relative(path)}:{node.lineno}: {node.name} has {length} lines")
    assert not wrong


def module_of(path: Path) -> str:
    folder = BENCHMARKS if path.is_relative_to(BENCHMARKS) else SOURCE
    return ".".join((folder.name, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")


def lines_for_types(path: Path) -> set[int]:
    """Of imports that exist for the type checker alone."""
    blocks = [node for node in nodes_of(path) if isinstance(node, ast.If)]
    blocks = [node for node in blocks if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"]
    return {line for node in blocks for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module_of(path): path for path in [*FILES, *BENCH_FILES]}
    arrows: dict[str, set[str]] = {}
    for module, path in modules.items():
        typed = lines_for_types(path)
        names = {name for line, name in imports(path) if line not in typed}
        found = {name if name in modules else name.rpartition(".")[0] for name in names}
        arrows[module] = {name for name in found if name in modules and name != module}
    while free := {module for module, targets in arrows.items() if not targets & arrows.keys()}:
        for module in free:
            del arrows[module]
    assert not arrows, f"these are in a circle, or lead to one: {sorted(arrows)}"


def test_every_module_says_what_it_is_for() -> None:
    silent = [relative(path) for path in [*FILES, *BENCH_FILES] if not ast.get_docstring(tree_of(path))]
    assert not silent, "no module docstring"


def test_no_file_is_an_orphan() -> None:
    """A module that nothing imports is dead, unless it is an entry point. Tests and benches keep nothing of `src`."""
    entry_points = {command.module for command in COMMANDS.values()}  # imported by name, when asked for
    entry_points |= {"dovetail.cli.main", "dovetail.worker.__main__", "dovetail.__main__", "dovetail.plan.function"}
    assert not orphans(FILES, FILES, entry_points), "nothing in src imports these"
    entry_points |= {f"dovetail_bench.{name}" for name in ("engine_ours", "ray_serve_app", "thesis_platforms")}
    readers = [*BENCH_FILES, *(ROOT / "tests").rglob("*.py")]
    assert not orphans(BENCH_FILES, readers, entry_points), "nothing imports these"


def orphans(files: list[Path], readers: list[Path], entry_points: set[str]) -> list[str]:
    named = {name for path in readers for _, name in imports(path)}
    used = entry_points | named | {name.rpartition(".")[0] for name in named}  # a module's, or of something in it
    return [relative(path) for path in files if path.name != "__init__.py" and module_of(path) not in used]


def test_every_public_name_of_src_is_used_in_src() -> None:
    unused = unused_names({module_of(path): tree_of(path) for path in FILES})
    assert unused - UNUSED.keys() == set(), "nothing in src uses these: delete them, or what should have called them"
    assert UNUSED.keys() - unused == set(), "these are used or gone: take them out of UNUSED"


def test_a_name_that_only_its_own_import_mentions_counts_as_unused() -> None:
    a = ast.parse("def dead(): ...\ndef alive(): ...\nclass Kept:\n  def used(self): ...\n  def idle(self): ...")
    b = ast.parse("from a import alive, dead, Kept\nalive(); Kept().used()")
    assert unused_names({"a": a, "b": b}) == {"a.dead", "a.Kept.idle"}
