from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.contracts import Tokenizer
from headrace.errors import RequestError
from headrace.outputs import TextStream
from headrace.types import SamplingParams

SPECIAL = b"<|end|>"


class Pieces(Tokenizer):
    """Token i stands for the i-th byte string given; `SPECIAL` is a control token."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.n_vocab = len(pieces)
        self.bos_id = None
        self.eos_ids = frozenset()

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def is_special(self, token: int) -> bool:
        return self.pieces[token] is SPECIAL  # the object: any bytes may be drawn as text


def run(pieces: list[bytes], stop: tuple[str, ...] = (), skip_special: bool = True) -> TextStream:
    """Push tokens until one completes a stop string, else finish. Checks what must hold after every push."""
    stream = TextStream(Pieces(pieces), stop, skip_special)
    for token in range(len(pieces)):
        done = stream.push(token)
        assert done == (stream.stopped is not None)
        if done:
            break
    else:
        stream.finish()
    assert all(stream.pieces)
    assert stream.text == "".join(stream.pieces)
    return stream


def ends_before(text: str, stop: tuple[str, ...]) -> tuple[int, str | None]:
    """Where the text ends, read character by character: (length, stop string)."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return len(text), None


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


sizes = st.lists(st.integers(0, 5), max_size=60)
texts = st.text(st.sampled_from("aab\n 거🐢😊é##�"), max_size=30)
stops = st.lists(st.text(st.sampled_from("aab\n 거🐢#�"), min_size=1, max_size=5), max_size=4).map(tuple)


@given(st.one_of(st.binary(max_size=40), texts.map(str.encode), st.text(max_size=20).map(str.encode)), sizes)
@example(b"\xf0\x9f\x98", [1, 1, 1])
@example(b"\xe2'", [1, 1])
@example(b"\xed\xa0\x80\xf4\x90\x80\x80", [1] * 7)
def test_decodes_like_the_whole(data: bytes, sizes: list[int]) -> None:
    assert run(cut(data, sizes)).text == data.decode("utf-8", "replace")


@given(texts, sizes, stops)
@example("abcX", [4], ("abcX", "b"))
@example("xab", [1, 1], ("ab", "xab"))
@example("aaab", [1, 1, 1], ("aab",))
def test_ends_before_the_first_stop_however_it_is_cut(text: str, sizes: list[int], stop: tuple[str, ...]) -> None:
    length, found = ends_before(text, stop)
    stream = run(cut(text.encode(), sizes), stop)
    assert stream.text == text[:length]
    assert stream.stopped == found


@given(texts, sizes, stops)
def test_shows_all_that_no_stop_can_take_back(text: str, sizes: list[int], stop: tuple[str, ...]) -> None:
    """Nothing of a possible match is shown, and no more than that is held."""
    pieces = cut(text.encode(), sizes)
    stream = TextStream(Pieces(pieces), stop)
    seen = b""
    for token, piece in enumerate(pieces):
        seen += piece
        if stream.push(token):
            break
        whole = seen.decode("utf-8", "ignore")
        held = max((k for s in stop for k in range(1, len(s)) if whole.endswith(s[:k])), default=0)
        assert stream.text == whole[: len(whole) - held]


@given(st.binary(max_size=30), sizes, stops)
def test_any_bytes_with_stops(data: bytes, sizes: list[int], stop: tuple[str, ...]) -> None:
    text = data.decode("utf-8", "replace")
    assert run(cut(data, sizes), stop).text == text[: ends_before(text, stop)[0]]


# --- reported bugs of other engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_partial_stop_never_leaks(size: int) -> None:  # vllm#3574
    pieces = [b"ABCDEFGHIJK"[i : i + size] for i in range(0, 11, size)]
    stream = run(pieces, ("DEFGHIJ",))
    assert stream.text == "ABC"
    assert stream.stopped == "DEFGHIJ"


def test_near_miss_is_given_back() -> None:
    stream = TextStream(Pieces([b"ABC", b"DEFGHI", b"x"]), ("DEFGHIJ",))
    assert [stream.push(token) for token in range(3)] == [False, False, False]
    assert stream.pieces == ["ABC", "DEFGHIx"]


def test_near_miss_at_the_end_is_given_back() -> None:
    stream = TextStream(Pieces([b"ABC", b"DEFGHI"]), ("DEFGHIJ",))
    assert not stream.push(0)
    assert not stream.push(1)
    assert stream.pieces == ["ABC"]
    stream.finish()
    stream.finish()
    assert stream.pieces == ["ABC", "DEFGHI"]


def test_stop_works_for_callers_that_only_take_tokens() -> None:  # vllm#57052
    stream = TextStream(Pieces([b"a", b"\n", b"b"]), ("\n",))
    assert [stream.push(token) for token in range(2)] == [False, True]
    assert stream.stopped == "\n"


def test_two_stops_repeat_no_text() -> None:  # llama.cpp#10914
    stream = run([b" ", b"Al", b"ice", b"!"], ("\n", "Alice:"))
    assert stream.text == " Alice!"


def test_broken_utf8_becomes_a_replacement() -> None:  # llama.cpp#11738
    assert run([b"it", b"\xe2", b"\x27", b"s"]).text == "it�'s"


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_ending_inside_an_emoji(n: int, stop: tuple[str, ...]) -> None:  # Camelid PR#288
    data = "😊😊".encode()[:n]
    assert run([bytes([byte]) for byte in data], stop).text == "😊" * (n // 4) + "�" * (n % 4 > 0)


def test_stop_across_tokens_and_characters() -> None:  # llama-cpp-python#372
    data = "거북이🐢##".encode()
    for size in range(1, len(data)):
        stream = run([data[i : i + size] for i in range(0, len(data), size)], ("🐢##",))
        assert stream.text == "거북이"
        assert stream.stopped == "🐢##"


def test_which_stops_are_accepted() -> None:  # vllm#11089
    assert SamplingParams(stop=()).stop == ()
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop="\n").stop == ("\n",)  # type: ignore[arg-type]
    for wrong in ("", [""], ["x"] * 17):
        with pytest.raises(RequestError, match="stop"):
            SamplingParams(stop=wrong)  # type: ignore[arg-type]
    assert run([b"a", b"b"], ()).text == "ab"


# --- the rest --------------------------------------------------------------------------------------------------------


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    assert run([b"a", SPECIAL, b"b"]).text == "ab"
    assert run([b"a", SPECIAL, b"b"], skip_special=False).text == "a<|end|>b"
    assert run([b"a", SPECIAL, b"b"], ("<|",)).stopped is None
    assert run([b"a", SPECIAL, b"b"], ("<|",), skip_special=False).text == "a"


def test_after_the_stop_nothing_is_added() -> None:
    stream = TextStream(Pieces([b"a\nb", b"c"]), ("\n",))
    assert stream.push(0)
    assert stream.push(1)
    stream.finish()
    assert stream.pieces == ["a"]


def test_pieces_only_grow() -> None:
    stream = TextStream(Pieces([b"a", b"b\xe2", b"\x82\xac"]))
    pieces = stream.pieces
    for token in range(3):
        stream.push(token)
    assert stream.pieces is pieces
    assert pieces == ["a", "b", "€"]
