"""The parts of the store bench that need no store: the page cache, fio, and how contenders are compared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dovetail.store.loading.page_cache import cached_fraction
from dovetail_bench import fio, page_cache
from dovetail_bench.contenders import Load, SampleFiles, State
from dovetail_bench.peers import PeerFailed
from dovetail_bench.store_bench import PINNED_COPY, RAW_REFERENCE, REFERENCE, WrongBytes, compare

SIZE = 3 * 2**20 + 4096


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    path = tmp_path / "blob"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def sample(blob: Path) -> SampleFiles:
    return SampleFiles("sample", blob, blob, blob.parent, (blob,), checksum=1, stored_checksum=2)


class Stopwatch:
    """A contender with times that were decided before."""

    def __init__(self, name: str, seconds: list[float], states: tuple[State, ...] = ("cold",)) -> None:
        self.name, self.states = name, states
        self.reads_store = False
        self.checksum: int | None = 1
        self._seconds = list(seconds)
        self.seen: list[float] = []  # how much of the file was cached when it began

    def files(self, sample: SampleFiles) -> tuple[Path, ...]:
        return sample.blobs

    def prepare(self, sample: SampleFiles, state: State) -> None:
        pass

    def load(self, sample: SampleFiles) -> Load:
        self.seen.append(cached_fraction(sample.blobs[0]))
        seconds = self._seconds.pop(0)
        if seconds < 0:
            raise PeerFailed(f"{self.name}: broken")
        return Load(SIZE, seconds, self.checksum)

    def close(self) -> None:
        pass


def test_files_go_out_of_the_page_cache_and_back(blob: Path) -> None:
    page_cache.drop([blob])
    assert cached_fraction(blob) == 0.0
    page_cache.fill([blob])
    assert cached_fraction(blob) == 1.0


def test_raw_reads_read_every_byte(blob: Path) -> None:
    assert fio.raw_read(blob, direct=False).bytes == SIZE


@pytest.mark.skipif(not fio.is_installed(), reason=fio.HOW_TO_GET_FIO)
def test_fio_reads_the_file_once_whatever_the_jobs(blob: Path) -> None:
    for jobs in (1, 3):
        read = fio.run(blob, fio.Setting("psync", 2**20, 1, jobs, direct=False))
        assert SIZE * 0.8 <= read.bytes <= SIZE
    with pytest.raises(fio.FioFailed, match="no-such-engine"):
        fio.run(blob, fio.Setting("no-such-engine", 2**20, 1, 1))


def test_cold_is_cold_and_warm_is_warm(sample: SampleFiles) -> None:
    contender = Stopwatch("a", [1.0] * 4, ("cold", "warm"))
    compare(sample, [contender], rounds=2)
    assert contender.seen == [0.0, 0.0, 1.0, 1.0]


def test_medians_are_compared_with_the_best_of_fio(sample: SampleFiles) -> None:
    contenders = [
        Stopwatch("fio slow", [2.0, 2.0, 2.0]),
        Stopwatch("fio fast", [1.0, 1.0, 9.0]),
        Stopwatch("mine", [8.0, 2.0, 1.5]),
    ]
    report = compare(sample, contenders, rounds=3)
    assert [result.loader for result in report.results] == [REFERENCE, "mine"]
    best, mine = report.results
    assert (best.setting, best.ratio_to_fio) == ("fast", 1.0)
    assert (mine.seconds_median, mine.seconds_min, mine.seconds_max) == (2.0, 1.5, 8.0)
    assert mine.ratio_to_fio == pytest.approx(0.5)
    assert mine.gbps == pytest.approx(SIZE / 2e9)


def test_without_fio_the_reference_is_named_for_what_it_is(sample: SampleFiles) -> None:
    report = compare(sample, [Stopwatch(RAW_REFERENCE, [1.0]), Stopwatch("mine", [2.0])], rounds=1)
    assert {result.reference for result in report.results} == {RAW_REFERENCE}
    assert [result.ratio_to_fio for result in report.results] == [1.0, 0.5]


def test_a_contender_that_fails_is_reported_and_the_others_go_on(sample: SampleFiles) -> None:
    report = compare(sample, [Stopwatch("broken", [1.0, -1.0]), Stopwatch("mine", [1.0, 1.0])], rounds=2)
    assert [result.loader for result in report.results] == ["mine"]
    assert [(failure.loader, failure.reason) for failure in report.failures] == [("broken", "broken: broken")]


def test_wrong_bytes_stop_the_bench(sample: SampleFiles) -> None:
    contender = Stopwatch("liar", [1.0])
    contender.checksum = 3
    with pytest.raises(WrongBytes, match="liar"):
        compare(sample, [contender], rounds=1)


def test_a_gpu_load_is_held_against_the_pinned_copy(sample: SampleFiles) -> None:
    contenders = [Stopwatch(PINNED_COPY, [1.0], ("warm",)), Stopwatch("mine", [4.0, 1.25], ("cold", "warm"))]
    report = compare(sample, contenders, rounds=1, device="cuda")
    ratios = {(result.loader, result.state): result.ratio_to_pinned_copy for result in report.results}
    assert ratios == {("mine", "cold"): None, (PINNED_COPY, "warm"): 1.0, ("mine", "warm"): pytest.approx(0.8)}
