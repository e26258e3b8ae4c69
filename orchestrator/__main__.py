"""The command line. Above: people. Below: a module for each command.

Heavy modules are imported where they are used, so that `--help` and errors come at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from orchestrator.settings import Settings, SettingsError, load, unknown

T = TypeVar("T")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kernelpool", prog_name="kernelpool")
def main() -> None:
    """A self-hosted code interpreter: live IPython kernels behind the API agents already speak."""


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535))
@click.option("--tls-cert", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--tls-key", type=click.Path(path_type=Path, dir_okay=False, exists=True))
def up(host: str, port: int, tls_cert: Path | None, tls_key: Path | None) -> None:
    """Run everything on this machine: API, worker, and Redis unless one is configured."""
    import uvloop

    from orchestrator.telemetry import configure_logging
    from orchestrator.up import serve

    settings = _settings()
    if (tls_cert is None) != (tls_key is None):
        _fail("--tls-cert and --tls-key go together.")
    configure_logging(settings.log_level)
    work = serve(settings, host, port, certificate=tls_cert, key=tls_key)
    _run(work, loop_factory=uvloop.new_event_loop)


@main.command()
@click.option("--output", default="demo-output", show_default=True, type=click.Path(path_type=Path))
def demo(output: Path) -> None:
    """Run a real conversation on a real data set, with everything embedded."""
    from orchestrator.demo import run_demo
    from orchestrator.telemetry import configure_logging

    configure_logging("warning")
    _run(run_demo(_settings(), output))


@main.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--output", type=click.Path(path_type=Path),
              help="Directory for the files that the code wrote; default FILE-output.")  # fmt: skip
@click.option("--upload", "uploads", multiple=True, help="File to put beside the code; repeatable.",
              type=click.Path(path_type=Path, dir_okay=False, exists=True))  # fmt: skip
@click.option(
    "--timeout", default=None, type=click.FloatRange(min=0.1), help="Seconds it may take."
)
def run(file: Path, output: Path | None, uploads: tuple[Path, ...], timeout: float | None) -> None:
    """Run FILE once in a sandbox, stream its output here, and bring its files back."""
    from orchestrator.run_file import run_file
    from orchestrator.telemetry import configure_logging

    configure_logging("warning")
    settings = _settings()
    if timeout is not None and timeout > settings.execution_timeout_cap:
        _fail(f"--timeout is at most {settings.execution_timeout_cap:g} seconds "
              "(KERNELPOOL_EXECUTION_TIMEOUT_CAP).")  # fmt: skip
    sys.exit(
        _run(
            run_file(
                settings,
                file,
                output=output or Path(f"{file.stem}-output"),
                uploads=uploads,
                timeout=timeout or settings.execution_timeout,
            )
        )
    )


@main.command()
def config() -> None:
    """Print every setting with its value, unit and source."""
    from orchestrator.tables import print_settings

    settings = _settings()
    print_settings(settings, unknown(os.environ))


@main.command()
def doctor() -> None:
    """Say what this machine has, which runtime and quota it gives, and the cure for what lacks."""
    from orchestrator.doctor import examine
    from orchestrator.tables import print_findings

    findings = _run(examine(_settings()))
    print_findings(findings)
    sys.exit(0 if all(finding.fine for finding in findings if finding.needed) else 1)


@main.group()
def image() -> None:
    """The kernel image, and the environment that stands in for it without Docker."""


@image.command()
@click.option("--from", "base", default="python", show_default=True,
              help="`python` (the official image), `debian` (made here, without an image "
                   "registry), or any image with Python 3.11 to 3.13.")  # fmt: skip
@click.option("--runtime", default="docker", show_default=True,
              type=click.Choice(["docker", "bubblewrap"]))  # fmt: skip
@click.option("--refresh", is_flag=True, help="Build anew even if nothing changed.")
def build(base: str, runtime: str, refresh: bool) -> None:
    """Build what kernels run in; a build of unchanged inputs is reused."""
    from orchestrator.image_build import build_for_bubblewrap, build_for_docker

    settings = _settings()
    if runtime == "docker":
        _run(build_for_docker(base, refresh=refresh))
    else:
        _run(build_for_bubblewrap(settings.state_dir / "environments"))


def _settings() -> Settings:
    try:
        return load(os.environ)
    except SettingsError as error:
        _fail(str(error))


def _run(
    work: Coroutine[Any, Any, T],
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """Run a command's coroutine to its end; known faults are one line each.

    SIGTERM cancels it as Ctrl-C does, so that what was started is stopped.
    """
    from kernelpool.errors import KernelPoolError
    from orchestrator.errors import ServiceError
    from orchestrator.server import ServerError

    async def cancellable() -> T:
        task = asyncio.ensure_future(work)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await task

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(cancellable())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    except (KernelPoolError, ServerError) as error:
        _fail(str(error))
    except ServiceError as error:
        _fail(error.message)


def _fail(message: str) -> NoReturn:
    for line in message.splitlines():
        click.echo(f"kernelpool: {line}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
