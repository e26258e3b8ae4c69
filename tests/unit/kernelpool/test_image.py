"""The parts of an image build that need no engine: hashes, steps, which wheels for which Python."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kernelpool import environment, image, recipe
from kernelpool.image import Target

REQUIREMENTS = (recipe.IMAGES / "python" / "requirements.txt").read_text(encoding="utf-8")

BOOKWORM = Target(python="3.11.2", machine="x86_64", libc=("glibc", "2.36"))
TRIXIE = Target(python="3.13.5", machine="aarch64", libc=("glibc", "2.41"))

LOCKED = """\
appnope==1.0.0 ; sys_platform == 'darwin' \\
    --hash=sha256:aa
    # via ipython
numpy==2.4.6 ; python_full_version < '3.12' \\
    --hash=sha256:bb \\
    --hash=sha256:cc
    # via
    #   -r requirements.in
    #   pandas
numpy==2.5.5 ; python_full_version >= '3.12' \\
    --hash=sha256:dd
six==1.17.0 \\
    --hash=sha256:ee
"""


def test_each_base_has_a_hash_of_its_own() -> None:
    hashes = {image.inputs_hash(base) for base in ("python", "debian", "python:3.13-slim")}
    assert len(hashes) == 3
    assert image.inputs_hash("debian") == image.inputs_hash("debian")


def test_the_reference_of_an_image_is_the_start_of_its_inputs_hash() -> None:
    assert image.reference("debian") == f"kernelpool/python:{image.inputs_hash('debian')[:12]}"


def test_a_fingerprint_changes_with_a_name_with_a_byte_and_with_where_one_fact_ends(
    tmp_path: Path,
) -> None:
    one = tmp_path / "one"
    one.write_bytes(b"content")
    first = recipe.fingerprint([("one", one)], "ab", "c")
    assert recipe.fingerprint([("one", one)], "ab", "c") == first
    assert recipe.fingerprint([("two", one)], "ab", "c") != first
    assert recipe.fingerprint([("one", one)], "a", "bc") != first
    one.write_bytes(b"Content")
    assert recipe.fingerprint([("one", one)], "ab", "c") != first


def test_the_recipe_leaves_out_tests_and_caches_of_the_startup_package() -> None:
    names = [name for name, _ in (*recipe.package_files(), *recipe.startup_files())]
    assert names[0] == "Dockerfile"
    assert "startup/pyproject.toml" in names
    assert not [name for name in names if re.search(r"__pycache__|/tests/|\.pyc$", name)]
    assert len(names) == len(set(names))


def test_what_is_already_there_is_not_planned_again() -> None:
    assert image.plan("debian", have_base=True) == ("wheels", "image")
    assert image.plan("debian", have_base=False) == (
        "debootstrap",
        "security updates",
        "import",
        "wheels",
        "image",
    )
    assert image.plan("python", have_base=False) == ("pull", "wheels", "image")
    assert environment.plan(have_packages=True) == ("start-up code",)


def test_requirements_are_chosen_for_the_python_in_the_base_and_not_for_ours() -> None:
    assert image.requirements_for(BOOKWORM, LOCKED) == {
        "numpy": "numpy==2.4.6 --hash=sha256:bb --hash=sha256:cc",
        "six": "six==1.17.0 --hash=sha256:ee",
    }
    assert image.requirements_for(TRIXIE, LOCKED)["numpy"] == "numpy==2.5.5 --hash=sha256:dd"


@pytest.mark.parametrize("target", [BOOKWORM, TRIXIE], ids=["bookworm", "trixie"])
def test_every_locked_requirement_has_one_version_and_hashes(target: Target) -> None:
    chosen = image.requirements_for(target, REQUIREMENTS)
    assert {"ipykernel", "numpy", "pandas", "matplotlib", "setuptools"} <= chosen.keys()
    for pinned in chosen.values():
        assert re.fullmatch(r"[\w.-]+==[\w.]+( --hash=sha256:[0-9a-f]{64})+", pinned)


def test_the_locked_requirements_name_no_host() -> None:
    assert "://" not in REQUIREMENTS


def test_wheels_are_those_of_the_locked_versions_and_what_lacks_is_named(tmp_path: Path) -> None:
    chosen = image.requirements_for(BOOKWORM, LOCKED)
    for name in ("numpy-2.4.5-cp311-cp311-linux_x86_64.whl", "six-1.17.0-py2.py3-none-any.whl"):
        (tmp_path / name).touch()
    wheels, missing = image.locked_wheels(chosen, tmp_path)
    assert [path.name for path in wheels] == ["six-1.17.0-py2.py3-none-any.whl"]
    assert missing == {"numpy"}


def test_wheels_may_be_built_for_any_c_library_up_to_the_bases_own() -> None:
    options = BOOKWORM.pip_options
    assert "--python-version=3.11.2" in options
    assert "--abi=cp311" in options
    assert "--platform=manylinux_2_36_x86_64" in options
    assert "--platform=manylinux_2_17_x86_64" in options
    assert "--platform=manylinux_2_37_x86_64" not in options
    assert "--platform=manylinux_2_41_aarch64" in TRIXIE.pip_options


def test_the_environment_is_found_by_the_hash_of_its_inputs(tmp_path: Path) -> None:
    assert environment.find(tmp_path) is None
    environment.location(tmp_path).mkdir()
    assert environment.find(tmp_path) == tmp_path / f"python-{environment.inputs_hash()[:12]}"


def test_the_seccomp_profile_allows_no_door_into_the_host_kernel() -> None:
    profile = json.loads((recipe.IMAGES / "seccomp.json").read_text(encoding="utf-8"))
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    rules = profile["syscalls"]
    whole = {
        name
        for rule in rules
        if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("args")
        for name in rule["names"]
    }
    conditional = {name for rule in rules if rule.get("args") for name in rule["names"]}
    assert conditional == {"clone", "personality", "socket"}
    assert not whole & conditional
    assert not whole & {
        *("add_key", "keyctl", "request_key", "bpf", "perf_event_open", "userfaultfd"),
        *("io_uring_setup", "io_uring_enter", "io_uring_register", "ptrace", "process_vm_readv"),
        *("mount", "umount2", "pivot_root", "move_mount", "open_tree", "fsopen", "fsmount"),
        *("unshare", "setns", "clone3", "open_by_handle_at", "kexec_load", "init_module"),
    }
    assert len([name for rule in rules for name in rule["names"]]) == len(whole) + 4 + 2 + 2
