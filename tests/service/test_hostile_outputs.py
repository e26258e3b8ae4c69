"""Code that shows or writes more than can be kept, or tampers with what it showed before."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import anyio

from tests.service.conftest import Service, running


def showing(content: bytes) -> str:
    """Code that shows a picture of these bytes."""
    png = base64.b64encode(content).decode()
    return f"from IPython.display import display\ndisplay({{'image/png': '{png}'}}, raw=True)"


def reference(execution: dict[str, Any]) -> str:
    """The file id of the picture that an execution showed."""
    return str(execution["outputs"][0]["data"]["image/png"]["file_id"])


async def content(service: Service, container: str, file_id: str) -> bytes:
    """The bytes of a file."""
    reply = await service.http.get(f"{container}/files/{file_id}/content")
    assert reply.status_code == 200, reply.text
    return reply.content


async def test_a_picture_stays_what_it_was_after_the_kernel_was_replaced(
    service: Service, container: str
) -> None:
    first = reference(await service.run(container, showing(b"first")))
    await service.http.post(f"{container}/restart")
    second = reference(await service.run(container, showing(b"second")))
    assert first != second
    assert await content(service, container, first) == b"first"
    assert await content(service, container, second) == b"second"


async def test_code_cannot_change_what_it_showed(service: Service, container: str) -> None:
    shown = reference(await service.run(container, showing(b"shown")))
    await service.run(
        container,
        "import os\n"
        "for name in os.listdir('outputs'): open('outputs/' + name, 'w').write('changed')",
    )
    assert await content(service, container, shown) == b"shown"


async def test_bytes_of_removed_files_leave_the_artifact_store(
    service: Service, container: str
) -> None:
    session_id = container.rpartition("/")[2]
    kept = service.state / "artifacts" / "sessions" / session_id / "files"
    for number in range(3):
        await service.run(container, f"open('f{number}', 'w').write('x')")
    with anyio.fail_after(10):
        while len(list(kept.glob("*"))) < 3:  # noqa: ASYNC110
            await anyio.sleep(0.05)
    await service.run(container, "import os\nfor n in range(2): os.remove(f'f{n}')")
    listed = (await service.http.get(f"{container}/files")).json()["data"]
    with anyio.fail_after(10):
        while len(list(kept.glob("*"))) > 1:  # noqa: ASYNC110
            await anyio.sleep(0.05)
    assert [path.name for path in kept.glob("*")] == [file["id"] for file in listed]


async def test_endless_pictures_are_kept_up_to_a_bound_with_one_notice(
    service: Service, container: str
) -> None:
    code = (
        "from IPython.display import display\n"
        "import base64, time\n"
        "png = base64.b64encode(bytes(10_000_000)).decode()\n"
        "for _ in range(120):\n"
        "    display({'image/png': png, 'text/plain': 'p'}, raw=True)\n"
        "    time.sleep(0.15)"
    )
    execution = await service.run(container, code, timeout_seconds=120)
    assert execution["status"] == "completed", execution["failure"]
    shown = [output["data"] for output in execution["outputs"]]
    assert sum("image/png" in data for data in shown) == 2**30 // 10_000_000
    assert sum(data["text/plain"] == "p" for data in shown) == 120
    assert str(shown).count("other large outputs are left out") == 2
    session_id = container.rpartition("/")[2]
    outputs = service.state / "artifacts" / "sessions" / session_id / "outputs"
    assert sum(path.stat().st_size for path in outputs.glob("*")) <= 2**30


async def test_a_message_that_is_too_long_is_named_and_the_next_call_works(
    service: Service, container: str
) -> None:
    code = "from IPython.display import display\ndisplay({'text/html': 'h' * 70_000_000}, raw=True)"
    execution = await service.run(container, code)
    assert (execution["status"], execution["failure"]["code"]) == ("failed", "kernel_died")
    assert "a message of more than 67,108,864 bytes" in execution["failure"]["message"]
    after = await service.run(container, "print('heard')")
    assert (after["stdout"], after["state_reset"]) == ("heard\n", True)


async def test_code_that_empties_its_journal_is_still_stopped_by_a_later_server(
    state: Path, settings: dict[str, str]
) -> None:
    code = (
        "import os\n"
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        if 'journal' in os.readlink(f'/proc/self/fd/{fd}'): os.truncate(int(fd), 0)\n"
        "    except OSError: pass\n"
        "open('emptied', 'w').close()\n"
        "while True: pass"
    )
    async with running(state, **settings) as service:
        container = await service.container()
        execution = await service.run(container, code, background=True, timeout_seconds=15)
        with anyio.fail_after(10):
            while not list((state / "slots").glob("*/data/emptied")):  # noqa: ASYNC110
                await anyio.sleep(0.05)
        await service.kill()
    async with running(state, **settings) as service:
        with anyio.fail_after(40):
            record = await service.finished(container, execution["id"])
            assert (record["status"], record["failure"]["code"]) == ("timed_out", "timeout")
            assert (await service.run(container, "1 + 1"))["result"] == "2"


async def test_a_failing_artifact_store_is_named_without_its_whereabouts(
    state: Path, settings: dict[str, str]
) -> None:
    artifacts = state / "kept"
    async with running(state, artifacts_url=str(artifacts), **settings) as service:
        container = await service.container()
        session_id = container.rpartition("/")[2]
        (artifacts / "sessions" / session_id).mkdir(parents=True)
        (artifacts / "sessions" / session_id / "outputs").touch()
        execution = await service.run(container, showing(b"shown"))
        assert execution["status"] == "completed"
        assert "The artifact store did not take outputs/1-1.png." in str(execution["outputs"])
        assert str(state) not in str(execution)
        assert await content(service, container, reference(execution)) == b"shown"
