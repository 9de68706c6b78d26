"""The whole store bench: which checkpoints, which contenders, in which order; what a plan becomes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from dovetail.errors import ConfigError
from dovetail.store.loading.loader import Loader, LoaderConfig
from dovetail_bench import fio
from dovetail_bench.breakdown import HostTarget, StepContender, steps, touched_memory
from dovetail_bench.contenders import CPU_LOADERS, CUDA_LOADERS, Contender, SampleFiles, start_peer
from dovetail_bench.peers import PeerFailed, PeerUnavailable, default_folder
from dovetail_bench.sample_checkpoints import SHAPES, make_sample
from dovetail_bench.store_bench import Failure, Report, Result, compare, one_load, references
from dovetail_bench.store_loaders import IntoFreshMemory, IntoPool, Mapped, pool_for

_FIRST = "tiny"  # the checkpoint of the first load, which does not count

Ours = Callable[["Plan", SampleFiles, ExitStack], list[Contender]]
Show = Callable[[str, int, int], None]  # what is done now, how much of it, of how much


class Plan(msgspec.Struct, frozen=True):
    models: tuple[str, ...]
    rounds: int = 5
    loaders: tuple[str, ...] | None = None  # starts of names; None = all
    device: str = "cpu"
    breakdown: bool = False
    lora: bool = False
    folder: Path | None = None
    keep: bool = False
    install: bool = True
    pre_read: bool = True  # past the page cache, before every cold load
    drop_everything: bool = True  # the whole page cache, not only the files' part of it, where this process may


class Suite(msgspec.Struct):
    results: list[Result]
    failures: list[Failure]
    notes: list[str]


class Watch:
    """Counts the steps of the whole suite for whoever looks on."""

    def __init__(self, show: Show = lambda text, done, total: None) -> None:
        self._show = show
        self._done = 0
        self._total = 0

    def say(self, text: str) -> None:
        self._show(text, self._done, self._total)

    def writing(self, stage: str, done: int, total: int) -> None:
        self._show(f"{stage} (bytes)", done, total)

    def expect(self, steps: int) -> None:
        self._done, self._total = 0, steps

    def step(self, text: str) -> None:
        self._show(text, self._done, self._total)
        self._done += 1


def run_suite(plan: Plan, watch: Watch | None = None) -> Suite:
    watch = watch or Watch()
    for model in plan.models:
        if model not in SHAPES:
            raise ConfigError(f"--models: {model!r} is none of {', '.join(SHAPES)}")
    suite = Suite([], [], [] if fio.is_installed() else [f"{fio.HOW_TO_GET_FIO}; compared with raw reads of our own"])
    folder = (plan.folder or default_folder().parent) / "store-bench"  # its own, since it is removed afterwards
    with ExitStack() as stack:
        peers = _start_peers(plan, suite, watch, stack)
        if peers and plan.models != (_FIRST,):
            _warm_up(plan, folder, peers, watch)
        for model in plan.models:
            with _sample(plan, model, folder, watch) as sample:
                report = _measure(plan, sample, peers, watch)
                suite.results += report.results
                suite.failures += report.failures
    return suite


def _start_peers(plan: Plan, suite: Suite, watch: Watch, stack: ExitStack) -> list[Contender]:
    """Those that can be had; the others are failures with a reason."""
    found: list[Contender] = []
    for loader in CPU_LOADERS if plan.device == "cpu" else CUDA_LOADERS:
        if not _is_wanted(plan, loader):
            continue
        try:
            peer = start_peer(loader, plan.device, default_folder(), install=plan.install, report=watch.say)
        except (PeerUnavailable, PeerFailed) as error:
            suite.failures.append(Failure(loader, str(error)))
            continue
        stack.callback(peer.close)
        found.append(peer)
    return found


def _warm_up(plan: Plan, folder: Path, peers: list[Contender], watch: Watch) -> None:
    """A first load pays for libraries and threads; a few kilobytes are enough for that."""
    with _sample(msgspec.structs.replace(plan, lora=False), _FIRST, folder, watch) as sample:
        for peer in peers:
            watch.say(f"first load: {peer.name}")
            try:
                one_load(peer, sample, peer.states[0])
            except PeerFailed:
                continue  # it will fail again where that is reported


@contextmanager
def _sample(plan: Plan, model: str, folder: Path, watch: Watch) -> Iterator[SampleFiles]:
    name = f"{model}-lora" if plan.lora else model
    try:
        yield make_sample(model, folder, default_folder(), lora=plan.lora, install=plan.install, progress=watch.writing)
    finally:
        if not plan.keep:
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.rmtree(folder / "store", ignore_errors=True)
            with suppress(OSError):  # something else is there
                folder.rmdir()


def _measure(plan: Plan, sample: SampleFiles, peers: list[Contender], watch: Watch) -> Report:
    watch.say(f"{sample.name}: fio, {len(fio.DIRECT_SETTINGS)} settings")
    measured = references(sample, states=("cold",) if plan.device == "cuda" else ("cold", "warm"))
    report = _compare(plan, sample, [*measured, *peers], _contenders, watch)
    if plan.breakdown:
        # In a run of its own, since its buffers and the pool together are more than some machines have.
        cold = [contender for contender in measured if "cold" in contender.states]
        parts = _compare(plan, sample, cold, _breakdown, watch)
        report.results += [result for result in parts.results if result.loader.startswith("breakdown")]
        report.failures += parts.failures
    return report


def _compare(plan: Plan, sample: SampleFiles, others: list[Contender], ours: Ours, watch: Watch) -> Report:
    with ExitStack() as stack:
        wanted = [contender for contender in ours(plan, sample, stack) if _is_wanted(plan, contender.name)]
        contenders = [*others, *wanted]
        watch.expect(plan.rounds * sum(len(contender.states) for contender in contenders))
        return compare(
            sample,
            contenders,
            plan.rounds,
            device=plan.device,
            drop_everything=plan.drop_everything,
            pre_read=plan.pre_read,
            step=watch.step,
        )


def _contenders(plan: Plan, sample: SampleFiles, stack: ExitStack) -> list[Contender]:
    if plan.device == "cuda":
        from dovetail_bench.gpu_contenders import gpu_contenders  # the only ones that need torch in this process

        return gpu_contenders(sample, stack)
    config = LoaderConfig()
    pool = pool_for(sample.blobs)
    stack.callback(pool.close)
    loader = Loader(pool, config)
    stack.callback(loader.close)
    return [IntoPool(loader), IntoFreshMemory(config), Mapped(loader)]


def _breakdown(plan: Plan, sample: SampleFiles, stack: ExitStack) -> list[Contender]:
    if plan.device == "cuda":
        from dovetail_bench.gpu_contenders import gpu_breakdown

        return gpu_breakdown(sample, stack)
    size = sample.blobs[0].stat().st_size
    target, staging = HostTarget(size), memoryview(touched_memory(size))
    return [StepContender(step, target, staging) for step in steps(LoaderConfig().readers, pins=False)]


def _is_wanted(plan: Plan, name: str) -> bool:
    return plan.loaders is None or any(name.startswith(prefix) for prefix in plan.loaders)
