"""What pip was told is repeated to uv, and what uv was told itself is left alone."""

from __future__ import annotations

from kernelpool import package_index

MIRROR = "https://mirror.example/simple"


def test_pips_index_and_certificate_are_repeated_in_uvs_words() -> None:
    pip = package_index.parse([f"global.index-url='{MIRROR}'", "global.cert='/etc/ca.pem'"])
    added = package_index.translate(pip, {})
    assert added["UV_DEFAULT_INDEX"] == MIRROR
    assert added["SSL_CERT_FILE"] == "/etc/ca.pem"
    assert added["UV_PYTHON_DOWNLOADS"] == "never"


def test_the_environment_wins_over_a_commands_section_and_that_over_the_global_one() -> None:
    lines = [
        ":env:.index-url='three'",
        "global.index-url='one'",
        "install.index-url='two'",
    ]
    assert package_index.parse(lines[1:]) == {"index-url": "two"}
    assert package_index.parse(lines) == {"index-url": "three"}


def test_what_uv_was_told_itself_is_left_alone() -> None:
    pip = {"index-url": MIRROR, "cert": "/etc/ca.pem", "proxy": "http://proxy.example:3128"}
    environment = {
        "UV_INDEX_URL": "https://other.example/simple",
        "SSL_CERT_FILE": "/etc/other.pem",
        "https_proxy": "http://other.example:3128",
    }
    assert package_index.translate(pip, environment) == {"UV_PYTHON_DOWNLOADS": "never"}


def test_several_trusted_hosts_become_one_list() -> None:
    pip = package_index.parse(["global.trusted-host='a.example b.example:8080'"])
    assert package_index.translate(pip, {})["UV_INSECURE_HOST"] == "a.example b.example:8080"
