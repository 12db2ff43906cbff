"""What one run learns for the next: how popular each expert is, how fast the drives are. LMDB, one per checkpoint.

Everything here may be deleted at any time, and nothing here changes an output. So no trouble with it stops a run: what
is corrupt, of another program, read-only or on a full disk becomes one warning, and the run goes on without it.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from zlib import crc32

import lmdb
import numpy as np
from lmdb.verify import VerifyError, verify

from storage.errors import StorageError
from storage.probe import DriveProbe

FORMAT = 1  # of the records; another number is left alone

_MAP_BYTES = 64 << 20  # the records take about 2 MB at released size; address space, not memory
_FREE_BYTES = 16 << 20  # LMDB maps its lock file: on a full disk that is a bus error, not an error code
_HEADER, _POPULARITY, _PROBE = b"header", b"popularity", b"probe/"
_START_AFRESH = "delete it to start afresh"


class Catalog:
    """The records of one checkpoint. Several processes may share them; one thread of each at a time.

    Args:
        directory: of all catalogs, made where it is not there; this one is a directory below.
        fingerprint: of the checkpoint (`Checkpoint.fingerprint`).
        warn: called at most once, with a sentence, when the catalog cannot be used: from then on it is empty.
    """

    def __init__(self, directory: Path, fingerprint: str, warn: Callable[[str], None]) -> None:
        self.path = directory / fingerprint
        self._header = json.dumps({"format": FORMAT, "checkpoint": fingerprint}).encode()
        self._warn = warn
        self._env: lmdb.Environment | None = None
        with self._or_without():
            self._open()

    def popularity(self) -> dict[int, float]:
        """Return expert key → decayed count, as `add_popularity` left it."""
        with self._or_without():
            if self._env is not None:
                with self._env.begin() as txn:
                    return _unpack(txn.get(_POPULARITY))
        return {}

    def add_popularity(self, counts: Mapping[int, float], keep: float) -> None:
        """Multiply what is stored by `keep` (0 to 1) and add `counts` to it, in one step for all processes."""
        if not 0.0 <= keep <= 1.0:
            raise ValueError(f"keep is {keep}; expected a factor between 0 and 1")
        with self._or_without():
            if self._env is not None:
                with self._alone(), self._env.begin(write=True) as txn:
                    total = {key: keep * count for key, count in _unpack(txn.get(_POPULARITY)).items()}
                    for key, count in counts.items():
                        total[key] = total.get(key, 0.0) + count
                    txn.put(_POPULARITY, _pack(total))

    def probes(self) -> dict[str, DriveProbe]:
        """Return mount point → what was measured there last."""
        found: dict[str, DriveProbe] = {}
        with self._or_without():
            if self._env is not None:
                with self._env.begin() as txn, txn.cursor() as cursor:
                    records = cursor.iternext() if cursor.set_range(_PROBE) else ()
                    for key, value in records:
                        if key.startswith(_PROBE):
                            probe = _decode(value)
                            found[probe.name] = probe
        return found

    def put_probe(self, probe: DriveProbe) -> None:
        """Keep a measurement in place of the last one of the same drive."""
        with self._or_without():
            if self._env is not None:
                # LMDB's keys end at 511 bytes, paths do not
                key = _PROBE + f"{crc32(os.fsencode(probe.name)):08x}".encode()
                with self._alone(), self._env.begin(write=True) as txn:
                    txn.put(key, json.dumps(asdict(probe)).encode())

    def close(self) -> None:
        """Close the files. Idempotent; the catalog is empty afterwards."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _open(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path).free
        if free < _FREE_BYTES:
            raise StorageError(f"{free:,} bytes are free there, expected {_FREE_BYTES:,}; make room")
        with self._alone():
            data = self.path / "data.mdb"
            problems = verify(str(data)) if data.exists() else []
            if problems:
                raise StorageError(f"damaged ({problems[0]}); {_START_AFRESH}")
            self._env = lmdb.open(str(self.path), map_size=_MAP_BYTES, readahead=False)
            with self._env.begin(write=True) as txn:
                header = txn.get(_HEADER)
                if header is None and txn.stat()["entries"]:
                    raise StorageError(f"it was written by another program; {_START_AFRESH}")
                if header is None:
                    txn.put(_HEADER, self._header)
                elif header != self._header:
                    found = header.decode(errors="replace")
                    raise StorageError(f"expected {self._header.decode()}, found {found}; {_START_AFRESH}")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from writing, and from checking while this one writes. The kernel frees a dead lock."""
        fd = os.open(self.path / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _or_without(self) -> Iterator[None]:
        """Turn what goes wrong inside into the one warning, and the catalog into an empty one."""
        try:
            yield
        except (StorageError, VerifyError, lmdb.Error, OSError) as error:
            self.close()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._warn(f"{self.path}: what earlier runs learned is not used, nor what this one learns kept: {reason}.")


def _pack(counts: Mapping[int, float]) -> bytes:
    """Return a checksum, int64 keys [N], float64 counts [N]."""
    keys = np.fromiter(counts.keys(), "<i8", len(counts))
    values = np.fromiter(counts.values(), "<f8", len(counts))
    body = keys.tobytes() + values.tobytes()
    return crc32(body).to_bytes(4, "little") + body


def _unpack(record: bytes | None) -> dict[int, float]:
    if record is None:
        return {}
    body = record[4:]
    if len(body) % 16 or crc32(body) != int.from_bytes(record[:4], "little"):
        raise StorageError(f"the record of expert popularity is damaged; {_START_AFRESH}")
    half = len(body) // 2
    keys, values = np.frombuffer(body[:half], "<i8"), np.frombuffer(body[half:], "<f8")
    return dict(zip(keys.tolist(), values.tolist(), strict=True))


def _decode(record: bytes) -> DriveProbe:
    try:
        fields = json.loads(record)
        gb_s = {int(depth): float(rate) for depth, rate in fields.pop("gb_s").items()}
        return DriveProbe(gb_s=gb_s, notes=tuple(fields.pop("notes")), **fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(f"the record of a drive is damaged ({error}); {_START_AFRESH}") from error
