"""SandboxProvisioner: jupyter_client's provisioner contract over a slot and a runtime.

Above: kernel.py, or any jupyter_client KernelManager whose kernel spec names it. Below: runtime.py,
slot.py. Entry point `kernelpool` of the group `jupyter_client.kernel_provisioners`.

The two sides know the same sockets by different paths: the connection file inside names the path in
the sandbox, the connection info returned to the caller names the host's.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGTERM
from typing import Any, Final, cast

from anyio import to_thread
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from traitlets import Instance

from kernelpool.channels import ConnectionInfo
from kernelpool.errors import KernelStartError
from kernelpool.journal import JOURNAL_NAME
from kernelpool.profile import Profile
from kernelpool.runtime import RUN_DIRECTORY, Launch, Process, Runtime
from kernelpool.slot import Slot

ENTRY_POINT: Final = "kernelpool"

CONNECTION_FILE: Final = "connection.json"

SOCKETS: Final = "k"
"""What the socket files' names begin with: short, because a path may have 107 bytes."""

ARGUMENTS: Final = ["python", "-P", "-m", "kernelpool_startup", "-f", "{connection_file}"]

THREADS: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_MAX_THREADS"), "1"
)
"""Numeric libraries start a thread per core of the host, whatever the sandbox may use."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a kernel is to live: everything the provisioner needs beside the kernel spec."""

    runtime: Runtime
    slot: Slot
    profile: Profile
    owner: str
    """Id of the worker."""


def kernel_spec(seat: Seat) -> KernelSpec:
    """A kernel spec whose kernels take that seat."""
    return KernelSpec(
        argv=list(ARGUMENTS),
        display_name="Python (kernelpool)",
        language="python",
        metadata={
            "kernel_provisioner": {"provisioner_name": ENTRY_POINT, "config": {"seat": seat}}
        },
    )


def make_provisioner(seat: Seat, kernel_id: str) -> SandboxProvisioner:
    """The provisioner that the kernel spec's stanza leads to."""
    made = KernelProvisionerFactory.instance().create_provisioner_instance(
        kernel_id, kernel_spec(seat), parent=None
    )
    assert isinstance(made, SandboxProvisioner)
    return made


class SandboxProvisioner(KernelProvisionerBase):
    """Starts, signals and removes the sandboxed process behind a kernel."""

    seat = Instance(Seat)
    process: Process | None = None

    @property
    def info(self) -> ConnectionInfo:
        """The host's side of the connection."""
        return ConnectionInfo(ip=str(self.connection_info["ip"]), key=_key(self.connection_info))

    @property
    def has_process(self) -> bool:
        """Whether a process was launched and not cleaned up."""
        return self.process is not None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Prepare the run directory. The caller's environment is not handed on: it holds our keys.

        Called by a KernelManager, or kernel.py, before `launch_kernel`.
        """
        slot = self.seat.slot
        await slot.fresh_run()
        inside = ConnectionInfo(ip=f"{RUN_DIRECTORY}/{SOCKETS}", key=secrets.token_hex(32))
        self.connection_info = _jupyter(replace(inside, ip=str(slot.run / SOCKETS)))
        text = json.dumps(inside.as_jupyter())
        await to_thread.run_sync(_write_private, slot.run / CONNECTION_FILE, text, slot.uid)
        arguments = [
            f"{RUN_DIRECTORY}/{CONNECTION_FILE}" if argument == "{connection_file}" else argument
            for argument in self.kernel_spec.argv
        ]
        environment = {
            "KERNELPOOL_JOURNAL": f"{RUN_DIRECTORY}/{JOURNAL_NAME}",
            **THREADS,
            **self.kernel_spec.env,
        }
        return {"cmd": arguments, "env": environment}

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the process.

        Raises:
            EngineError: it could not be started; nothing is left of it.
        """
        seat = self.seat
        self.process = await seat.runtime.launch(
            Launch(
                name=f"kernelpool-{seat.slot.id}-{secrets.token_hex(4)}",
                owner=seat.owner,
                slot_id=seat.slot.id,
                profile=seat.profile,
                argv=tuple(cmd),
                environment=kwargs["env"],
                uid=seat.slot.uid,
                data_directory=seat.slot.data,
                run_directory=seat.slot.run,
            )
        )
        return self.connection_info

    async def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.process is None:
            return 0
        exited = self.process.exit
        return None if exited is None else _code(exited.exit_code)

    async def wait(self) -> int | None:
        """Wait for the end of the process; its exit code."""
        if self.process is None:
            return None
        return _code((await self.process.wait()).exit_code)

    async def send_signal(self, signum: int) -> None:
        """Signal the kernel process itself."""
        if self.process is not None:
            await self.process.signal(signum)

    async def kill(self, restart: bool = False) -> None:
        """SIGKILL everything inside."""
        if self.process is not None:
            await self.process.kill()

    async def terminate(self, restart: bool = False) -> None:
        """Ask the process to end."""
        await self.send_signal(SIGTERM)

    async def cleanup(self, restart: bool = False) -> None:
        """Remove every trace of the process; the slot stays."""
        process, self.process = self.process, None
        if process is not None:
            await process.remove()

    async def get_provisioner_info(self) -> dict[str, Any]:
        """What a later worker needs to adopt the process."""
        info = await super().get_provisioner_info()
        info["connection_info"] = self.info.as_jupyter()
        info["process_id"] = self.process.id if self.process is not None else None
        return info

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Adopt the process that an earlier worker started.

        Raises:
            KernelStartError: it is not running any more.
        """
        await super().load_provisioner_info(provisioner_info)
        self.process = await self.seat.runtime.adopt(provisioner_info["process_id"])
        if self.process is None:
            raise KernelStartError("the kernel ended while no worker was there")


def _code(exit_code: int | None) -> int:
    return -1 if exit_code is None else exit_code


def _key(info: KernelConnectionInfo) -> str:
    key = info["key"]
    return key.decode() if isinstance(key, bytes) else str(key)


def _jupyter(info: ConnectionInfo) -> KernelConnectionInfo:
    return cast("KernelConnectionInfo", {**info.as_jupyter(), "key": info.key.encode()})


def _write_private(path: Path, text: str, uid: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        if os.geteuid() == 0:
            os.fchown(descriptor, uid, uid)
