"""The house rules that a machine can check: sizes, imports, start-up, the wheel."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("streamer", "cache_policy", "kernels", "storage")
SOURCES = sorted(path for folder in (*PACKAGES, "tests", "bench") for path in (ROOT / folder).rglob("*.py"))
OWN = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES]
ENVIRONMENT_READER = ROOT / "streamer" / "config" / "load.py"


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_file_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= 60, f"{node.name} is over 60 lines"


@pytest.mark.parametrize("path", OWN, ids=_id)
def test_environment_is_read_in_one_place(path: Path) -> None:
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert path == ENVIRONMENT_READER or not names & {"environ", "getenv", "putenv"}


@pytest.mark.parametrize("path", OWN, ids=_id)
def test_only_the_command_line_prints(path: Path) -> None:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    prints = [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
    assert "cli" in path.parts or not prints


@pytest.mark.parametrize("path", OWN, ids=_id)
def test_no_error_is_swallowed(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            name = getattr(node.type, "id", None)
            silent = all(isinstance(statement, ast.Pass) for statement in node.body)
            assert node.type is not None, f"line {node.lineno}: a bare except"
            assert not (silent and name in ("Exception", "BaseException")), f"line {node.lineno} swallows every error"


@pytest.mark.parametrize("path", OWN, ids=_id)
def test_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import streamer", {"torch", "numba", "numpy"}),
        ("import cache_policy.plan", {"torch", "numba", "numpy"}),
        ("import streamer.cli.main", {"torch", "numba", "numpy"}),
        ("import streamer.llm", {"torch"}),
    ],
)
def test_import_is_light(statement: str, absent: set[str]) -> None:
    code = f"import sys; {statement}; print(*sorted({absent!r} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == []


def test_a_foreign_neighbour_is_named(tmp_path: Path) -> None:
    """`kernels` of another distribution under our import name: a sentence, not a missing attribute somewhere."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import streamer"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert found.returncode != 0
    assert f"Python found {tmp_path}" in found.stderr
    assert "environment of its own" in found.stderr


def test_version_is_one() -> None:
    import streamer

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == streamer.__version__
    # a library that probes for the other `kernels` package misreads 0.18
    assert not streamer.__version__.startswith("0.18.")


@pytest.mark.slow
def test_wheel_holds_exactly_the_four_packages(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    packed = {name for name in names if ".dist-info" not in name}
    here = {_id(path) for folder in PACKAGES for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert packed == {name for name in here if "__pycache__" not in name}
