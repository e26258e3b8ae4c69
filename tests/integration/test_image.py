"""The kernel image as kernels meet it: a foreign uid, a read-only root, no network."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import docker
import pytest

from kernelpool import image, recipe
from kernelpool.errors import EngineUnreachable, ImageBuildError

pytestmark = pytest.mark.docker

UNKNOWN_UID = 23456

MODULES = (
    "IPython", "PIL.Image", "altair", "bs4", "chardet", "docx", "ipykernel.kernelapp", "jinja2",
    "jsonschema", "kernelpool_startup", "lxml.etree", "matplotlib.pyplot", "nbformat", "networkx",
    "numpy", "openpyxl", "orjson", "pandas", "pip", "plotly.express", "polars", "pptx",
    "pyarrow.parquet", "pypdf", "regex", "reportlab.pdfgen.canvas", "requests", "rich",
    "scipy.stats", "seaborn", "sklearn.ensemble", "statsmodels.api", "sympy", "tabulate", "tqdm",
    "xlrd", "xlsxwriter", "yaml", "zmq",
)  # fmt: skip

Run = Callable[[str], tuple[str, str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run Python code in the image as kernels are run; returns stdout and stderr."""
    client = docker.from_env()
    profile = (recipe.IMAGES / "seccomp.json").read_text(encoding="utf-8")

    def run(code: str) -> tuple[str, str]:
        container = client.containers.create(
            os.environ["KERNELPOOL_IMAGE"],
            ["python", "-c", code],
            user=f"{UNKNOWN_UID}:{UNKNOWN_UID}",
            network_mode="none",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges", f"seccomp={json.dumps(json.loads(profile))}"],
            tmpfs={"/tmp": "mode=1777,size=64m"},
            environment={"HOME": "/tmp", "MPLCONFIGDIR": "/tmp/matplotlib", "MPLBACKEND": "agg"},
            pids_limit=256,
            init=True,
        )
        try:
            container.start()
            status = container.wait(timeout=100)["StatusCode"]
            stdout = container.logs(stdout=True, stderr=False).decode()
            stderr = container.logs(stdout=False, stderr=True).decode()
            assert status == 0, stderr
            return stdout, stderr
        finally:
            container.remove(force=True)

    yield run
    client.close()


def with_font_cache(code: str) -> str:
    """Do first what the kernel's start-up code does for matplotlib."""
    return (
        "import os, shutil\n"
        "shutil.copytree(os.environ['KERNELPOOL_FONT_CACHE'], os.environ['MPLCONFIGDIR'])\n" + code
    )


def test_every_package_imports_without_a_word_as_a_uid_that_nobody_knows(run: Run) -> None:
    lines = "\n".join(f"import {module}" for module in MODULES)
    assert run(with_font_cache(lines + "\nprint('all')")) == ("all\n", "")


def test_packages_can_be_listed_the_way_old_clients_do_without_a_warning(run: Run) -> None:
    stdout, stderr = run(
        "import warnings\nwarnings.simplefilter('default')\n"
        "import pkg_resources\nprint([d.project_name for d in pkg_resources.working_set])"
    )
    assert stderr == ""
    assert "'pandas'" in stdout
    assert "'numpy'" in stdout


@pytest.mark.parametrize(
    "style",
    [
        "",
        "import seaborn; seaborn.set_theme()",
        "p.style.use('ggplot')",
        "p.rcParams['font.sans-serif'] = ['SimHei']; p.rcParams['axes.unicode_minus'] = False",
        "p.rcParams['font.family'] = 'Microsoft YaHei'",
    ],
    ids=["plain", "seaborn", "style sheet", "SimHei", "Microsoft YaHei"],
)
def test_chinese_japanese_and_korean_labels_draw_without_a_warning(run: Run, style: str) -> None:
    stdout, stderr = run(
        with_font_cache(
            "import warnings, logging\nwarnings.simplefilter('error')\n"
            f"import matplotlib.pyplot as p\n{style}\n"
            "p.title('销量 標籤', weight='bold'); p.xlabel('売上'); p.ylabel('판매량')\n"
            "p.plot([-1, 1])\n"
            "for kind in ('png', 'svg', 'pdf'): p.savefig('/tmp/figure.' + kind)\n"
            "print(os.listdir(os.environ['MPLCONFIGDIR']))"
        )
    )
    assert stderr == ""
    assert stdout.count("fontlist") == 1


def test_pillow_and_reportlab_find_the_fonts_too(run: Run) -> None:
    stdout, stderr = run(
        "from PIL import ImageFont\n"
        "from reportlab.pdfbase.ttfonts import TTFont\n"
        "print(ImageFont.truetype('DejaVuSans.ttf').getname()[0])\n"
        "print(ImageFont.truetype('wqy-microhei.ttc').getname()[0])\n"
        "path = '/usr/share/fonts/truetype/kernelpool/wqy-microhei.ttc'\n"
        "print(TTFont('cjk', path).face.familyName)"
    )
    assert stderr == ""
    assert stdout.splitlines()[:2] == ["DejaVu Sans", "WenQuanYi Micro Hei"]


def test_no_file_in_the_image_raises_privileges(run: Run) -> None:
    stdout, _ = run(
        "import os, stat\n"
        "for folder, _, names in os.walk('/'):\n"
        "    if folder.startswith(('/proc', '/sys')): continue\n"
        "    for name in names:\n"
        "        path = os.path.join(folder, name)\n"
        "        mode = os.lstat(path).st_mode if os.path.lexists(path) else 0\n"
        "        if stat.S_ISREG(mode) and mode & 0o6000: print(path)"
    )
    assert stdout == ""


def test_threads_processes_and_shared_memory_work_under_the_seccomp_profile(run: Run) -> None:
    stdout, stderr = run(
        "import asyncio, socket, subprocess, threading, multiprocessing as mp\n"
        "from multiprocessing import shared_memory\n"
        "thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()\n"
        "print(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout, end='')\n"
        "with mp.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, -2]))\n"
        "memory = shared_memory.SharedMemory(create=True, size=100)\n"
        "memory.close(); memory.unlink()\n"
        "with socket.create_server(('127.0.0.1', 0)) as server:\n"
        "    socket.create_connection(server.getsockname()).close()\n"
        "import sklearn.linear_model, numpy\n"
        "sklearn.linear_model.LinearRegression().fit(numpy.eye(50), numpy.arange(50.0))\n"
        "print(asyncio.run(asyncio.sleep(0, 'done')))"
    )
    assert stderr == ""
    assert stdout.splitlines() == ["thread", "child", "[1, 2]", "done"]


def test_calls_into_the_host_kernel_are_refused_by_the_seccomp_profile(run: Run) -> None:
    stdout, _ = run(
        "import ctypes, errno, os, socket\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "calls = {'unshare': lambda: libc.unshare(0x10000000),\n"
        "  'mount': lambda: libc.mount(b'none', b'/tmp', b'tmpfs', 0, None),\n"
        "  'ptrace': lambda: libc.ptrace(0, 0, 0, 0),\n"
        "  'setns': lambda: libc.setns(0, 0)}\n"
        "for name, call in calls.items():\n"
        "    print(name, call(), errno.errorcode[ctypes.get_errno()])\n"
        "for family in (17, 38, 40):\n"
        "    try: socket.socket(family, socket.SOCK_SEQPACKET); print(family, 'open')\n"
        "    except PermissionError: print(family, 'refused')"
    )
    assert stdout.splitlines() == [
        "unshare -1 EPERM",
        "mount -1 EPERM",
        "ptrace -1 EPERM",
        "setns -1 EPERM",
        "17 refused",
        "38 refused",
        "40 refused",
    ]


def test_the_root_is_not_writable_and_python_is_the_kernels(run: Run) -> None:
    stdout, _ = run(
        "import os, sys\n"
        "print(sys.prefix, os.getuid(), os.environ['LANG'], 'PYTHONUNBUFFERED' in os.environ)\n"
        "print([p for p in ('/', '/opt', sys.prefix, '/usr', '/etc') if os.access(p, os.W_OK)])"
    )
    assert stdout.splitlines() == [f"/opt/kernelpool {UNKNOWN_UID} C.UTF-8 False", "[]"]


async def test_an_image_of_the_current_inputs_is_found_and_not_built_again() -> None:
    report = await image.build(base="debian", docker_host=os.environ.get("DOCKER_HOST"))
    assert not report.built
    assert report.reference == os.environ["KERNELPOOL_IMAGE"]
    assert report.base == "debian"
    assert report.inputs.startswith(report.reference.rpartition(":")[2])
    assert report.size_bytes > 10**8
    packages = {part.name: part.size_bytes for part in report.parts if part.kind == "package"}
    assert packages["numpy"] > 10**7
    layers = [part.size_bytes for part in report.parts if part.kind == "layer"]
    assert layers == sorted(layers, reverse=True)
    found = await image.find(docker_host=os.environ.get("DOCKER_HOST"))
    assert found is not None
    assert found.image_id == report.image_id


async def test_an_engine_that_does_not_answer_is_one_clear_error() -> None:
    with pytest.raises(EngineUnreachable, match=r"no Docker Engine answers .*No such file"):
        await image.build(base="debian", docker_host="unix:///nonexistent/docker.sock")


async def test_a_base_that_is_not_there_is_named_with_the_way_that_needs_no_registry() -> None:
    with pytest.raises(ImageBuildError, match="--from debian"):
        await image.build(base="registry.invalid/none:1")
