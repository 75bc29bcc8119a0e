"""Files that are no files: whatever a name stands for, reading ends with the text or a typed error, at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.chat import chat_format
from headrace.config import load_config
from headrace.errors import ConfigError
from headrace.llm import LLM
from headrace.textfile import MOST_BYTES, read_bytes, read_text

TOY = 'model = "toy://vocab=300"\n'


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _large(path: Path) -> None:
    path.write_bytes(b"#" * (MOST_BYTES + 1))


MAKERS = [_pipe, _loop, _device, _large, Path.mkdir]


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_no_small_file_is_an_error(make: Callable[[Path], object], tmp_path: Path) -> None:
    odd = tmp_path / "odd.toml"
    make(odd)
    with pytest.raises(OSError, match=r".") as read:
        read_text(odd)
    assert read.value.strerror
    with pytest.raises(ConfigError, match="HR-CONFIG-01"):
        load_config(odd)
    (tmp_path / "over.toml").write_text('extends = "odd.toml"\n' + TOY)
    with pytest.raises(ConfigError, match=r"HR-CONFIG-06: .*extended by .*over.toml:1"):
        load_config(tmp_path / "over.toml")
    with LLM("toy://vocab=300") as llm, pytest.raises(ConfigError, match="HR-CHAT-05"):
        chat_format(llm, odd)


def test_a_pipe_with_a_writer_is_read_to_its_end(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with open(writer, "wb") as file:
        file.write(TOY.encode())
    assert load_config(f"/dev/fd/{reader}").model == "toy://vocab=300"
    os.close(reader)


def test_a_byte_order_mark_and_crlf_are_read_over(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf" + TOY.encode().replace(b"\n", b"\r\n") + b"[engine]\r\nmax_sequences = 0\r\n")
    with pytest.raises(ConfigError, match=r"windows.toml:3"):
        load_config(path)


@pytest.mark.parametrize("name", ["~no-such-user-here/x", "a\\u0000b", "A" * 300, "A" * 5000, "missing/x", "~"])
def test_names_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f'extends = "{name}"\n')
    with pytest.raises(ConfigError, match="HR-CONFIG-06"):
        load_config(path)
    path.write_text(f'{TOY}[chat]\ntemplate = "{name}"\n')
    with pytest.raises(ConfigError, match=r"HR-CONFIG-04: 'chat\.template'"):
        load_config(path)
    path.write_text(f'model = "{name}"\n')
    assert load_config(path).model  # whether there is such a model is found when it is resolved


def test_no_bound_reads_everything(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * (MOST_BYTES + 1))
    assert len(read_bytes(path, None)) == MOST_BYTES + 1


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5000 + "]" * 5000,
        "x = " + "[" * 100 + "]" * 100,
        "x = " + "{a = " * 100 + "1" + "}" * 100,
        ".".join("a" * 100) + " = 1",
        f"[{'.'.join('a' * 100)}]",
        "x = " + "9" * 5000,
    ],
)
def test_nesting_and_numbers_without_end(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f"{TOY}{text}\n")
    with pytest.raises(ConfigError, match="HR-CONFIG-02"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"HR-CONFIG-0[37]"):
        load_config(None, model="toy://", sets=[text.strip("[]").replace(" ", "")])


def test_long_chains_of_files(tmp_path: Path) -> None:
    (tmp_path / "0.toml").write_text(TOY)
    for n in range(1, 50):
        (tmp_path / f"{n}.toml").write_text(f'extends = "{n - 1}.toml"\n')
    assert load_config(tmp_path / "20.toml").model
    with pytest.raises(ConfigError, match=r"HR-CONFIG-06: more than 32 config files"):
        load_config(tmp_path / "49.toml")
