"""What is read of a machine, from trees like its /proc and /sys."""

import pytest

from dragoman.machine import read_machine

ZEN3 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse4_2 avx avx2 fma\n\nmodel name\t: AMD EPYC\n"
AVX512 = "flags : avx2 avx512f avx512bw avx512dq avx512vl avx512_vnni\n"
PARTLY = "flags : avx2 avx512f avx_vnni\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp\n"


def tree(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return read_machine(root)


@pytest.mark.parametrize(
    ("cpuinfo", "features", "fast"),
    [
        (ZEN3, ("avx2",), False),
        (AVX512, ("avx2", "avx512", "vnni"), True),
        (PARTLY, ("avx2", "vnni"), True),
        (ARM, ("dot product",), True),
        ("", (), False),
    ],
)
def test_the_features_that_kernels_are_written_for_are_told(tmp_path, cpuinfo, features, fast):
    """AVX-512 counts with all four parts that kernels need; VNNI comes in two forms, and Arm's in one."""
    machine = tree(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert (machine.features, machine.multiplies_int8_fast) == (features, fast)
    assert machine.processor == ("AMD EPYC" if cpuinfo == ZEN3 else "")


def test_limits_of_the_second_version_are_the_tightest_on_the_way_up(tmp_path):
    """A group without a limit is in one that has it; half a core is a limit, too."""
    machine = tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       2048 kB\nMemFree: 1 kB\n",
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/pod/memory.max": "1048576\n",
            "sys/fs/cgroup/cpu.max": "400000 100000\n",
        },
    )
    assert (machine.core_limit, machine.usable_cores) == (0.5, 0.5)
    assert (machine.memory_bytes, machine.memory_limit, machine.usable_memory) == (2 << 20, 1 << 20, 1 << 20)


def test_limits_of_the_first_version_are_in_a_tree_for_each_controller(tmp_path):
    """-1 is no quota, and a number beyond any memory no limit; a container's own group is the top of what it sees."""
    machine = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096\n",
        },
    )
    assert (machine.core_limit, machine.memory_limit) == (1.5, 4096)


def test_a_system_that_tells_nothing_has_no_limits(tmp_path):
    """Not Linux, say."""
    machine = read_machine(tmp_path)
    assert (machine.core_limit, machine.memory_limit, machine.usable_memory) == (None, None, None)
    assert machine.usable_cores == machine.cores >= 1
