"""The tokenizer against hand-written ids, the byte decoder, and every way its files can be wrong."""

import base64
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.config.errors import TokenizerError, UsageError
from streamer.text import pretokenize
from streamer.text.tokenizer import IncrementalDecoder, Tokenizer
from tests.tokenizers import RESERVED_OFFSETS, bpe_tokens, write_tokenizer

RANK = {token: rank for rank, token in enumerate(bpe_tokens(512))}


def ids_of(*tokens: str) -> list[int]:
    return [RANK[token.encode()] for token in tokens]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("abc", [97, 98, 99]),
        ("think", ids_of("think")),
        ("response", ids_of("re", "sp", "on", "se")),
        ("message", ids_of("mess", "age")),
        ("hello world", ids_of("hello", " world")),
        ("\x00", [0]),
        ("a\r\nb", [97, 13, 10, 98]),
        ("a\n\nb", [97, *ids_of("\n\n"), 98]),
        ("中文", ids_of("中文")),
        ("中文字", list("中文字".encode())),  # no merge reaches 中文 from bytes inside a longer piece
        ("中a", ids_of("中", "a")),  # Han is cut from Latin first
        ("🙂", list("🙂".encode())),
        ("e\u0301", [101, *"\u0301".encode()]),
        ("12345", [49, 50, 51, 52, 53]),
        ("<|open|>", ids_of("<|", "o", "p", "e", "n", "|>")),
        ("[EOS]", ids_of("[", "EO", "S", "]")),
    ],
)
def test_encodes_as_written_by_hand(tokenizer: Tokenizer, text: str, expected: list[int]) -> None:
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


HOSTILE = st.sampled_from(
    [*RESERVED_OFFSETS, "<|reserved_token_600|>", "<|", "|>", "open", "sep", "think", '="', "\r\n", "\x00", "中", "🙂"]
)
TEXT = st.lists(HOSTILE | st.text(max_size=5), max_size=12).map("".join)


@settings(deadline=None)
@given(text=TEXT)
def test_no_text_yields_a_reserved_id_and_all_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not any(tokenizer.is_special(token_id) for token_id in ids)
    assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 767), max_size=30))
def test_incremental_decoding_is_decoding(tokenizer: Tokenizer, ids: list[int]) -> None:
    decoder = IncrementalDecoder(tokenizer)
    streamed = "".join(decoder.push(token_id) for token_id in ids) + decoder.flush()
    data = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert streamed == data.decode("utf-8", "replace") == tokenizer.decode(ids)


def test_incremental_decoding_waits_for_the_last_byte(tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(byte) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert decoder.push(0xF0) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(97) == "a"


def test_markers_are_found_by_name(tmp_path: Path) -> None:
    offsets = {name: 200 - offset for name, offset in RESERVED_OFFSETS.items() if offset < 200}
    named = write_tokenizer(tmp_path, 600, offsets=offsets)
    tokenizer = Tokenizer.from_directories([tmp_path], 600)
    assert tokenizer.open == named["<|open|>"] == 344 + 197
    assert tokenizer.end_of_msg == tokenizer.marker("<|end_of_msg|>") == 344 + 198
    with pytest.raises(TokenizerError, match=r"\[PAD\]"):
        tokenizer.marker("[PAD]")


def test_reserved_ids(tokenizer: Tokenizer) -> None:
    generated = {tokenizer.open, tokenizer.close, tokenizer.sep, tokenizer.end_of_msg, tokenizer.eos}
    assert generated == {515, 516, 517, 514, 513}
    assert set(tokenizer.banned_ids) == set(range(512, 768)) - generated
    assert tokenizer.vocab_size == 768
    assert tokenizer.decode([520]) == "<|reserved_token_520|>"
    assert tokenizer.marker("<|reserved_token_520|>") == 520
    # As the reference: structure flagged special=false is kept, the rest is skipped.
    assert tokenizer.decode([512, 515, 97, 517, 514, 520], skip_special=True) == "<|open|>a<|sep|>"


@pytest.mark.parametrize("token_id", [-1, 768])
def test_unknown_id_is_a_usage_error(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(UsageError, match=r"expected 0\.\.767"):
        tokenizer.decode([token_id])


def test_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"character 30001: .*U\+D83D"):
        tokenizer.encode("a" * 30_001 + "\ud83d")


@pytest.mark.parametrize("text", ["a" * 2_000_000, " " * 2_000_000])
def test_two_million_characters_take_linear_time(tokenizer: Tokenizer, text: str) -> None:
    start = time.perf_counter()
    assert len(tokenizer.encode(text)) <= 1_000_000
    assert time.perf_counter() - start < 10  # 0.3 s where it is linear; hours where it is quadratic


@settings(deadline=None, max_examples=30)
@given(runs=st.lists(st.tuples(st.sampled_from("a \n中"), st.integers(1, 60_000)), max_size=10))
def test_slices_are_those_of_the_reference(runs: list[tuple[str, int]]) -> None:
    text = "".join(character * length for character, length in runs)
    assert list(pretokenize.slices(text)) == reference_slices(text)


def reference_slices(text: str) -> list[str]:
    """The rule as the spec words it: 400,000 characters, then a cut before the 25,001st space or non-space in a row."""
    parts = []
    for begin in range(0, len(text), 400_000):
        piece = text[begin : begin + 400_000]
        start = run = 0
        for at, character in enumerate(piece):
            run = run + 1 if at and character.isspace() == piece[at - 1].isspace() else 1
            if run > 25_000:
                parts.append(piece[start:at])
                start, run = at, 1
        parts.append(piece[start:])
    return parts


def test_cuts_are_token_boundaries(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a" * 25_001 + "a")
    assert ids == ids_of("aaaa") * 6_250 + ids_of("aa")
    ids = tokenizer.encode("b" + "a" * 25_000)  # the cut falls before the last a
    assert ids[-1] == RANK[b"a"]


def model_line(line: int, text: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "tiktoken.model"
        lines = path.read_text().splitlines()
        lines[line - 1] = text
        path.write_text("\n".join(lines))

    return damage


def added(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "tokenizer_config.json"
        config = json.loads(path.read_text())
        change(config["added_tokens_decoder"])
        path.write_text(json.dumps(config))

    return damage


def replace(name: str, text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_text(text) and None


def directory_instead(directory: Path) -> None:
    (directory / "tiktoken.model").unlink()
    (directory / "tiktoken.model").mkdir()


def dangling(directory: Path) -> None:
    (directory / "tiktoken.model").unlink()
    (directory / "tiktoken.model").symlink_to("/no/such/file")


B64 = base64.b64encode(b"zz").decode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "tiktoken.model").unlink(), "K3 ships tiktoken.model and no tokenizer.json"),
        (directory_instead, "tiktoken.model: expected a file, found a directory"),
        (dangling, "tiktoken.model (a link to /no/such/file): could not be read"),
        (lambda d: (d / "tokenizer_config.json").unlink(), "tokenizer_config.json not found in"),
        (model_line(300, "?!? 299"), "tiktoken.model line 300: expected base64"),
        (model_line(300, "abc"), "line 300: expected 'base64 rank', found 'abc'"),
        (model_line(300, f"{B64} x"), "line 300: expected a rank"),
        (model_line(300, f"{B64} -1"), "line 300: expected a rank"),
        (model_line(300, f"{B64} 298"), "line 300: expected each rank once, found rank 298 again (first on 299)"),
        (model_line(300, "YQ== 299"), "line 300: expected each token once, found b'a' again (rank 97)"),
        (model_line(300, ""), "without a gap, found no rank 299"),
        (model_line(98, f"{B64} 97"), "found no 0x61"),
        (
            replace("tiktoken.model", "version https://git-lfs.github.com/spec/v1\n"),
            "tiktoken.model: expected the ranks, found a Git LFS pointer",
        ),
        (replace("tokenizer_config.json", "{"), "tokenizer_config.json: expected JSON"),
        (replace("tokenizer_config.json", "[]"), "expected an object 'added_tokens_decoder'"),
        (added(lambda a: a.pop("515")), "tokenizer_config.json: added_tokens_decoder: expected the chat markers"),
        (added(lambda a: a.update({"3": a.pop("515")})), "added_tokens_decoder['3'] (<|open|>): expected an id in 512"),
        (added(lambda a: a.update({"600": a["515"]})), "found '<|open|>' as 515 and 600"),
        (added(lambda a: a.update({"600": "x"})), "added_tokens_decoder['600']: expected an object"),
    ],
)
def test_damaged_files_get_a_sentence(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write_tokenizer(tmp_path)
    damage(tmp_path)
    with pytest.raises(TokenizerError, match=re.escape(message)):
        Tokenizer.from_directories([tmp_path], 768)


def test_vocabulary_of_another_model_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"expected 163584 ranks .* found 512"):
        Tokenizer.from_directories([tmp_path], 163_840)


def test_files_may_lie_in_different_directories(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "tiktoken.model").rename(tmp_path / "b" / "tiktoken.model")
    assert Tokenizer.from_directories([tmp_path / "a", tmp_path / "b"], 768).vocab_size == 768
