"""What pages refer to exists: files and headings, settings, commands, options, modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from orchestrator.__main__ import main
from orchestrator.settings import describe, load
from tests.conftest import PROJECT
from tests.docs.page import blocks

PAGES = sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")])

INSIDE_KERNELS = {"KERNELPOOL_JOURNAL", "KERNELPOOL_FONT_CACHE"}
OF_TESTS = {"KERNELPOOL_REQUIRE_DOCKER", "KERNELPOOL_TEST_ENGINE_DIR"}


def _name(page: Path) -> str:
    return str(page.relative_to(PROJECT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", _prose(page)):
        path = page.parent / target if target else page
        assert path.exists(), f"{_name(page)} links to {target}"
        if anchor:
            assert anchor in _anchors(path), f"{_name(page)} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_settings_and_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = {row.variable for row in describe(load({}))} | INSIDE_KERNELS | OF_TESTS
    for variable in re.findall(r"\bKERNELPOOL_[A-Z_]*[A-Z]\b(?!_?\*)", text):
        assert variable in known, f"{_name(page)} speaks of {variable}"
    for block in blocks(page):
        if block.language == "sh":
            for command in re.findall(
                r"kernelpool ((?:up|run|doctor|config|demo|image)\b.*)", block.text
            ):
                _refuse_unknown(command.split("|")[0].split(), f"{_name(page)}:{block.line}")


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_modules_and_scripts_exist(page: Path) -> None:
    paths = r"`((?:kernelpool|orchestrator|tests|scripts|images|benchmarks)/[\w./-]*)`"
    for path in re.findall(paths, page.read_text(encoding="utf-8")):
        assert (PROJECT / path).exists(), f"{_name(page)} speaks of {path}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_no_diagram_is_cut_by_a_semicolon(page: Path) -> None:
    for block in blocks(page):
        if block.language == "mermaid":
            assert ";" not in block.text, f"{_name(page)}:{block.line}: it ends a statement there"


def test_the_architecture_page_names_modules_that_exist() -> None:
    page = (PROJECT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (`[^|]*\.py`[^|]*) \|", page, re.MULTILINE):
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", row):
            found = [PROJECT / package / name for package in ("kernelpool", "orchestrator")]
            assert any(path.exists() for path in found), name


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def _anchors(page: Path) -> set[str]:
    text = _prose(page)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def _refuse_unknown(words: list[str], where: str) -> None:
    command: click.Command = main
    for word in _options_and_names(words):
        if isinstance(command, click.Group) and not word.startswith("-"):
            assert word in command.commands, f"{where}: kernelpool has no {word}"
            command = command.commands[word]
        elif word.startswith("--"):
            options = {name for each in command.params for name in each.opts}
            assert word in options, f"{where}: {command.name} has no {word}"


def _options_and_names(words: list[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("#"):
            return
        yield word
