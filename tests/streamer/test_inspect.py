"""`inspect` on the released header set and on every damaged checkpoint, in Python and through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamer.apps.inspect import inspect
from streamer.cli import main
from streamer.config import bundled
from streamer.config.errors import StreamerError
from tests.bad_checkpoints import BAD, shard
from tests.checkpoints import write_checkpoint, write_released_headers
from tests.streamer.test_tensors import TRUNK_BYTES

# k3-spec §2.1: file sizes by shard number.
KDA_SHARDS = {2: 16_990_911_504, 10: 16_990_911_504, 11: 16_990_916_912, 92: 16_567_507_176, 91: 16_990_916_912}
OTHER_SHARDS = {1: 2_341_216_112, 4: 16_567_501_776, 12: 16_567_507_176, 93: 16_567_507_176, 94: 4_697_664_072}
VISION_SHARDS = {95: 92_289_328, 96: 802_448_352}
ROOT = Path(__file__).resolve().parents[2]


def streamer(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamer.cli.main", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=60)


def test_released_checkpoint(tmp_path: Path) -> None:
    write_released_headers(tmp_path)
    for number, nbytes in {**KDA_SHARDS, **OTHER_SHARDS, **VISION_SHARDS}.items():
        assert shard(tmp_path, number, of=96).stat().st_size == nbytes, number
    report = inspect([tmp_path])
    assert report.problems == ()
    assert len(report.warnings) == 1
    assert "shards 1-96 of 96 occupy less than half" in report.warnings[0]  # they are holes
    assert (report.n_shards, report.n_tensors, report.tensor_bytes) == (96, 497_220, 1_560_860_324_864)
    assert (report.n_experts, report.expert_bytes) == (82_432, 17_547_264)
    assert report.trunk_parameters == 56_743_648_000
    found = {row.key: row.nbytes for row in report.components}
    assert found == {"experts": 1_446_456_066_048, **TRUNK_BYTES}
    assert report.layer_kinds[0] == "kda+dense"
    assert report.layer_kinds[92] == report.layer_kinds[3] == "mla+moe"
    assert report.layer_kinds.count("kda+moe") == 68
    sizes = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert sizes == 1_560_936_091_448


def test_small_checkpoint_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path)
    assert main.execute(["inspect", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert report["problems"] == []
    assert report["n_experts"] == 40
    assert report["config"]["hidden_size"] == 64
    assert report["layer_kinds"] == ["kda+dense", "kda+moe", "mla+moe", "kda+moe", "mla+moe", "mla+moe"]


@pytest.mark.parametrize("kind", BAD)
def test_damage_exits_2_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    damage, words = BAD[kind]
    write_checkpoint(tmp_path)
    damage(tmp_path)
    assert main.execute(["inspect", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert [word for word in words if word not in err] == []
    assert "Traceback" not in err
    assert main.execute(["inspect", str(tmp_path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["problems"]
    assert err == ""


def test_table_has_no_colour_when_piped_and_survives_narrow_terminals(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "[red]model")
    for columns in ("20", "80", "200"):
        done = streamer("inspect", str(tmp_path / "[red]model"), COLUMNS=columns)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout
        assert max(len(line) for line in done.stdout.splitlines()) <= int(columns)
    assert "[red]model" in done.stdout
    assert "routed experts" in done.stdout


def test_ascii_terminal_and_odd_path(tmp_path: Path) -> None:
    directory = Path(os.fsdecode(os.fsencode(tmp_path) + b"/mod\xe9le"))
    write_checkpoint(directory)
    done = streamer("inspect", os.fspath(directory), PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_further_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write_checkpoint(first)
    second.mkdir()
    shard(first, 2).rename(shard(second, 2))
    assert main.execute(["inspect", str(first)]) == 2
    assert main.execute(["inspect", str(first), "--model-dir", str(second)]) == 0
    assert main.execute(["inspect", "--model-dir", str(second)]) == 2
    assert "expected MODEL" in capsys.readouterr().err


def test_bundled_model_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "BUNDLED", tmp_path / "k3-nano")
    assert main.execute(["inspect"]) == 2
    assert "bundled model is not installed" in capsys.readouterr().err
    write_checkpoint(tmp_path / "k3-nano")
    assert main.execute(["inspect"]) == 0


def test_error_boundary(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: BaseException) -> None:
        def app(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(main, "app", app)

    raising(StreamerError("expected this, found that"))
    assert main.execute(["inspect"]) == 2
    assert capsys.readouterr().err == "error: expected this, found that\n"
    assert main.execute(["--debug", "inspect"]) == 2
    assert "Traceback" in capsys.readouterr().err
    assert main.execute(["inspect", "--debug"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    raising(KeyboardInterrupt())
    assert main.execute(["inspect"]) == 130


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.execute(["--version"]) == 0
    assert capsys.readouterr().out.startswith("moe-streamer ")
    assert main.execute(["inspect", "--nonsense"]) == 2
    assert main.execute(["nonsense"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nonsense" in err


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from streamer.cli.main import execute
for arguments in (["--help"], ["inspect", "--help"]):
    assert execute(arguments) == 0
heavy = {"torch", "numba", "numpy", "rich.console"} & set(sys.modules)
assert not heavy, heavy
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr


def test_reader_that_closes_the_pipe(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    command = f"{sys.executable} -m streamer.cli.main inspect '{tmp_path}' --json | head -c 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=env, check=False)
    assert (done.stdout, done.stderr) == ("{", "")
