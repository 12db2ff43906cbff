"""Finds the shards of a checkpoint in one or several directories, and reads model.safetensors.index.json."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from storage.errors import StorageError

INDEX_NAME = "model.safetensors.index.json"
_PARTIAL_SUFFIXES = (".aria2", ".part", ".partial", ".incomplete", ".crdownload")


@dataclass(slots=True)
class ShardFiles:
    """Shard name → path (the first directory that has it wins), and what to say about the directories."""

    paths: dict[str, Path] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """model.safetensors.index.json: tensor → shard name; `total_bytes` is None where metadata lacks it."""

    path: Path
    weight_map: dict[str, str]
    total_bytes: int | None


def find_shards(directories: Sequence[Path]) -> ShardFiles:
    """List *.safetensors by name; a name in two directories with other sizes is noted in `differing`."""
    found = ShardFiles()
    for directory in directories:
        try:
            names = sorted(os.listdir(directory))  # noqa: PTH208 - names, also of dangling links, are wanted
        except OSError as error:
            raise StorageError(f"{directory} cannot be listed: {error.strerror}; expected a model directory") from error
        listed = set(names)
        for name in names:
            if not name.endswith(".safetensors"):
                continue
            path = directory / name
            first = found.paths.setdefault(name, path)
            found.unfinished += [name for suffix in _PARTIAL_SUFFIXES if name + suffix in listed and first == path]
            one, other = _size(first), _size(path)
            if one != other:
                found.differing.append(f"{name} has {one:,} bytes in {first.parent} (used), {other:,} in {directory}")
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a dangling link: it is reported when it is opened
        return 0


def read_index(directories: Sequence[Path]) -> WeightIndex | None:
    """Return the index of the first directory that has one, or None; raise StorageError where it is malformed."""
    path = next((path for directory in directories if os.path.lexists(path := directory / INDEX_NAME)), None)
    if path is None:
        return None
    cure = "fetch it again"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}; {cure}") from error
    if not data.strip():
        raise StorageError(f"{path} is empty; {cure}")
    if data.startswith(b"version https://git-lfs"):
        raise StorageError(f"{path} is a Git-LFS pointer, not the file itself; run: git lfs pull")
    if data.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        raise StorageError(f"{path} is an HTML page, not JSON: the download met a login or error page; {cure}")
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not valid JSON: {error}; {cure}") from error
    return _checked(path, value, cure)


def _checked(path: Path, value: object, cure: str) -> WeightIndex:
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(weight_map, dict) or not weight_map:
        raise StorageError(f"{path} has no weight_map object of tensor names to shard names; {cure}")
    shared: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", shard):
            raise StorageError(f"{path} maps {name!r} to {shard!r}; expected the name of a .safetensors file; {cure}")
        weight_map[name] = shared.setdefault(shard, shard)  # 96 strings instead of half a million
    metadata = value.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    return WeightIndex(path, weight_map, total if type(total) is int else None)
