"""Loads checkpoints cold and warm, our store and its peers in turns, and compares all with what fio gets from the disk.

In every round each contender loads once, so that whatever else the machine does meets all of them alike; the order is
shifted by one each round. Cold means that the page cache holds nothing of the files when the clock starts, warm that it
holds all of the one that is read. Below this machine there may be caches too, a host's or a controller's; so every cold
load comes after one more read of its file past the page cache, and finds the device in the state in which the others
do. Every load is checked against the checkpoint's sampled bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from dovetail.errors import DovetailError
from dovetail_bench import fio, page_cache
from dovetail_bench.contenders import Contender, FioContender, Load, RawRead, SampleFiles, State
from dovetail_bench.engine_figures import shifted
from dovetail_bench.peers import PeerFailed

KEPT_FIO_SETTINGS = 3
REFERENCE = "fio"  # in the best of its settings
RAW_REFERENCE = "raw read (no fio)"
PINNED_COPY = "pinned copy"  # host → GPU: the ceiling

Step = Callable[[str], None]  # one more load is done; what it was


class WrongBytes(DovetailError):
    """A load did not give the checkpoint's bytes."""


class Result(msgspec.Struct, frozen=True):
    loader: str
    model: str
    state: State
    bytes: int
    seconds_median: float
    gbps: float  # 10⁹ bytes a second, of the median
    ratio_to_fio: float | None  # to `reference`; None where there was none
    rounds: int
    seconds_min: float
    seconds_max: float
    device: str = "cpu"
    ratio_to_pinned_copy: float | None = None  # host → GPU only
    reference: str | None = None  # what the disk was measured with: fio, or our own raw reads where it is missing
    setting: str | None = None  # of fio, the one that was best


class Failure(msgspec.Struct, frozen=True):
    """A contender that is not in the results, and why."""

    loader: str
    reason: str


class Report(msgspec.Struct):
    results: list[Result]
    failures: list[Failure]


def references(
    sample: SampleFiles, states: Sequence[State] = ("cold", "warm"), keep: int = KEPT_FIO_SETTINGS
) -> list[Contender]:
    """fio in the settings that did best in one pass over all of them, or our own raw reads."""
    if not fio.is_installed():
        return [RawRead(state) for state in states]
    blob = FioContender(fio.DIRECT_SETTINGS[0]).files(sample)
    best: list[fio.Setting] = []
    if "cold" in states:
        best += fio.best_settings(blob[0], fio.DIRECT_SETTINGS, keep, lambda: page_cache.drop(blob))
    if "warm" in states:
        best += fio.best_settings(blob[0], fio.CACHED_SETTINGS, keep, lambda: page_cache.fill(blob))
    return [FioContender(setting) for setting in best]


def compare(
    sample: SampleFiles,
    contenders: Sequence[Contender],
    rounds: int,
    *,
    states: Sequence[State] = ("cold", "warm"),
    device: str = "cpu",
    drop_everything: bool = False,
    pre_read: bool = True,
    step: Step = lambda text: None,
) -> Report:
    loads: dict[tuple[str, State], list[Load]] = {}
    failed: dict[str, str] = {}
    for state in states:
        taking_part = [contender for contender in contenders if state in contender.states]
        for turn in range(rounds):
            for contender in shifted(taking_part, turn):
                step(f"{sample.name} {state}: {contender.name}")
                if contender.name in failed:
                    continue
                try:
                    load = one_load(contender, sample, state, drop_everything, pre_read)
                except (PeerFailed, fio.FioFailed) as error:
                    failed[contender.name] = str(error)
                    continue
                loads.setdefault((contender.name, state), []).append(load)
    for name, state in list(loads):
        if name in failed:
            del loads[name, state]
    results = [_result(name, sample.name, state, each, device) for (name, state), each in loads.items()]
    return Report(
        with_pinned_ratios(with_references(results)), [Failure(name, reason) for name, reason in failed.items()]
    )


def one_load(
    contender: Contender, sample: SampleFiles, state: State, drop_everything: bool = False, pre_read: bool = True
) -> Load:
    files = contender.files(sample)
    contender.prepare(sample, state)
    if state == "cold":
        page_cache.drop(files, everything=drop_everything)
        for path in files if pre_read else ():
            fio.raw_read(path, direct=True)
    else:
        page_cache.fill(files)
    load = contender.load(sample)
    wanted = sample.stored_checksum if contender.reads_store else sample.checksum
    if load.checksum not in (None, wanted):
        raise WrongBytes(f"{contender.name}: what it loaded of {sample.name} is not what was written")
    page_cache.drop(files)  # memory holds one contender's pages at a time
    return load


def with_references(results: Sequence[Result]) -> list[Result]:
    """Fold the settings of fio into the best one per state, and state every other result's ratio to it."""
    kept: list[Result] = []
    for state in dict.fromkeys(result.state for result in results):
        mine = [result for result in results if result.state == state]
        measured = [result for result in mine if _is_reference(result)]
        others = [result for result in mine if not _is_reference(result)]
        if not measured:
            kept += others
            continue
        best = max(measured, key=lambda result: result.gbps)
        reference = RAW_REFERENCE if best.loader == RAW_REFERENCE else REFERENCE
        setting = best.loader.removeprefix("fio ") if reference == REFERENCE else None
        for result in [msgspec.structs.replace(best, loader=reference, setting=setting), *others]:
            ratio = result.gbps / best.gbps
            kept.append(msgspec.structs.replace(result, ratio_to_fio=ratio, reference=reference))
    return kept


def with_pinned_ratios(results: Sequence[Result]) -> list[Result]:
    """State how near to one copy out of pinned memory the warm loads come."""
    ceiling = next((result.gbps for result in results if result.loader == PINNED_COPY), None)
    if ceiling is None:
        return list(results)
    return [
        msgspec.structs.replace(result, ratio_to_pinned_copy=result.gbps / ceiling)
        if result.state == "warm"
        else result
        for result in results
    ]


def _is_reference(result: Result) -> bool:
    return result.loader.startswith("fio ") or result.loader == RAW_REFERENCE


def _result(name: str, model: str, state: State, loads: list[Load], device: str) -> Result:
    seconds = [load.seconds for load in loads]
    median = statistics.median(seconds)
    size = loads[0].bytes
    return Result(
        loader=name,
        model=model,
        state=state,
        bytes=size,
        seconds_median=median,
        gbps=size / median / 1e9,
        ratio_to_fio=None,
        rounds=len(loads),
        seconds_min=min(seconds),
        seconds_max=max(seconds),
        device=device,
    )
