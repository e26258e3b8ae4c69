"""The page about errors names every one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kernelpool.events import FailureCode
from orchestrator import app, auth, errors, request_body
from orchestrator.errors import ServiceError
from orchestrator.routes import files

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "errors.md"

SOURCES = (app, auth, errors, request_body, files)


def classes(root: type[ServiceError] = ServiceError) -> Iterator[type[ServiceError]]:
    yield root
    for child in root.__subclasses__():
        yield from classes(child)


def test_every_status_and_code_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for kind in classes():
        assert f"| {kind.status} |" in page, kind
        assert kind.code is None or f"| {kind.status} | `{kind.code}` |" in page, kind
    for module in SOURCES:
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        for code in re.findall(r'code="([a-z_]+)"', source):
            assert f"`{code}`" in page, code


def test_every_failure_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for code in FailureCode:
        assert f"| `{code.value}` |" in page
