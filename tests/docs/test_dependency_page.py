"""The page of dependencies names what pyproject.toml names, with the same versions."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable

from packaging.requirements import Requirement

from tests.conftest import PROJECT


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    named = [
        *project["project"]["dependencies"],
        *(line for group in project["dependency-groups"].values() for line in group),
        *project["build-system"]["requires"],
    ]
    page = (PROJECT / "docs" / "decisions" / "dependencies.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z][^ ]*) \| ([>=][^ ]*) \| .+ \|$", page, re.MULTILINE)
    assert _versions(name + version for name, version in rows) == _versions(named)


def _versions(lines: Iterable[str]) -> dict[str, str]:
    found = {}
    for line in lines:
        requirement = Requirement(line)
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        found[requirement.name + extras] = str(requirement.specifier)
    return found
