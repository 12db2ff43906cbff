import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import catalog as catalog_module
from storage.catalog import FORMAT, Catalog, _pack, _unpack
from storage.errors import StorageError
from storage.probe import DriveProbe

PROBE = DriveProbe("/data", 17_551_360, {1: 1.5, 16: 2.25}, 16, 1.7e9, ("shard 2 has holes",))
POPULAR = {896 * 92 + 895: 0.125, 3: 2.0}


def unexpected(sentence):
    raise AssertionError(sentence)


def open_and_fill(directory, warn=unexpected):
    catalog = Catalog(directory, "abc", warn)
    catalog.add_popularity(POPULAR, keep=0.5)
    catalog.put_probe(PROBE)
    return catalog


def test_what_was_kept_is_there_in_the_next_run(tmp_path):
    open_and_fill(tmp_path / "made" / "here").close()
    catalog = Catalog(tmp_path / "made" / "here", "abc", unexpected)
    assert catalog.popularity() == POPULAR
    assert catalog.probes() == {"/data": PROBE}
    other = Catalog(tmp_path / "made" / "here", "def", unexpected)
    assert (other.popularity(), other.probes()) == ({}, {})
    catalog.close()
    catalog.close()
    other.close()
    assert (catalog.popularity(), catalog.probes()) == ({}, {})


def test_popularity_decays_and_adds(tmp_path):
    catalog = open_and_fill(tmp_path)
    catalog.add_popularity({3: 1.0, 4: 8.0}, keep=0.25)
    assert catalog.popularity() == {896 * 92 + 895: 0.03125, 3: 1.5, 4: 8.0}
    with pytest.raises(ValueError, match=r"keep is 1\.5"):
        catalog.add_popularity({}, keep=1.5)
    catalog.close()


def test_the_last_probe_of_each_drive_counts(tmp_path):
    catalog = open_and_fill(tmp_path)
    faster = DriveProbe("/data", 17_551_360, {1: 7.0}, 1, 1.8e9)
    long = DriveProbe("/" + "d" * 600, 4096, {}, 8, 1.8e9)
    for probe in (faster, long):
        catalog.put_probe(probe)
    assert catalog.probes() == {"/data": faster, long.name: long}
    catalog.close()


@given(st.dictionaries(st.integers(0, 2**40), st.floats(0, 1e30), max_size=20), st.randoms())
def test_popularity_survives_packing_and_a_changed_byte_does_not(counts, rng):
    packed = bytearray(_pack(counts))
    assert _unpack(bytes(packed)) == counts
    packed[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
    with pytest.raises(StorageError, match="popularity is damaged"):
        _unpack(bytes(packed))


def add_many(directory, key, count):
    catalog = Catalog(directory, "abc", unexpected)
    for _ in range(count):
        catalog.add_popularity({key: 1.0, 0: 1.0}, keep=1.0)
    catalog.close()


def test_processes_share_it_and_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=add_many, args=(tmp_path, key, 20)) for key in (1, 2)]
    for process in processes:
        process.start()
    add_many(tmp_path, 3, 20)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    catalog = Catalog(tmp_path, "abc", unexpected)
    assert catalog.popularity() == {0: 60.0, 1: 20.0, 2: 20.0, 3: 20.0}
    catalog.close()


def use(directory):
    """Do everything with a catalog; return what it warned of. It must have held nothing."""
    warnings = []
    catalog = open_and_fill(directory, warnings.append)
    assert (catalog.popularity(), catalog.probes()) == ({}, {})
    catalog.close()
    return warnings


def data_file(directory):
    return directory / "abc" / "data.mdb"


def test_a_damaged_file_is_one_warning(tmp_path):
    for name, damage in {
        "noise": lambda data: random.Random(0).randbytes(len(data)),
        "short": lambda data: data[: len(data) - 4096],
        "empty header": lambda data: bytes(8192) + data[8192:],
        "text": lambda data: b"<!doctype html>",
    }.items():
        open_and_fill(tmp_path / name).close()
        path = data_file(tmp_path / name)
        path.write_bytes(damage(path.read_bytes()))
        (warning,) = use(tmp_path / name)
        assert warning.startswith(f"{tmp_path / name / 'abc'}: what earlier runs learned is not used")


FUZZ = """
    import random, sys
    from pathlib import Path
    from storage.catalog import Catalog
    from tests.storage.test_catalog import POPULAR, open_and_fill, data_file
    directory, rng = Path(sys.argv[1]), random.Random(1)
    open_and_fill(directory).close()
    good = data_file(directory).read_bytes()
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(rng.choice([1, 1, 8])):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        data_file(directory).write_bytes(bad)
        warnings = []
        catalog = Catalog(directory, "abc", warnings.append)
        counts, probes = catalog.popularity(), catalog.probes()
        catalog.close()
        assert len(warnings) <= 1
        assert warnings or counts in (POPULAR, {})
    print("survived")
"""


def test_flipped_bytes_never_kill_the_process(tmp_path):
    code = textwrap.dedent(FUZZ)
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, cwd=root
    )
    assert found.stdout == "survived\n", found.stderr


def test_a_foreign_or_newer_environment_is_left_alone(tmp_path):
    (tmp_path / "abc").mkdir()
    with lmdb.open(str(tmp_path / "abc")) as env, env.begin(write=True) as txn:
        txn.put(b"theirs", b"1")
    (warning,) = use(tmp_path)
    assert "written by another program; delete it to start afresh" in warning
    with lmdb.open(str(tmp_path / "abc")) as env, env.begin(write=True) as txn:
        assert [key for key, _ in txn.cursor()] == [b"theirs"]
        txn.put(b"header", json.dumps({"format": FORMAT + 1, "checkpoint": "abc"}).encode())
    (warning,) = use(tmp_path)
    assert f'expected {{"format": {FORMAT}' in warning
    assert f'found {{"format": {FORMAT + 1}' in warning


@pytest.mark.parametrize("record", [b"x", b"{}", b"[]", b'{"gb_s": {"a": 1}, "notes": []}'])
def test_a_damaged_record_is_one_warning(tmp_path, record):
    open_and_fill(tmp_path).close()
    with lmdb.open(str(tmp_path / "abc")) as env, env.begin(write=True) as txn:
        txn.put(b"probe/0", record)
        txn.put(b"popularity", record)
    for read in (Catalog.popularity, Catalog.probes):
        warnings = []
        catalog = Catalog(tmp_path, "abc", warnings.append)
        assert read(catalog) == {}
        assert len(warnings) == 1
        assert "is damaged" in warnings[0]
        catalog.close()


def test_no_permission_and_a_file_in_the_way_are_one_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (warning,) = use(tmp_path / "file")
    assert "Not a directory" in warning

    def refuse(*_, **__):
        raise lmdb.ReadonlyError(f"{tmp_path}: Read-only file system")

    monkeypatch.setattr(catalog_module.lmdb, "open", refuse)
    (warning,) = use(tmp_path)
    assert "Read-only file system" in warning


def test_a_disk_that_is_full_or_fills_up_is_one_warning(tmp_path, monkeypatch):
    warnings = []
    catalog = open_and_fill(tmp_path, warnings.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (data_file(tmp_path).stat().st_size, limits[1]))
    try:
        catalog.add_popularity(dict.fromkeys(range(10000), 1.0), keep=1.0)
        catalog.add_popularity({1: 1.0}, keep=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(warnings) == 1
    assert "File too large" in warnings[0]
    assert catalog.popularity() == {}
    catalog = Catalog(tmp_path, "abc", unexpected)
    assert catalog.popularity() == POPULAR  # the write that failed left nothing behind
    catalog.close()
    usage = os.statvfs(tmp_path)
    monkeypatch.setattr(catalog_module, "_FREE_BYTES", 2 * usage.f_blocks * usage.f_frsize)
    (warning,) = use(tmp_path)
    assert "make room" in warning
