"""`streamer generate`: where text goes, what a run reports, what is refused, what an interrupt leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from storage.errors import StorageError
from streamer import LLM, EngineOptions, SamplingParams
from streamer.apps.logits_file import LogitsFile
from streamer.cli.screen import Screen
from streamer.config.errors import UsageError
from streamer.model.forward import Model
from tests.streamer.cli.conftest import VOCAB, Done

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., Done]


def test_text_on_stdout_and_the_rest_on_stderr(run: Run, model: Path) -> None:
    done = run("generate", model, "-p", "hello world", "-n", 12, "--seed", 5, "-t", 1)
    assert done.code == 0
    with LLM(model, EngineOptions(threads=1)) as llm:
        params = SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=12)
        text = llm.generate("hello world", params)[0].outputs[0].text
    assert text is not None
    assert done.out == text + ("" if text.endswith("\n") else "\n")
    assert "trunk bf16 | 8 of 8 experts per layer in memory (one token needs 2)" in done.err
    assert "temperature 0.7, top-p 0.9, seed 5 |" in done.err
    assert "12 tokens (" in done.err
    assert "stopped at --max-tokens 12" in done.err
    assert "\x1b" not in done.out + done.err
    quiet = run("generate", model, "-p", "hello world", "-n", 12, "--seed", 5, "-t", 1, "-q")
    assert (quiet.out, quiet.err) == (done.out, "")


def test_every_source_and_setting_gives_the_same_text(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("hello world\n")
    ids = ",".join(map(str, LLM(model).tokenizer.encode("hello world")))
    common = ("generate", model, "-n", 8, "--temp", 0, "-q", "-t", 1)
    expected = run(*common, "-p", "hello world").out
    assert expected
    assert run(*common, "-f", tmp_path / "prompt.txt").out == expected
    assert run(*common, "-f", "-", stdin="hello world\n").out == expected
    assert run(*common, stdin="hello world\r\n").out == expected
    assert run(*common, "--ids", ids).out == expected
    assert run(*common, "-p", "hello world", "--no-stream").out == expected
    assert run(*common, "-p", "hello world", "--slots", 2, "--prefill-chunk", 1).out == expected


def test_json_is_the_only_line_and_adds_up(run: Run, model: Path) -> None:
    arguments = ("generate", model, "-p", "hello", "-n", 6, "--json", "--logprobs", 2, "-t", 1)
    done = run(*arguments)
    assert done.out.count("\n") == 1
    report = json.loads(done.out)
    usage = report["usage"]
    assert usage["prompt_tokens"] == len(report["prompt_token_ids"])
    assert usage["completion_tokens"] == len(report["token_ids"]) == len(report["logprobs"]) == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert (report["finish_reason"], report["stop_reason"]) == ("length", None)
    assert [entry["token_id"] for entry in report["logprobs"]] == report["token_ids"]
    for entry in report["logprobs"]:
        assert len(entry["top"]) == 2
        assert entry["logprob"] <= entry["top"][0]["logprob"]
    assert report["options"]["temperature"] == 0.7
    assert f"seed {report['seed']} (drawn)" in done.err
    again = json.loads(run(*arguments, "--seed", report["seed"]).out)
    assert (again["text"], again["logprobs"]) == (report["text"], report["logprobs"])


def test_stop_strings(run: Run, model: Path) -> None:
    common = ("generate", model, "-p", "hello", "-n", 30, "--temp", 0, "--json", "-t", 1)
    whole = json.loads(run(*common).out)["text"]
    stop = whole[6:9]
    cut = json.loads(run(*common, "--stop", "never in the text", "--stop", stop).out)
    assert cut["text"] == whole[: whole.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert "stopped at " + repr(stop) in run(*common, "--stop", stop).err


def test_ids_need_no_tokenizer(run: Run, model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "tiktoken.model").unlink()
    done = run("generate", bare, "--ids", "3, 17 101", "-n", 5, "--temp", 0, "-t", 1)
    assert done.code == 0
    with LLM(bare) as llm:
        expected = llm.generate([3, 17, 101], SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].token_ids
    assert done.out == ",".join(map(str, expected)) + "\n"
    report = json.loads(run("generate", bare, "--ids", "3,17,101", "-n", 5, "--temp", 0, "--json", "-t", 1).out)
    assert (report["text"], report["token_ids"]) == (None, expected)
    refused = run("generate", bare, "-p", "hello")
    assert (refused.code, refused.out) == (2, "")
    assert "tiktoken.model" in refused.err


@pytest.mark.parametrize("chunk", [1, 128])
def test_dump_logits(run: Run, model: Path, tmp_path: Path, chunk: int) -> None:
    path = tmp_path / "logits.npy"
    path.write_text("old")
    common = ("-p", "hello world", "-n", 5, "--temp", 0, "--prefill-chunk", chunk, "-t", 1)
    done = run("generate", model, *common, "--dump-logits", path)
    assert done.code == 0
    rows: list[np.ndarray] = []
    with LLM(model) as llm:
        params = SamplingParams(temperature=0, max_tokens=5)
        n_prompt = len(llm.tokenizer.encode("hello world"))
        for _ in llm.stream("hello world", params, lambda _, logits: rows.append(logits.copy())):
            pass
    found = np.load(path)
    assert found.dtype == np.float32
    assert found.shape == (n_prompt + 4, VOCAB)
    assert np.array_equal(found, np.concatenate(rows))
    assert [entry.name for entry in tmp_path.iterdir()] == ["logits.npy"]
    assert f"logits of {n_prompt + 4} positions" in done.err


def test_logits_file_on_a_full_disk(tmp_path: Path) -> None:
    file = LogitsFile(tmp_path / "logits.npy", VOCAB, 1)
    file._file.close()
    file._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - `abandon` closes it
    with pytest.raises(UsageError, match="No space left on device"):
        file.write(0, np.zeros((1, VOCAB), np.float32))
    assert list(tmp_path.iterdir()) == []


def test_logits_file_is_refused_before_the_model_is_loaded(run: Run, model: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "x.npy", "/dev/null"):
        done = run("generate", model, "-p", "hello", "--dump-logits", path)
        assert done.code == 2
        assert f"error: --dump-logits {path}" in done.err
        assert "trunk" not in done.err
    with pytest.raises(UsageError, match="free space"):
        LogitsFile(tmp_path / "x.npy", 163_840, 10**9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "a", "-f", "b"], "expected one prompt"),
        (["-p", "a", "--ids", "1"], "expected one prompt"),
        (["-p", ""], "prompt is empty"),
        ([], "prompt is empty"),
        (["--ids", "1,x"], "'x'"),
        (["--ids", ","], "prompt is empty"),
        (["--ids", "999"], "999"),
        (["-f", "/no/such/file"], "No such file"),
        (["-f", ""], "-f: expected a file name"),
        (["-p", "a", "--dump-logits", ""], "--dump-logits: expected a file name"),
        (["-p", "a", "--dump-logits", "logits.npy/"], "--dump-logits: expected a file name"),
        (["-p", "a", "-n", "0"], "max_tokens"),
        (["-p", "a", "-n", "many"], "--max-tokens"),
        (["-p", "a", "--temp", "-1"], "temperature"),
        (["-p", "a", "--temp", "nan"], "temperature"),
        (["-p", "a", "--top-p", "0"], "top_p"),
        (["-p", "a", "--top-k", "-1"], "top_k"),
        (["-p", "a", "--min-p", "2"], "min_p"),
        (["-p", "a", "--seed", "-1"], "seed"),
        (["-p", "a", "--stop", ""], "stop"),
        (["-p", "a", "-c", "0"], "--ctx-size"),
        (["-p", "a", "-c", "999999"], "--ctx-size"),
        (["-p", "a", "-c", "20", "-n", "20"], "holds 20 tokens"),
        (["-p", "a", "-t", "0"], "--threads"),
        (["-p", "a", "--memory", "lots"], "--memory: expected a size such as 48GiB"),
        (["-p", "a", "--prefill-chunk", "0"], "--prefill-chunk"),
        (["-p", "a", "--logprobs", "1"], "Add --json"),
        (["-p", "a", "--json", "--logprobs", "101"], "logprobs"),
        (["-p", "a", "-v", "-q"], "contradict"),
        (["-p", "a", "--think"], "--think"),
        (["-p", "\udcff"], "-p: expected UTF-8 text, found byte 0xff at character 0"),
    ],
)
def test_refusals(run: Run, model: Path, arguments: list[str], words: str) -> None:
    done = run("generate", model, *arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "Traceback" not in done.err
    assert "trunk bf16" not in done.err  # refused before the model is loaded


def test_input_that_is_not_utf8(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    done = run("generate", model, "-f", tmp_path / "latin1.txt")
    assert done.code == 2
    assert "found byte 0xe9 at offset 3" in done.err
    assert "standard input: expected UTF-8" in run("generate", model, stdin=b"\xff").err


def test_default_limit_fits_the_context(run: Run, model: Path) -> None:
    done = run("generate", model, "-p", "hello", "-c", 20, "--temp", 0, "-t", 1)
    assert done.code == 0
    assert "stopped: the context is full (--ctx-size)" in done.err


def test_terminal_of_20_columns(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    common = ("generate", model, "-p", "hello", "-n", 5, "--seed", 1, "-t", 1)
    done = run(*common, terminal=True)
    assert "\x1b[2m" in done.err
    assert "\x1b" not in done.out
    monkeypatch.setenv("NO_COLOR", "1")
    plain = run(*common, terminal=True)
    assert plain.out == done.out
    assert "\x1b" not in plain.err
    assert "\r" not in plain.err
    assert max(len(line) for line in plain.err.splitlines()) <= 20
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in run(*common, terminal=True).err


def test_a_terminal_obeys_no_escape_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(0)
    screen.text("a\x1b[2Jb\r\x07c\n")
    screen.text_on_terminal = True
    screen.text("a\x1b[2Jb\r\x07c\td\n")
    assert capsys.readouterr().out == "a\x1b[2Jb\r\x07c\na\ufffd[2Jb\ufffd\ufffdc\td\n"


def test_a_failed_read_keeps_the_text(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = Model.forward, []

    def failing(*arguments: object) -> np.ndarray:
        calls.append(1)
        if len(calls) % 5 == 0:
            raise StorageError("shard 3: read failed")
        return forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "forward", failing)
    common = ("generate", model, "-p", "hello", "-n", 9, "--temp", 0, "-t", 1)
    done = run(*common)
    assert done.code == 2
    assert len(done.out) > 1
    assert done.err.endswith("error: shard 3: read failed\n")
    assert run(*common, "--no-stream").out == done.out
    report = json.loads(run(*common, "--json").out)
    assert report == {"error": "shard 3: read failed", "text": done.out[:-1], "finish_reason": "error"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_text_and_leaves_no_logits(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    show, calls = Screen.text, []

    def interrupting(screen: Screen, text: str) -> None:
        show(screen, text)
        calls.append(text)
        if len(calls) == 4:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Screen, "text", interrupting)
    done = run("generate", model, "-p", "hello", "-n", 999, "-t", 1, "--dump-logits", tmp_path / "x.npy")
    assert done.code == 130
    assert done.out == "".join(calls)
    assert done.out.endswith("\n")
    assert "interrupted" in done.err
    assert "x.npy was not written" in done.err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_a_process_of_its_own(model: Path) -> None:
    arguments = ["generate", str(model), "-p", "hello", "-n", "30000", "-t", "1"]
    command = [sys.executable, "-m", "streamer.cli.main", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + out).endswith(b"\n")
    assert b"interrupted" in err
    assert b"Traceback" not in err


def test_a_byte_order_mark_is_no_text(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfhello\n")
    common = ("generate", model, "-n", 3, "--temp", 0, "-t", 1, "--json")
    report = json.loads(run(*common, "-f", tmp_path / "prompt.txt").out)
    assert report["prompt"] == "hello"


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    gone, alive = tmp_path / ".x.npy.999999999.part", tmp_path / f".x.npy.{os.getppid()}.part"
    other = tmp_path / ".y.npy.999999999.part"
    for path in (gone, alive, other):
        path.touch()
    LogitsFile(tmp_path / "x.npy", VOCAB, 1).abandon()
    assert sorted(tmp_path.iterdir()) == sorted([alive, other])
