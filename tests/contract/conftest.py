"""What the contract suites share: a Python environment that kernels can run in without Docker."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

PROJECT: Final = Path(__file__).parents[2]


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture(scope="session")
def kernel_environment() -> Iterator[Path]:
    """An environment with ipykernel and our start-up code, made of the packages that run the tests.

    It lacks what the kernel image adds (pandas, matplotlib, ...), and needs no network.
    """
    directory = Path(tempfile.mkdtemp(prefix="kp-kernels-"))
    directory.chmod(0o755)
    environment = directory / "python"
    venv.create(environment, symlinks=True, with_pip=False)
    target = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    shutil.copytree(
        sysconfig.get_path("purelib"),
        target,
        copy_function=_link_or_copy,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("mypy*", "ruff*", "openai*", "*.pth", "__pycache__"),
    )
    startup = PROJECT / "images" / "python" / "startup" / "kernelpool_startup"
    shutil.copytree(startup, target / "kernelpool_startup")
    for path in (environment, *environment.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    yield environment
    shutil.rmtree(directory)
