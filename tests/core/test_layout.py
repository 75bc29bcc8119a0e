"""Rules of the source tree that a reader would otherwise have to remember: layers, size, names, environment, safety.

Each rule takes modules and yields what breaks it. It is run twice: on the tree, and on a snippet that breaks it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("core", "plugins", "backends")
PLUGIN_PACKAGES = ("headrace_plugins", "headrace_gguf")

# What the core may cost to read, in lines of code. A module that is not named counts as what runs in a step.
CORE_CODE_LINES = {"step": 3100, "models": 400, "build": 2275, "front doors": 850, "chats": 1350}
CORE_GROUPS = {
    "build": {
        "__init__", "__main__", "hooks", "catalog", "config", "options", "layers", "tomlmap", "pipeline", "selection",
        "decisions", "machine", "home", "textfile", "cli",
    },
    "models": {"ops", "modeling"},
    "front doors": {"runner", "llm"},
    "chats": {"chat", "dialogue", "tools", "calls", "schemas", "answers"},
}  # fmt: skip
MODULE_CODE_LINES = 550

ENVIRONMENT = {"HEADRACE_CONFIG", "HEADRACE_HOME", "HEADRACE_DISABLE_PLUGINS"}
ENVIRONMENT_EXCEPTIONS = {
    # (path or folder, variable; "?" = one that only the run knows): why
    ("core/headrace/options.py", "?"): "the secrets of a config: {env = NAME}",
    ("core/headrace/home.py", "XDG_CACHE_HOME"): "where cache folders lie, on systems that follow freedesktop.org",
    ("backends/gguf/", "OMP_WAIT_POLICY"): "the OpenMP runtime reads it when llama.cpp is loaded",
    ("backends/gguf/", "GGML_NO_BACKTRACE"): "ggml reads it: the trial process is to end without starting a debugger",
}

BACKEND_IMPORTS = {
    # The seams that every backend is built on:
    "headrace", "headrace.hooks", "headrace.types", "headrace.contracts", "headrace.ops", "headrace.modeling",
    "headrace.errors", "headrace.testing",
    "headrace.config",  # Options, the base of option models, and the types of sizes and times ...
    "headrace.options",  # ... where they are defined
    "headrace.sampling",  # the reference sampler, for backends that sample on the host
    "headrace.home",  # the cache folder
}  # fmt: skip

# Who may import whom inside core: only the same rung or one before it. Modules not named are on the rung of the
# mechanics; what the front doors are made of is named, so that the engine cannot come to depend on it.
LADDER = (
    {"errors"},
    {"types"},
    {"hooks", "contracts"},
    {"ops", "modeling"},
    {"(mechanics)"},
    {"config"},
    {"pipeline", "selection", "decisions"},
    {"dialogue", "schemas", "tools", "calls", "runner", "llm", "answers", "chat"},
    {"cli"},
    {"__main__"},
)
MECHANICS = next(rung for rung, names in enumerate(LADDER) if "(mechanics)" in names)

HEAVY = {"torch", "triton", "torch_npu", "transformers", "llama_cpp", "xgrammar"}
HEAVY_PACKAGES = {
    # folder: (what it may import at the top, why)
    "plugins/headrace_plugins/reference/": ({"torch"}, "kernels and executor are torch code, named by records only"),
    "plugins/headrace_plugins/models/": ({"torch"}, "the formulas of models are torch code, named by records only"),
    "plugins/headrace_plugins/checkpoint/": ({"torch"}, "tensors on disk, imported by executors as they load"),
}
HEAVY_PACKAGES_LIGHT = {
    # modules below them that a record or a probe needs before anything is chosen
    "plugins/headrace_plugins/reference/specs.py",
    "plugins/headrace_plugins/reference/backend.py",
    "plugins/headrace_plugins/reference/facts.py",
    "plugins/headrace_plugins/reference/options.py",
}
UNSAFE_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "torch.load", "os.system", "os.popen"}
UNSAFE_KEYWORDS = {"shell", "allow_pickle"}
VAGUE_NAMES = re.compile(r"(^|_)(utils?|helpers?|misc|common|manager|stuff)\d*$")
VAGUE_CLASSES = re.compile(r"^(Base|Abstract|I)[A-Z][a-z]|(Manager|Helper|Util|Utils)\d*$")


@dataclass(frozen=True)
class Module:
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def name(self) -> str:
        """Dotted name below its source root: headrace.testing.toy."""
        parts = Path(self.path).with_suffix("").parts
        start = next((i for i, part in enumerate(parts) if part.startswith("headrace")), len(parts) - 1)
        return ".".join(parts[start:]).removesuffix(".__init__")

    @property
    def n_code_lines(self) -> int:
        """Lines with code: no blank lines, comments or docstrings (nor docstrings of attributes)."""
        skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in skip:
                code.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(code)


Rule = Callable[[Module], Iterator[str]]


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """The Python files below the folders; the templates of `plugins new` are text, not modules."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    kept = [path for path in paths if not {"scaffold", "build", "dist"} & set(path.relative_to(ROOT).parts)]
    return tuple(Module(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in kept)


def imports(module: Module, *, typing: bool = True, lazy: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of each import. typing: also those for type checkers; lazy: also those in functions."""
    pending: list[ast.AST] = [module.tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.name.split(".")[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            yield node.lineno, base
            if base == "headrace":  # `from headrace import hooks` imports a module too
                yield from ((node.lineno, f"headrace.{alias.name}") for alias in node.names if alias.name.islower())
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not typing:
            pending.extend(node.orelse)
        elif lazy or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            pending.extend(ast.iter_child_nodes(node))


# --- rules -----------------------------------------------------------------------------------------------------------


def no_source_root_as_package(module: Module) -> Iterator[str]:
    for line, name in imports(module):
        if name.split(".")[0] in SOURCE_ROOTS:
            yield f"{module.path}:{line} imports {name}: core/, plugins/ and backends/ are source roots, not packages"


def core_knows_no_plugin(module: Module) -> Iterator[str]:
    for line, name in imports(module):
        if name.startswith("headrace_"):
            yield f"{module.path}:{line} imports {name}: core finds plugins through entry points only"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for package in PLUGIN_PACKAGES:
                if re.match(rf"{package}\b[.:]?\w*", node.value) and " " not in node.value:
                    yield f"{module.path}:{node.lineno} names {node.value!r}: no plugin has a privileged path"


def plugins_know_no_backend(module: Module) -> Iterator[str]:
    for line, name in imports(module):
        top = name.split(".")[0]
        if top.startswith("headrace_") and top != "headrace_plugins":
            yield f"{module.path}:{line} imports {name}: plugins serve every backend"


def backend_uses_seams_only(module: Module) -> Iterator[str]:
    own = module.name.split(".")[0]
    for line, name in imports(module):
        parts = name.split(".")
        if parts[0].startswith("headrace_") and parts[0] != own:
            yield f"{module.path}:{line} imports {name}: backends stand alone"
        if parts[0] == "headrace" and ".".join(parts[:2]) not in BACKEND_IMPORTS:
            yield f"{module.path}:{line} imports {name}: not one of the seams that backends may use"


def no_upward_import(module: Module) -> Iterator[str]:
    here = _rung(module.name)
    for line, name in imports(module, typing=False, lazy=False):
        if name.startswith("headrace.testing") and not module.name.startswith("headrace.testing"):
            yield f"{module.path}:{line} imports {name}: only tests and toys use it"
        elif name.startswith("headrace.") and _rung(name) > here:
            yield f"{module.path}:{line} imports {name}, which stands above it"


def _rung(name: str) -> int:
    own = name.split(".")[1] if "." in name else ""
    if own == "testing":
        return len(LADDER)
    return next((rung for rung, names in enumerate(LADDER) if own in names), MECHANICS)


def heavy_imports_in_factories(module: Module) -> Iterator[str]:
    allowed: set[str] = set()
    if module.path not in HEAVY_PACKAGES_LIGHT:
        for folder, (names, _reason) in HEAVY_PACKAGES.items():
            allowed |= names if module.path.startswith(folder) else set()
    for line, name in imports(module, typing=False, lazy=False):
        if name.split(".")[0] in HEAVY - allowed:
            yield f"{module.path}:{line} imports {name} when it is imported: do it in the factory"


def known_environment_only(module: Module) -> Iterator[str]:
    constants = {
        target.id: node.value.value
        for node in module.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    parents = {child: node for node in ast.walk(module.tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if {alias.name for alias in node.names} & {"environ", "getenv", "putenv"}:
                yield f"{module.path}:{node.lineno} imports from os: write os.environ, so that it can be seen"
            continue
        if not isinstance(node, ast.Attribute) or ast.unparse(node) not in ("os.environ", "os.getenv", "os.putenv"):
            continue
        key = _key_of(node, parents)
        name = "?"
        if isinstance(key, ast.Constant):
            name = str(key.value)
        elif isinstance(key, ast.Name):
            name = str(constants.get(key.id, "?"))
        allowed = any(module.path.startswith(path) and name == known for path, known in ENVIRONMENT_EXCEPTIONS)
        if name not in ENVIRONMENT and not allowed:
            yield f"{module.path}:{node.lineno} uses the environment variable {name}: everything else is config"


def _key_of(node: ast.Attribute, parents: dict[ast.AST, ast.AST]) -> ast.AST | None:
    """The expression of the variable's name in os.environ[K], os.environ.get(K), K in os.environ, os.getenv(K)."""
    parent = parents[node]
    if isinstance(parent, ast.Attribute):
        parent = parents[parent]
    if isinstance(parent, ast.Call) and parent.args:
        return parent.args[0]
    if isinstance(parent, ast.Subscript):
        return parent.slice
    return parent.left if isinstance(parent, ast.Compare) else None


def nothing_unsafe(module: Module) -> Iterator[str]:
    for line, name in imports(module):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield f"{module.path}:{line} imports {name}: it runs code that it finds in data"
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in UNSAFE_CALLS:
            yield f"{module.path}:{node.lineno} calls {called}"
        for keyword in node.keywords:
            if keyword.arg in UNSAFE_KEYWORDS and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ):
                yield f"{module.path}:{node.lineno} calls {called} with {keyword.arg}"


def no_changing_globals(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield f"{module.path}:{node.lineno} changes the module global {', '.join(node.names)}"


def no_builtin_hash(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hash":
            yield f"{module.path}:{node.lineno} calls hash(): 64 bits that differ between processes are no prefix key"


def telling_names(module: Module) -> Iterator[str]:
    if VAGUE_NAMES.search(Path(module.path).stem):
        yield f"{module.path}: name a module after what it holds"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and VAGUE_CLASSES.search(node.name):
            yield f"{module.path}:{node.lineno} class {node.name}: say what it is"


def moderate_size(module: Module) -> Iterator[str]:
    if module.n_code_lines > MODULE_CODE_LINES:
        yield f"{module.path}: {module.n_code_lines} lines of code; split it by who changes it"


ALL = (*SOURCE_ROOTS, "scripts", "tests")
SHIPPED = SOURCE_ROOTS
RULES: dict[Rule, tuple[tuple[str, ...], str]] = {
    # rule: (the folders it holds for, a snippet that breaks it)
    no_source_root_as_package: (ALL, "from core.headrace import types"),
    core_knows_no_plugin: (("core",), "factory = 'headrace_gguf.backend:open_executor'"),
    plugins_know_no_backend: (("plugins",), "def f():\n    import headrace_gguf.llama"),
    backend_uses_seams_only: (("backends",), "from headrace.scheduler import Scheduler"),
    no_upward_import: (("core",), "from headrace import pipeline"),
    heavy_imports_in_factories: (SHIPPED, "try:\n    import torch.nn\nexcept ImportError:\n    pass"),
    known_environment_only: (SHIPPED, "import os\nif 'HEADRACE_DEBUG' in os.environ: pass"),
    nothing_unsafe: (ALL, "import numpy as np\nnp.load('x.npy', allow_pickle=True)"),
    no_changing_globals: (SHIPPED, "n = 0\ndef f():\n    global n\n    n = 1"),
    no_builtin_hash: (("core/headrace",), "key = hash((1, 2))"),
    telling_names: (SHIPPED, "class BlockManager: pass"),
    moderate_size: (SHIPPED, "x = 1\n" * (MODULE_CODE_LINES + 1)),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_keeps(rule: Rule) -> None:
    folders, _ = RULES[rule]
    broken = [problem for module in modules(*folders) for problem in rule(module)]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_can_fail(rule: Rule) -> None:
    folders, snippet = RULES[rule]
    assert list(rule(Module(f"{folders[0]}/headrace/errors.py", snippet)))


@pytest.mark.parametrize(
    ("rule", "snippet"),
    [
        (core_knows_no_plugin, "import headrace_plugins"),
        (no_upward_import, "from headrace.testing import toy"),
        (no_upward_import, "from .types import Request"),
        (heavy_imports_in_factories, "class A:\n    import llama_cpp"),
        (known_environment_only, "import os\nx = os.getenv('HOME')"),
        (known_environment_only, "import os\nx = dict(os.environ)"),
        (known_environment_only, "import os\nos.environ['A'] = '1'"),
        (known_environment_only, "from os import environ"),
        (nothing_unsafe, "from pickle import loads"),
        (nothing_unsafe, "eval('1')"),
        (nothing_unsafe, "import subprocess\nsubprocess.run('ls', shell=True)"),
    ],
)
def test_rule_sees(rule: Rule, snippet: str) -> None:
    assert list(rule(Module("core/headrace/errors.py", snippet)))


@pytest.mark.parametrize(
    ("rule", "snippet"),
    [
        (heavy_imports_in_factories, "def f():\n    import torch"),
        (no_upward_import, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headrace.llm import LLM"),
        (known_environment_only, "import os\nNAME = 'HEADRACE_HOME'\nx = os.environ.get(NAME)"),
        (nothing_unsafe, "import numpy as np\nnp.load('x.npy', allow_pickle=False)\nretrieval('1')"),
    ],
)
def test_rule_lets_pass(rule: Rule, snippet: str) -> None:
    assert not list(rule(Module("core/headrace/errors.py", snippet)))


# --- the tree as a whole ---------------------------------------------------------------------------------------------


def test_core_stays_small(record_property: Callable[[str, object], None]) -> None:
    """Policy that two backends share belongs in core, anything else in a plugin. `headrace.testing` is not counted."""
    group_of = {name: group for group, names in CORE_GROUPS.items() for name in names}
    sizes: dict[str, dict[str, int]] = {group: {} for group in CORE_CODE_LINES}
    for m in modules("core"):
        if not m.name.startswith("headrace.testing"):
            sizes[group_of.get(Path(m.path).stem, "step")][m.path] = m.n_code_lines
    for group, found in sizes.items():
        total, most = sum(found.values()), CORE_CODE_LINES[group]
        record_property(f"core_code_lines_{group}", total)
        print(f"core, {group}: {total} lines of code in {len(found)} modules, at most {most}")
        assert total <= most, "\n".join(f"{n:5} {path}" for path, n in sorted(found.items(), key=lambda x: -x[1]))


def test_source_roots_are_not_packages() -> None:
    folders = [ROOT / "core", ROOT / "plugins", ROOT / "backends", *(ROOT / "backends").iterdir(), ROOT / "tests"]
    assert not [folder for folder in folders if (folder / "__init__.py").exists()]


def test_every_package_is_typed() -> None:
    packages = [ROOT / "core/headrace", ROOT / "plugins/headrace_plugins", *(ROOT / "backends").glob("*/headrace_*")]
    assert not [package for package in packages if package.is_dir() and not (package / "py.typed").exists()]


def test_versions_move_together() -> None:
    """One version for all distributions, and every pin between them admits it."""
    root = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    minor = headrace.__version__.rpartition(".")[0]
    assert root["version"] == headrace.__version__
    for path in (ROOT / "backends").glob("*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        assert project["version"] == headrace.__version__, path
        assert f"headrace=={minor}.*" in project["dependencies"], path
        extra = path.parent.name
        assert f"{project['name']}=={minor}.*" in root["optional-dependencies"][extra], path


def test_no_plugin_package_is_forgotten_here() -> None:
    found = {path.name for folder in ("plugins", "backends/*") for path in ROOT.glob(f"{folder}/headrace_*")}
    assert found == set(PLUGIN_PACKAGES)


def test_heavy_packages_are_in_use() -> None:
    """An exception that nothing needs any more must go, and one for records and probes must exist."""
    for folder, (names, _reason) in HEAVY_PACKAGES.items():
        found = {name.split(".")[0] for m in modules(folder) for _, name in imports(m, typing=False, lazy=False)}
        assert names <= found, folder
    assert all((ROOT / path).is_file() for path in HEAVY_PACKAGES_LIGHT)


def test_heavy_imports_stay_below_their_folders() -> None:
    text = "import torch"
    assert not list(heavy_imports_in_factories(Module("plugins/headrace_plugins/models/mine.py", text)))
    for path in ("plugins/headrace_plugins/__init__.py", "plugins/headrace_plugins/reference/backend.py"):
        assert list(heavy_imports_in_factories(Module(path, text)))
    assert list(heavy_imports_in_factories(Module("plugins/headrace_plugins/models/mine.py", "import transformers")))


def test_environment_exceptions_are_in_use() -> None:
    """An exception that nothing needs any more must go."""
    for (path, name), _reason in ENVIRONMENT_EXCEPTIONS.items():
        texts = [module.text for module in modules(*SHIPPED) if module.path.startswith(path)]
        assert any("os.environ" in text and (name == "?" or name in text) for text in texts), (path, name)
