"""What a process knows of its machine, and what it gives back to it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.machine import cgroup_cores, cgroup_memory, code_ranges

SMAPS = """\
aaaa0000-aaaa1000 r-xp 00000000 fe:00 12   /usr/bin/python
Rss:                   4 kB
Private_Dirty:         0 kB
Anonymous:             0 kB
bbbb0000-bbbb2000 r-xp 00000000 fe:00 13   /usr/lib/relocated.so
Rss:                   8 kB
Private_Dirty:         4 kB
Anonymous:             4 kB
cccc0000-cccc1000 rw-p 00000000 fe:00 13   /usr/lib/data.so
Private_Dirty:         4 kB
dddd0000-dddd1000 r-xp 00000000 00:00 0    [vdso]
Private_Dirty:         0 kB
eeee0000-eeee3000 r-xp 00000000 00:00 0
Private_Dirty:         0 kB
ffff0000-ffff4000 r-xp 00001000 fe:00 14   /usr/lib/with space.so
Private_Dirty:         0 kB
"""


def test_only_code_of_files_that_nobody_wrote_to_may_be_dropped() -> None:
    assert code_ranges(SMAPS) == [(0xAAAA0000, 0xAAAA1000), (0xFFFF0000, 0xFFFF4000)]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux only")
def test_a_process_that_has_given_its_memory_back_runs_on() -> None:
    program = """
import json, re, ssl
from pathlib import Path
from dovetail.machine import release_memory

def resident():
    text = Path("/proc/self/smaps").read_text()
    return sum(int(size) for size in re.findall(r"r-xp .* /.*(?:\\n[A-Z].*)*?\\nRss: +(\\d+)", text))

before = resident()
release_memory()
print(before, resident(), json.dumps({"still": ssl.OPENSSL_VERSION_NUMBER > 0}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    match = re.match(r'(\d+) (\d+) {"still": true}', done.stdout)
    assert match is not None, done.stdout
    assert int(match[2]) < int(match[1])


def make_group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_the_limits_of_all_control_groups_above_a_process_count(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/outer/inner\n")
    make_group(root, {"cgroup.controllers": "memory"})
    used = {"memory.current": "300", "memory.stat": "anon 200\ninactive_file 50\n"}
    make_group(root / "outer", {"memory.max": "1000\n", **used})
    make_group(root / "outer" / "inner", {"memory.max": "max\n", **used})
    assert cgroup_memory(proc, root) == [(1000, 750)]
    make_group(root / "outer" / "inner", {"memory.max": "400"})
    assert cgroup_memory(proc, root) == [(400, 150), (1000, 750)]


def test_control_groups_of_the_first_version_are_read_too(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("4:memory:/job\n1:cpu,cpuacct:/\n0::/\n")
    stat = {"memory.usage_in_bytes": "900", "memory.stat": "total_inactive_file 100\n"}
    make_group(root / "memory", {"memory.limit_in_bytes": str(2**63 - 4096), **stat})
    make_group(root / "memory" / "job", {"memory.limit_in_bytes": "1000", **stat})
    assert cgroup_memory(proc, root) == [(1000, 200)]
    proc.write_text("4:memory:/not/to/be/seen\n")
    assert cgroup_memory(proc, root) == []


def test_processor_time_that_a_control_group_allows_is_counted_in_cores(tmp_path: Path) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "self"
    proc.write_text("0::/outer/inner\n")
    assert cgroup_cores(proc, root) is None
    (root / "outer/inner").mkdir(parents=True)
    (root / "outer/inner/cpu.max").write_text("max 100000\n")
    assert cgroup_cores(proc, root) is None
    (root / "outer/cpu.max").write_text("150000 100000\n")
    assert cgroup_cores(proc, root) == 2
    (root / "outer/inner/cpu.max").write_text("5000 100000\n")
    assert cgroup_cores(proc, root) == 1
