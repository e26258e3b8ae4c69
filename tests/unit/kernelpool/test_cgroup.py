from __future__ import annotations

from pathlib import Path

from kernelpool.cgroup import UNIFIED, Cgroup, CgroupTree, Hierarchies, Mount
from kernelpool.profile import Limits

V1 = """\
31 24 0:26 / /sys/fs/cgroup ro shared:9 - tmpfs tmpfs ro,mode=755
32 31 0:27 / /sys/fs/cgroup/unified rw shared:10 - cgroup2 cgroup2 rw
33 31 0:28 / /sys/fs/cgroup/memory rw shared:11 - cgroup cgroup rw,memory
34 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:30 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
36 31 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
"""
V2 = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
INSIDE = "900 800 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"


def test_a_hybrid_host_counts_as_version_1() -> None:
    hierarchies = Hierarchies.parse(V1)

    assert hierarchies is not None
    assert hierarchies.version == 1
    assert {name: str(mount.point) for name, mount in hierarchies.mounts.items()} == {
        "memory": "/sys/fs/cgroup/memory",
        "cpu": "/sys/fs/cgroup/cpu,cpuacct",
        "cpuacct": "/sys/fs/cgroup/cpu,cpuacct",
        "pids": "/sys/fs/cgroup/pids",
    }


def test_groups_of_a_process_are_found_in_each_hierarchy() -> None:
    v1, v2 = Hierarchies.parse(V1), Hierarchies.parse(V2)
    assert v1 is not None
    assert v2 is not None

    one = v1.groups("4:memory:/docker/x\n3:cpu,cpuacct:/docker/y\n0::/\n")
    two = v2.groups("0::/system.slice/docker-x.scope\n")
    assert one["memory"] == Path("/sys/fs/cgroup/memory/docker/x")
    assert one["cpuacct"] == one["cpu"] == Path("/sys/fs/cgroup/cpu,cpuacct/docker/y")
    assert two == {UNIFIED: Path("/sys/fs/cgroup/system.slice/docker-x.scope")}


def test_a_hierarchy_mounted_from_a_group_shows_only_what_is_below_it() -> None:
    hierarchies = Hierarchies.parse(INSIDE)
    assert hierarchies is not None

    below = hierarchies.groups("4:memory:/docker/abc/kernelpool/o/n")
    assert below["memory"] == Path("/sys/fs/cgroup/memory/kernelpool/o/n")
    assert hierarchies.groups("4:memory:/docker/abc") == {"memory": Path("/sys/fs/cgroup/memory")}
    assert hierarchies.groups("4:memory:/docker/abcd") == {}


def test_a_host_without_control_groups_has_no_hierarchies() -> None:
    assert Hierarchies.parse("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n") is None


def test_version_2_is_read_whole(tmp_path: Path) -> None:
    for name, text in {
        "memory.current": "3000\n",
        "memory.peak": "5000\n",
        "memory.stat": "anon 100\ninactive_file 1000\n",
        "memory.events": "low 0\nmax 7\noom 2\noom_kill 1\n",
        "pids.current": "4\n",
        "pids.events": "max 3\n",
        "cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="ascii")

    sample = Cgroup(2, {UNIFIED: tmp_path}).sample()

    assert sample.cpu_seconds == 2.5
    assert sample.memory_bytes == 2000
    assert sample.memory_peak_bytes == 5000
    assert (sample.processes, sample.process_limit_hits, sample.out_of_memory_kills) == (4, 3, 1)


def test_a_group_that_is_gone_reads_as_unknown() -> None:
    sample = Cgroup(1, {"memory": Path("/nowhere"), "pids": Path("/nowhere")}).sample()

    assert sample.cpu_seconds is None
    assert sample.memory_bytes is None
    assert sample.out_of_memory_kills is None


def test_version_2_limits_leave_no_swap(tmp_path: Path) -> None:
    for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max"):
        (tmp_path / name).touch()

    Cgroup(2, {UNIFIED: tmp_path}).limit(
        Limits(memory_bytes=1000, processes=9, cpus=1.5), extra_processes=2
    )

    assert (tmp_path / "memory.max").read_text(encoding="ascii") == "1000"
    assert (tmp_path / "memory.swap.max").read_text(encoding="ascii") == "0"
    assert (tmp_path / "pids.max").read_text(encoding="ascii") == "11"
    assert (tmp_path / "cpu.max").read_text(encoding="ascii") == "150000 100000"


def test_groups_of_version_2_get_their_controllers_handed_down(tmp_path: Path) -> None:
    base = tmp_path / "kernelpool"
    for directory in (tmp_path, base, base / "worker"):
        directory.mkdir(exist_ok=True)
        (directory / "cgroup.controllers").write_text("cpu io memory pids\n", encoding="ascii")
        (directory / "cgroup.subtree_control").touch()

    group = CgroupTree(2, {UNIFIED: base}).create("worker", "one")

    assert group.paths[UNIFIED].is_dir()
    for directory in (tmp_path, base, base / "worker"):
        handed = (directory / "cgroup.subtree_control").read_text(encoding="ascii")
        assert handed == "+memory +pids +cpu"


def test_a_mount_is_located_by_whole_names() -> None:
    mount = Mount(Path("/point"), "/a")

    assert mount.locate("/ab") is None
    assert mount.locate("/a/b") == Path("/point/b")
