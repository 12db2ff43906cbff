"""Finds and reads config.json and generation_config.json; the only reader of the environment in the project.

Knows files, not keys: `streamer.config.parse` says what a Kimi K3 configuration must hold.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamer.config.errors import ConfigError
from streamer.config.model import ModelConfig
from streamer.config.parse import parse_model_config
from streamer.config.section import Problems, Section

# The model card's recommendation (k3-spec §1), used where generation_config.json is silent.
DEFAULT_TEMPERATURE = 1.0
DEFAULT_TOP_P = 0.95

KERNEL_CACHE_BYTES = 64 * 2**20  # free space below which kernels are cached elsewhere; they take a few MB
_NO_HOME = "no home directory is known; set XDG_CACHE_HOME to a writable directory"

MAX_TEMPERATURE = 100.0  # as `SamplingParams` has it: a default that a request would refuse is the file's error
MAX_TOP_K = 2**31 - 1

# Read once by each library when it is imported, so they must be set before a kernel is.
THREAD_VARIABLES = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults that come with a checkpoint; `top_k` 0 means no limit."""

    temperature: float
    top_p: float
    top_k: int
    eos_token_ids: tuple[int, ...]


def load_model_config(directories: Sequence[Path]) -> ModelConfig:
    """Return the model of the first directory that has a config.json; raise ConfigError otherwise."""
    check_directories(directories)
    path = find_file(directories, "config.json")
    if path is None:
        raise ConfigError(_no_config(directories))
    return parse_model_config(read_json_object(path), str(path))


def load_generation_defaults(directories: Sequence[Path], config: ModelConfig | None = None) -> GenerationDefaults:
    """Return generation_config.json over the model card's defaults; stop ids fall back to the model's eos.

    `config` is loaded from the same directories where it is not given. A malformed file is a ConfigError.
    """
    config = config or load_model_config(directories)
    path = find_file(directories, "generation_config.json")
    values = read_json_object(path) if path is not None else {}
    problems = Problems()
    section = Section(values, "", problems)
    defaults = GenerationDefaults(
        temperature=_temperature(section),
        top_p=section.positive("top_p") if section.has("top_p") else DEFAULT_TOP_P,
        top_k=section.integer("top_k", minimum=0, maximum=MAX_TOP_K) if section.has("top_k") else 0,
        eos_token_ids=_eos_token_ids(section, config),
    )
    if defaults.top_p > 1:
        section.wrong("top_p", "at most 1")
    if problems:
        lines = "\n".join(f"  - {line}" for line in problems.lines())
        raise ConfigError(f"{path} cannot be used (delete it to run with the model card's defaults):\n{lines}")
    return defaults


def _temperature(section: Section) -> float:
    if section.values.get("do_sample") is False:  # written out, it asks for the most likely token
        return 0.0
    value = section.number("temperature") if section.has("temperature") else DEFAULT_TEMPERATURE
    if not 0 <= value <= MAX_TEMPERATURE:
        section.wrong("temperature", f"a number from 0 to {MAX_TEMPERATURE:g}")
    return value


def _eos_token_ids(section: Section, config: ModelConfig) -> tuple[int, ...]:
    if not section.has("eos_token_id"):
        return (config.eos_token_id,)
    value = section.values["eos_token_id"]
    ids = value if isinstance(value, list) else [value]
    if not ids or any(type(item) is not int or not 0 <= item < config.vocab_size for item in ids):
        section.wrong("eos_token_id", f"one or more ids below vocab_size {config.vocab_size}")
        return (config.eos_token_id,)
    return tuple(dict.fromkeys(ids))


def check_directories(directories: Sequence[Path]) -> None:
    """Raise ConfigError where one of the model directories is not a readable directory."""
    if not directories:
        raise ConfigError("no model directory was given; expected the directory that holds config.json")
    for directory in directories:
        if directory.is_dir():
            continue
        if directory.exists():
            raise ConfigError(f"{directory} is a file; expected the directory that holds config.json and the shards")
        raise ConfigError(
            f"{directory}: no such directory; expected a directory with config.json and *.safetensors, as downloaded"
        )


def _no_config(directories: Sequence[Path]) -> str:
    places = ", ".join(str(directory) for directory in directories)
    if any(next(directory.glob("*.gguf"), None) for directory in directories):
        return f"{places} holds GGUF files and no config.json; this engine reads the original safetensors checkpoint"
    if any(next(directory.glob("*.safetensors"), None) for directory in directories):
        return f"{places}: config.json is missing beside the shards; fetch it from where the shards came from"
    return f"{places}: config.json is missing; expected a Kimi K3 checkpoint as downloaded"


def find_file(directories: Sequence[Path], name: str) -> Path | None:
    """Return `name` in the first directory that has it (a dangling link counts: it is reported when read)."""
    return next((path for directory in directories if os.path.lexists(path := directory / name)), None)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a small file; raise ConfigError with what the file is instead."""
    try:
        data = path.read_bytes()
    except OSError as error:
        target = f" (a link to {path.readlink()})" if path.is_symlink() else ""
        raise ConfigError(f"{path}{target} cannot be read: {error.strerror}") from error
    if not data.strip():
        raise ConfigError(f"{path} is empty; fetch it again")
    if data.startswith(b"version https://git-lfs"):
        raise ConfigError(f"{path} is a Git-LFS pointer, not the file itself; run: git lfs pull")
    if data.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        raise ConfigError(f"{path} is an HTML page, not JSON; the download went through a login or error page")
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); fetch it again") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}; is the download complete?") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return values


def set_thread_variables(n_threads: int) -> bool:
    """Limit every thread pool of this process to `n_threads`; False where numba was imported before and kept its own.

    Raises ValueError for fewer than one.
    """
    if n_threads < 1:
        raise ValueError(f"n_threads is {n_threads}; expected at least 1")
    for name in THREAD_VARIABLES:
        os.environ[name] = str(n_threads)
    return "numba" not in sys.modules


def requested_threads() -> int | None:
    """Return the thread count that OMP_NUM_THREADS asks for, if it is a number."""
    value = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(value) if value.isascii() and value.isdigit() and int(value) > 0 else None


def cache_directory() -> Path:
    """Return where derived files go: $XDG_CACHE_HOME/moe-streamer, else ~/.cache/moe-streamer. Not created."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():  # the XDG specification says to ignore relative paths
        return Path(base) / "moe-streamer"
    if os.environ.get("HOME") == "":  # unset, that is: an empty path would mean the current directory
        raise ConfigError(_NO_HOME)
    try:
        return Path.home() / ".cache" / "moe-streamer"
    except RuntimeError as error:
        raise ConfigError(_NO_HOME) from error


def prepare_kernels() -> None:
    """Set what numba and OpenMP read once, before the first kernel is imported. What the user has set stands.

    Threads that wait spin for a few microseconds, then sleep (bench/LEDGER.md 6). Without the first, each kernel waits
    57 µs for its threads to wake; without the second, they take the cores from reads, from each other and from every
    other program. Compiled kernels go to the user's cache directory.
    """
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")
    if not os.environ.get("NUMBA_CACHE_DIR"):
        os.environ["NUMBA_CACHE_DIR"] = str(_kernel_cache())


def _kernel_cache() -> Path:
    """A writable directory for compiled kernels.

    The directory is named by a hash of all kernel sources: numba itself looks only at the file a kernel stands in, so
    a change of a function that it inlines would go unnoticed. An installation is often read-only, too. Where no cache
    directory can be written, or its drive is full, a temporary one is used.
    """
    sources = sorted(Path(__file__).parents[2].joinpath("kernels").glob("*.py"))
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    try:
        directory = cache_directory() / "kernels" / key
        if _usable(directory):
            return directory
    except ConfigError:
        pass
    try:
        temporary = Path(tempfile.gettempdir()) / f"moe-streamer-{os.getuid()}"
        if _usable(temporary / key) and temporary.stat().st_uid == os.getuid():  # what lies there is executed
            return temporary / key
        return Path(tempfile.mkdtemp(prefix="moe-streamer-"))
    except OSError as error:
        raise SystemExit(
            f"error: compiled kernels need {KERNEL_CACHE_BYTES // 2**20} MiB on a drive that can be written; found none"
            f" ({error.strerror}). Set XDG_CACHE_HOME or TMPDIR to such a directory."
        ) from error


def _usable(directory: Path) -> bool:
    """Whether compiled kernels lie in a directory, or could be written into it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            return False
        return _holds_kernels(directory) or shutil.disk_usage(directory).free >= KERNEL_CACHE_BYTES
    except OSError:
        return False


def _holds_kernels(directory: Path) -> bool:
    return next(directory.rglob("*.nbi"), None) is not None


def kernels_are_cached() -> bool:
    """Whether kernels were compiled before, so that a start takes a second and not a minute."""
    return _holds_kernels(Path(os.environ.get("NUMBA_CACHE_DIR") or "."))


def no_color() -> bool:
    """Whether colour is unwanted: NO_COLOR is set to anything, or the terminal is dumb."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
