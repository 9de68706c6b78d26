"""What this machine has: processor features, cores, memory, GPUs. Looks only; decides nothing but `auto` types.

The one place that asks, because store (which type to keep weights in), engine (which kernels) and `doctor` must agree.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import math
import mmap
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import msgspec

HOME_VARIABLE = "DOVETAIL_HOME"

_ARM_PARTS = {
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
    "0xd8e": "Neoverse-N3",
    "0xd84": "Neoverse-V3",
}


YOUNG_OBJECTS = 10_000  # after which the collector of garbage looks at them, instead of 700
UNLIMITED_BYTES = 1 << 60  # where no limit is set, the first version of control groups says a number beyond this

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+\s*(.*)")  # the first line of each in /proc/PID/smaps


def default_root() -> Path:
    """Where models, profiles and peers are kept unless told otherwise."""
    home = os.environ.get(HOME_VARIABLE)
    return Path(home).expanduser() if home else Path.home() / ".cache" / "dovetail"


def slug(text: str) -> str:
    """As part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


class Cpu(msgspec.Struct, frozen=True):
    model: str
    architecture: str  # x86_64, aarch64, …
    features: frozenset[str]  # as the kernel spells them: avx512_bf16, amx_bf16, asimddp, bf16, …
    cores: int  # that this process may use

    @property
    def has_amx(self) -> bool:
        return "amx_bf16" in self.features

    @property
    def has_fast_bf16(self) -> bool:
        """bfloat16 matrices are multiplied by instructions of their own; elsewhere they are many times slower than
        float32, not faster."""
        return bool(self.features & {"amx_bf16", "avx512_bf16", "bf16"})

    @property
    def has_fast_f16(self) -> bool:
        """Arithmetic in float16 for which there are native kernels, twice as fast as float32."""
        return {"asimdhp", "asimddp"} <= self.features


class Gpu(msgspec.Struct, frozen=True):
    name: str
    memory_bytes: int
    driver: str


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    try:
        text = cpuinfo.read_text()
    except OSError:
        text = ""
    return Cpu(platform_model(text), platform.machine(), _features(text), usable_cores())


def preferred_dtype() -> str:
    """What `auto` means for computing on this machine: what it multiplies fastest."""
    cpu = read_cpu()
    if cpu.has_fast_bf16:
        return "bf16"
    return "f16" if cpu.has_fast_f16 and has_kernels() else "f32"  # torch's own float16 is slower than any other type


def has_kernels() -> bool:
    """Whether the compiled kernels came with this package. Only looked for: importing them would import torch."""
    name, folder = "dovetail.native._kernels", [str(Path(__file__).parent / "native")]
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(finder.find_spec(name, folder) is not None for finder in finders)


def kept_dtype(source: str) -> str:
    """What `auto` means for weights that come in this type: what is multiplied fastest. Where that is float32, kernels
    compute in it from bf16 as it lies, which is exact and half the bytes; without them it would be widened at every
    start."""
    fastest = preferred_dtype()
    return "bf16" if source == "bf16" and fastest == "f32" and has_kernels() else fastest


def usable_cores() -> int:
    """That this process may run on, and no more than its control group gives time for."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(count, cgroup_cores() or count)


def cgroup_cores(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the control groups above this process (version 2) give of processor time, rounded up; None = no limit."""
    with suppress(OSError, ValueError):
        line = next((line for line in proc.read_text().splitlines() if line.startswith("0::")), "0::/")
        group, quotas = root / line.removeprefix("0::").lstrip("/"), []
        for folder in (group, *group.parents):
            with suppress(OSError):
                quota, period = (folder / "cpu.max").read_text().split()
                quotas += [math.ceil(int(quota) / int(period))] if quota != "max" else []
            if folder == root:
                break
        return max(min(quotas), 1) if quotas else None
    return None


NODE_SHARE = 0.75  # of the machine's memory, that its CPU nodes take unless told otherwise


def memory_bytes() -> tuple[int, int]:
    """Total and available: of the control group that this process is in, where that has less than the machine."""
    import psutil  # here, because loading it costs more than most callers' work

    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, free in cgroup_memory():
        total, available = min(total, limit), min(available, free)
    return total, available


def cgroup_memory(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[tuple[int, int]]:
    """Limit and what is left of it, for each control group above this process that has a limit; of either version."""
    found = []
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" and (root / "cgroup.controllers").exists():
            mount, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = root / "memory"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == mount.parent:
                break
            limit = _cgroup_limit(folder, *names)
            if limit is not None:
                found.append(limit)
    return found


def _cgroup_limit(folder: Path, limit: str, usage: str, reclaimable: str) -> tuple[int, int] | None:
    """What files in memory take can be had back, and counts as left. None: no limit is set here, or the group is not to
    be seen from inside a container."""
    try:
        text = (folder / limit).read_text().strip()
        if text == "max" or int(text) >= UNLIMITED_BYTES:
            return None
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(text), max(int(text) - used + int(stat.get(reclaimable, 0)), 0)


def process_age_s() -> float:
    """Seconds since this process was started, to the hundredth."""
    if sys.platform != "linux":
        import psutil

        return time.time() - psutil.Process().create_time()
    # The kernel counts a start in ticks since boot; psutil adds them to a boot time in whole seconds.
    start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


def major_faults(pid: int) -> int:
    """How often this process has waited for a page from the disk; 0 where that cannot be known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[9])
    except (OSError, IndexError, ValueError):
        return 0


def read_gpus(timeout_s: float = 10.0) -> tuple[Gpu, ...]:
    """None where there is no driver, or where it does not answer."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return tuple(Gpu(row[0], int(row[1]) * 2**20, row[2]) for row in rows if len(row) == 3 and row[1].isdigit())


def list_gpus(timeout_s: float = 10.0) -> tuple[str, ...]:
    """Names for `device`: a GPU by its number, one that is cut into slices (MIG) by those of its slices."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpu_list(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpu_list(text: str, visible: str | None = None) -> tuple[str, ...]:
    """What `nvidia-smi -L` prints: a line per GPU, and behind it one per slice, indented. `visible`: what CUDA shows of
    them, by number or by the beginning of a name, up to the first that is neither; it numbers those anew."""
    if visible is not None:
        numbers, names = re.findall(r"^GPU (\d+):", text, re.MULTILINE), re.findall(r"\(UUID: ([^)]+)\)", text)
        wanted = (one.strip() for one in visible.split(","))
        known = takewhile(lambda one: one in numbers or (one and any(name.startswith(one) for name in names)), wanted)
        return tuple(f"cuda:{at}" for at, _ in enumerate(known))
    found: list[list[str]] = []
    for line in text.splitlines():
        number, uuid = re.match(r"GPU (\d+):", line), re.search(r"\(UUID: (MIG-[^)]+)\)", line)
        if number is not None:
            found.append([f"cuda:{number[1]}"])
        elif uuid is not None and found:
            found[-1].append(uuid[1])
    return tuple(name for names in found for name in (names[1:] or names))


def usable_gpus() -> tuple[str, ...]:
    """GPUs that a worker could serve from: the driver shows them, and torch and Triton were built for them. Looks at
    files only, because importing torch takes seconds."""
    torch, triton = importlib.util.find_spec("torch"), importlib.util.find_spec("triton")
    if torch is None or torch.origin is None or triton is None:
        return ()
    version = Path(torch.origin).with_name("version.py")
    built_for = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", version.read_text(), re.MULTILINE) if version.exists() else None
    return list_gpus() if built_for else ()


def spare_collector() -> None:
    """For a process that has started: what is there now stays, so that the collector of garbage need not look at it
    again, and looks at what comes after so many objects: those of a request are mostly gone by then."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def release_memory() -> None:
    """For a process that has fallen idle: give freed memory, which the C library keeps, back to the system, and unmap
    the code that was run. That stays in the page cache and comes back, 16 pages at a time, when it is run again."""
    gc.collect()
    trim_memory()
    with suppress(OSError):  # Linux only
        _unmap_code(Path("/proc/self/smaps").read_text())


def hide_argument(text: str) -> None:
    """Overwrite this in the command line that other users of the machine see. Linux only; elsewhere it stays."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return
    secret = text.encode()
    arguments = ctypes.string_at(start, end - start) if 0 < start < end else b""
    place = arguments.find(secret) if secret else -1
    while place >= 0:
        ctypes.memset(start + place, ord("x"), len(secret))
        place = arguments.find(secret, place + len(secret))


def trim_memory() -> None:
    """Give freed memory, which the C library keeps for later, back to the system."""
    with suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def _unmap_code(smaps: str) -> None:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for start, end in code_ranges(smaps):
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def code_ranges(smaps: str) -> list[tuple[int, int]]:
    """Where unmodified code of files is mapped, which can be dropped without loss."""
    ranges: list[tuple[int, int]] = []
    for line in smaps.splitlines():
        if mapping := _MAPPING.match(line):
            start, end, rights, path = mapping.groups()
            is_code = rights == "r-xp" and path.startswith("/")
            if is_code:
                ranges.append((int(start, 16), int(end, 16)))
        elif is_code and line.startswith(("Private_Dirty:", "Shared_Dirty:", "Anonymous:")) and int(line.split()[1]):
            is_code = False
            ranges.pop()
    return ranges


def platform_model(cpuinfo: str) -> str:
    """The processor's name out of the text of /proc/cpuinfo; ARM kernels give numbers instead of a name."""
    fields = _fields(cpuinfo)
    part = fields.get("CPU part", "")
    return fields.get("model name") or _ARM_PARTS.get(part) or platform.processor() or part or "unknown"


def _features(cpuinfo: str) -> frozenset[str]:
    fields = _fields(cpuinfo)
    return frozenset((fields.get("flags") or fields.get("Features") or "").split())


def _fields(cpuinfo: str) -> dict[str, str]:
    """Of the first processor listed."""
    first = cpuinfo.split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}
