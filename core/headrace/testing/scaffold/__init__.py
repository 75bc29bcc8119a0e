"""Writes a third-party plugin that works: `headrace plugins new KIND NAME`.

The templates are the smallest plugin of their kind that passes its conformance class; replace their insides.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from string import Template

import headrace
from headrace.errors import PluginError, did_you_mean
from headrace.hooks import API

KINDS: dict[str, str] = {
    "backend": "a device or library that loads models and runs steps",
    "check": "a check for `headrace doctor`",
    "command": "a sub-command of `headrace`",
    "constraint": "an engine that forces text into a grammar",
    "drafter": "guesses the next tokens, for speculative decoding",
    "kernel": "computes one op of the models on a device",
    "observer": "sees steps and requests, for metrics and traces",
    "store": "keeps KV bytes beyond the device",
    "strategy": "splits work over devices",
}
"""What `write_plugin` can write."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TAKEN = frozenset({"builtin", "plugins", "gguf", "sm100", "ascend", "core", "testing", "toy", "ngram"})
"""Names of our own distributions, modules and records."""

_SHARED = {
    "pyproject.toml": "pyproject.toml.tmpl",
    "README.md": "README.md.tmpl",
}


def write_plugin(kind: str, name: str, folder: Path | str) -> list[Path]:
    """Write the distribution `headrace-<name>` into `folder`/headrace-<name> and return the paths written.

    Raises PluginError for an unknown kind (HR-SCAFFOLD-01), a bad name (02), a target that exists (03) or can't be
    written (04). Nothing that exists is ever overwritten.
    """
    if kind not in KINDS:
        raise PluginError(
            "HR-SCAFFOLD-01", f"unknown plugin kind '{kind}'",
            f"{did_you_mean(kind, KINDS)}kinds: {', '.join(KINDS)}; for a model start from the one in docs/models.md",
        )  # fmt: skip
    _check_name(name)
    root = Path(folder) / f"headrace-{name}"
    if root.exists() or root.is_symlink():
        raise PluginError("HR-SCAFFOLD-03", f"{root} exists", "choose another name or --dir, or remove it first")
    texts = render(kind, name)
    try:
        root.mkdir(parents=True)
        for relative, text in texts.items():
            path = root / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PluginError(
            "HR-SCAFFOLD-04",
            f"can't write {root}: {error.strerror or error}",
            "name a folder that you may write, --dir",
        ) from error
    return [root / relative for relative in texts]


def render(kind: str, name: str) -> dict[str, str]:
    """Relative path -> text of every file of the plugin."""
    module = "headrace_" + name.replace("-", "_")
    values = {
        "api": str(API),
        "kind": kind,
        "A_kind": f"{'An' if kind[0] in 'aeiou' else 'A'} {kind}",
        "name": name,
        "dist": f"headrace-{name}",
        "module": module,
        "cls": _class_name(kind, name),
        "code": name.upper(),
        "requires": _requirement(headrace.__version__),
        "what": KINDS[kind],
    }
    values["use"] = _fill(f"{kind}/use.tmpl", values)
    wanted = {
        **_SHARED,
        f"{module}/__init__.py": f"{kind}/plugin.tmpl",
        f"{module}/{kind}.py": f"{kind}/{kind}.tmpl",
        f"{module}/py.typed": "",
        "tests/test_conformance.py": f"{kind}/test.tmpl",
    }
    return {path: _fill(template, values) if template else "" for path, template in wanted.items()}


def _fill(template: str, values: dict[str, str]) -> str:
    text = files(__package__).joinpath("templates", *template.split("/")).read_text(encoding="utf-8")
    return Template(text).substitute(values)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > 40:
        help = "use lower-case letters, digits and single dashes, starting with a letter, at most 40: my-plugin"
        raise PluginError("HR-SCAFFOLD-02", f"{name!r} can't name a plugin", help)
    if name == "headrace" or name.startswith("headrace-"):
        short = name.removeprefix("headrace").lstrip("-") or "mine"
        raise PluginError("HR-SCAFFOLD-02", f"'{name}' would become headrace-{name}", f"leave the prefix out: {short}")
    if name in _TAKEN:
        raise PluginError("HR-SCAFFOLD-02", f"the name '{name}' belongs to Headrace itself", f"try my-{name}")


def _class_name(kind: str, name: str) -> str:
    """RedisStore for a store named redis or redis-store; never the name of a contract."""
    words = name.split("-")
    if len(words) == 1 or words[-1] != kind:
        words.append(kind)
    return "".join(word.capitalize() for word in words)


def _requirement(version: str) -> str:
    """This minor and the next: the hook API keeps one number back."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f"headrace>={major}.{minor},<{major}.{minor + 2}"
