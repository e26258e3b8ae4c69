from __future__ import annotations

from pathlib import Path

import pytest

from kernelpool.bubblewrap import Mount, environment_mounts, interpreter_links
from kernelpool.errors import ConfigurationError, ImageMissing


def make_python(prefix: Path) -> Path:
    python = prefix / "bin" / "python3.99"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n", encoding="ascii")
    python.chmod(0o755)
    return python


def make_environment(directory: Path, interpreter: Path, home: Path) -> Path:
    (directory / "bin").mkdir(parents=True)
    (directory / "bin" / "python").symlink_to(interpreter)
    (directory / "pyvenv.cfg").write_text(f"home = {home}\nversion = 3.99\n", encoding="ascii")
    return directory


def test_an_environment_brings_the_python_it_was_made_from(tmp_path: Path) -> None:
    python = make_python(tmp_path / "pythons" / "3.99.1")
    image = make_environment(tmp_path / "image", python, python.parent)

    mounts = environment_mounts(image)

    prefix = str(tmp_path / "pythons" / "3.99.1")
    assert mounts == [Mount("/usr", "/usr"), Mount(str(image), str(image)), Mount(prefix, prefix)]


def test_a_prefix_behind_a_link_is_seen_under_both_names(tmp_path: Path) -> None:
    python = make_python(tmp_path / "3.99.1")
    (tmp_path / "3.99").symlink_to("3.99.1")
    home = tmp_path / "3.99" / "bin"
    image = make_environment(tmp_path / "image", home / python.name, home)

    mounts = environment_mounts(image)

    real = str(tmp_path / "3.99.1")
    assert Mount(real, real) in mounts
    assert Mount(real, str(tmp_path / "3.99")) in mounts


def test_an_environment_made_from_within_another_needs_a_link_through_it(tmp_path: Path) -> None:
    python = make_python(tmp_path / "3.99")
    other = make_environment(tmp_path / "other", python, python.parent)
    image = make_environment(tmp_path / "image", other / "bin" / "python", python.parent)

    mounts = environment_mounts(image)

    assert not any(mount.destination == str(other) for mount in mounts)
    assert interpreter_links(image, mounts) == {str(other / "bin" / "python"): str(python)}


def test_a_system_python_brings_nothing_beside_usr(tmp_path: Path) -> None:
    image = make_environment(tmp_path / "image", Path("/usr/bin/env"), Path("/usr/bin"))

    assert environment_mounts(image) == [Mount("/usr", "/usr"), Mount(str(image), str(image))]


def test_a_python_that_lies_around_private_directories_is_refused(tmp_path: Path) -> None:
    python = make_python(tmp_path / "everything")
    image = make_environment(tmp_path / "image", python, python.parent)

    with pytest.raises(ConfigurationError, match="lies inside"):
        environment_mounts(image, private=(tmp_path / "everything" / "state",))


def test_a_python_installed_in_a_home_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_python(tmp_path / "home")
    image = make_environment(tmp_path / "image", python, python.parent)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    with pytest.raises(ConfigurationError, match="directory of its own"):
        environment_mounts(image)


def test_a_missing_environment_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ImageMissing, match="kernelpool image build"):
        environment_mounts(tmp_path)
