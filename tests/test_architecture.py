"""The dependency rules between modules, read from their import statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]

HOMES: Final = {
    "docker": {"kernelpool.container", "kernelpool.image"},
    "zmq": set(),
    "jupyter_client": {"kernelpool.provisioner"},
    "redis": {"orchestrator.redis_link"},
    "obstore": {"orchestrator.artifacts"},
    "uvicorn": {"orchestrator.server"},
    "pydantic": {"orchestrator.schema", "orchestrator.request_body", "orchestrator.openapi"},
}
"""Third parties and the modules that may import them."""

VALUES: Final = {
    "kernelpool.errors", "kernelpool.events", "kernelpool.profile", "kernelpool.runtime",
    "kernelpool.terminal", "kernelpool.file_names",
}  # fmt: skip
"""Values and pure parts of kernelpool: anybody may import them."""

KERNEL_SIDE: Final = {
    "orchestrator.owner", "orchestrator.live_session", "orchestrator.session_files",
    "orchestrator.host", "orchestrator.embedded", "orchestrator.doctor",
    "orchestrator.image_build",
}  # fmt: skip
"""The modules of orchestrator that may use the rest of kernelpool."""

PURE: Final = {
    "kernelpool.events", "kernelpool.errors", "kernelpool.profile", "kernelpool.lifecycle",
    "kernelpool.plan", "kernelpool.execution", "kernelpool.wire", "kernelpool.zmtp",
    "kernelpool.terminal", "kernelpool.runtime", "kernelpool.file_names",
    "orchestrator.sessions", "orchestrator.executions", "orchestrator.errors",
    "orchestrator.bundles", "orchestrator.transcript", "orchestrator.dispatch",
}  # fmt: skip
"""Modules without I/O: they import each other and the standard library only."""


def _modules() -> Iterator[tuple[str, Path]]:
    for package in ("kernelpool", "orchestrator"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


IMPORTS: Final = {name: _imports(path) for name, path in _modules()}
OURS: Final = set(IMPORTS)


@pytest.mark.parametrize("third_party", HOMES)
def test_a_third_party_has_one_home(third_party: str) -> None:
    users = {
        name
        for name, imports in IMPORTS.items()
        if any(found.split(".")[0] == third_party for found in imports)
    }
    assert users <= HOMES[third_party]


def test_kernelpool_knows_nothing_of_the_orchestrator() -> None:
    for name, imports in IMPORTS.items():
        if name.startswith("kernelpool"):
            assert not [found for found in imports if found.startswith("orchestrator")], name


def test_kernelpool_knows_no_http_and_no_redis() -> None:
    for name, imports in IMPORTS.items():
        if name.startswith("kernelpool"):
            tops = {found.split(".")[0] for found in imports}
            assert not tops & {"fastapi", "starlette", "uvicorn", "redis", "httpx2"}, name


def test_only_the_side_of_kernels_uses_more_of_kernelpool_than_values() -> None:
    for name, imports in IMPORTS.items():
        if name.startswith("orchestrator") and name not in KERNEL_SIDE:
            used = {found for found in imports & OURS if found.startswith("kernelpool")}
            assert used <= VALUES, f"{name} imports {used - VALUES}"


def test_pure_modules_import_only_each_other() -> None:
    for name in PURE:
        assert (IMPORTS[name] & OURS) - {"kernelpool", "orchestrator"} <= PURE, name


def test_routes_reach_kernels_through_the_dispatcher_only() -> None:
    forbidden = {"orchestrator.owner", "orchestrator.live_session", "orchestrator.host"}
    for name, imports in IMPORTS.items():
        if name.startswith("orchestrator.routes"):
            assert not imports & forbidden, name


def test_only_the_commands_import_the_application() -> None:
    users = {name for name, imports in IMPORTS.items() if "orchestrator.app" in imports}
    assert users <= {"orchestrator.up", "orchestrator.demo"}


def test_there_is_no_import_cycle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for found in IMPORTS[name] & OURS - {"kernelpool", "orchestrator"}:
                visit(found, (*path, name))
            done.add(name)

    for name in IMPORTS:
        visit(name, ())
