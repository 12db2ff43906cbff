"""A damaged checkpoint is found before any weight is read, and the text tells a person what to do."""

import shutil
from pathlib import Path

import pytest

from storage import describe
from storage.errors import CheckpointError
from storage.preflight import PreflightReport, preflight
from streamer.config.errors import ConfigError
from streamer.config.load import load_model_config
from streamer.config.tensors import VISION_PREFIXES, expert_tensors, trunk_tensors
from tests.bad_checkpoints import BAD, INDEX, edit_header, edit_json, shard
from tests.checkpoints import write_checkpoint


def check(*directories: Path) -> PreflightReport:
    config = load_model_config(directories)
    return preflight(directories, trunk_tensors(config), expert_tensors(config), VISION_PREFIXES)


@pytest.mark.parametrize("kind", BAD)
def test_damage_is_reported(tmp_path: Path, kind: str) -> None:
    damage, words = BAD[kind]
    write_checkpoint(tmp_path)
    damage(tmp_path)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        check(tmp_path).check()
    text = str(caught.value)
    assert [word for word in words if word not in text] == []
    assert text.count("\n") < 25
    assert len(text) < 2500


def test_good_checkpoint_is_silent(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    report = check(tmp_path)
    assert (report.problems, report.warnings) == ([], [])
    assert report.table.n_complete_experts == 5 * 8
    assert report.n_shards_expected == 7


def test_one_file_without_index_is_silent(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers_per_shard=6)
    globals_, layers = shard(tmp_path, 2, of=2), shard(tmp_path, 1, of=2)
    report = check(tmp_path)
    assert report.problems == []
    (tmp_path / INDEX).unlink()
    globals_.rename(tmp_path / "b.safetensors")
    layers.rename(tmp_path / "a.safetensors")
    report = check(tmp_path)
    assert report.problems == []
    assert "index.json is absent" in report.warnings[0]


def test_gap_in_the_numbering_is_found_without_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / INDEX).unlink()
    shard(tmp_path, 4).unlink()
    assert "shard 4 of 7 absent: layer 3" in check(tmp_path).problems[0]


def test_absent_shard_is_one_problem(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    shard(tmp_path, 4).unlink()
    assert len(check(tmp_path).problems) == 1


def test_shards_may_be_spread_over_directories(tmp_path: Path) -> None:
    first, second = tmp_path / "drive a", tmp_path / "drive b"
    write_checkpoint(first)
    second.mkdir()
    for number in (2, 5):
        shutil.move(shard(first, number), second)
    assert check(first, second).problems == []
    assert "shards 2, 5 of 7 absent" in check(first).problems[0]


def test_first_directory_wins_and_a_differing_copy_is_reported(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write_checkpoint(first)
    second.mkdir()
    shutil.copy(shard(first, 2), second)
    assert check(first, second).warnings == []
    with shard(second, 2).open("ab") as file:
        file.write(b"more")
    report = check(first, second)
    assert report.problems == []
    assert "differ in size" in report.warnings[0]
    assert report.table.shards[1].path == shard(first, 2)


def test_vision_may_be_absent_for_text(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, vision=True)
    assert check(tmp_path).problems == []
    for number in (8, 9):
        shard(tmp_path, number, of=9).unlink()
    report = check(tmp_path)
    assert report.problems == []
    assert "shards 8-9 of 9 absent" in report.warnings[0]
    assert "images" in report.warnings[0]


def test_vision_without_a_configuration_is_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, vision=True)
    edit_json(tmp_path / "config.json", lambda config: config.update(vision_config=None))
    report = check(tmp_path)
    assert report.problems == []
    assert "ignored" in report.warnings[0]


def test_wrong_total_is_a_warning(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    edit_json(tmp_path / INDEX, lambda index: index["metadata"].update(total_size=5))
    report = check(tmp_path)
    assert report.problems == []
    assert "says 5 bytes" in report.warnings[0]


def test_foreign_file_is_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "adapter.safetensors").write_bytes(b"anything")
    report = check(tmp_path)
    assert report.problems == []
    assert "adapter.safetensors" in report.warnings[0]


def test_expert_over_two_files_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w3.weight_scale"
    edit_header(shard(tmp_path, 2), lambda header: header.pop(name))
    entry = {"dtype": "U8", "shape": [32, 1], "data_offsets": [0, 32]}
    shard(tmp_path, 3).rename(tmp_path / "kept")
    shard(tmp_path, 3).write_bytes((tmp_path / "kept").read_bytes())

    def append(header: dict) -> None:
        end = max(value["data_offsets"][1] for value in header.values())
        header[name] = {**entry, "data_offsets": [end, end + 32]}

    edit_header(shard(tmp_path, 3), append)
    with shard(tmp_path, 3).open("ab") as file:
        file.write(bytes(32))
    (tmp_path / INDEX).unlink()
    assert any("split over several files (first: layer 1, expert 3)" in text for text in check(tmp_path).problems)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([5, 3, 4, 9, 9], "3-5, 9"),
        (range(0, 30, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 3 more"),
    ],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert describe.ranges(numbers) == text


def test_many_problems_are_counted() -> None:
    text = str(CheckpointError("here", [f"problem {number}" for number in range(40)]))
    assert "and 24 more" in text
    assert text.count("\n") <= 25
