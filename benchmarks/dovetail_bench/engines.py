"""The contest of `bench engines`: every engine on every model, precision and metric, in turns within seconds.

For one model in one precision all engines are started and hold their weights; then, cell by cell, each computes once a
round, one at a time, in an order that shifts by one. The first round warms up and does not count. An engine that cannot
be had or that fails is left out, with the reason, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from dovetail.errors import ConfigError
from dovetail.machine import memory_bytes, read_cpu
from dovetail.store.format.manifest import read_card
from dovetail_bench.engine_figures import OURS, Cell, Metric, Row, agreement, fold, shifted
from dovetail_bench.engine_models import EngineModels
from dovetail_bench.engine_peers import (
    LLAMA,
    Contender,
    Program,
    Setting,
    amx_evidence,
    contenders,
    label,
    start,
)
from dovetail_bench.engine_scores import Score, Scorer
from dovetail_bench.peers import PeerFailed, PeerProcess, PeerUnavailable
from dovetail_bench.roofline_figures import Roofline, least_seconds
from dovetail_bench.store_suite import Watch

PROMPT = 16  # tokens before a batch decodes
LAYOUTS = {"bf16": "plain", "f16": "plain", "int8": "int8", "int4": "int4"}  # our forms by type of the weights
NO_AMX = "this processor has none"
LATE = "the time was up"
CLOSE_S = 0.2  # for an engine to end by itself
_PROBE = Metric("ttft", 32)


class Plan(msgspec.Struct, frozen=True):
    models: tuple[str, ...]
    precisions: tuple[str, ...]
    metrics: tuple[Metric, ...]
    engines: tuple[str, ...]  # peers; ours always takes part
    rounds: int
    steps: int  # of decoding, in one measurement
    logs: Path
    setting: Setting
    roofline_scale: float = 1.0  # less than 1: to try the bench itself
    minutes: float = 0.0  # after which cells are left out; 0 = no end
    score_tokens: int = 0  # of the text that predictions are compared on; 0 = they are not

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        return max([metric.size + 1 for metric in self.metrics if metric.kind == "ttft"] + [self.each])

    @property
    def each(self) -> int:
        """Tokens of a sequence of a batch."""
        return PROMPT + self.steps + 1

    @property
    def most(self) -> int:
        """Sequences at a time."""
        return max(metric.batch for metric in self.metrics)


class Entry(msgspec.Struct, frozen=True):
    """An engine that was measured, and as what."""

    engine: str
    model: str
    precision: str
    weights: str
    weight_bytes: int
    about: str  # versions and settings, as it told them
    amx: str  # the evidence that it was in use, or why there is none
    agreement: float | None = None  # of first tokens with ours; None = none was compared
    score: Score | None = None  # against float32 weights; None = it was not asked for, or cannot be


class Failure(msgspec.Struct, frozen=True):
    """An engine that is not in the results, and why."""

    engine: str
    what: str  # model and precision, or everything
    reason: str


class Report(msgspec.Struct):
    machine: str
    cores: int
    threads: int
    roofline: Roofline | None = None
    settings: dict[str, str] = {}  # of each engine, in words
    entries: list[Entry] = []
    rows: list[Row] = []
    failures: list[Failure] = []


Keep = Callable[[Report], object]


class Contest:
    def __init__(self, plan: Plan, models: EngineModels, known: Mapping[str, Contender], watch: Watch) -> None:
        self._plan = plan
        self._models = models
        self._watch = watch
        self._known = known
        self._programs: dict[str, Program] = {}
        self._cpu = read_cpu()
        self._salt = 0
        self._end_s = time.monotonic() + 60 * plan.minutes if plan.minutes else float("inf")
        self._probed: dict[tuple[str, str], str] = {}
        self._tokens: dict[str, dict[int, int]] = {}  # engine -> first token by salt
        self._scorers: dict[str, Scorer] = {}
        self.report = Report(self._cpu.model, self._cpu.cores, plan.setting.threads)

    def run(self, keep: Keep) -> Report:
        plan = self._plan
        plan.logs.mkdir(parents=True, exist_ok=True)
        for name in (OURS, *plan.engines):
            self._set_up(name)
        self.report.roofline = self._roofline()
        for model in plan.models:
            for precision in plan.precisions:
                if time.monotonic() > self._end_s:
                    self.report.failures.append(Failure("everyone", f"{model}, {label(precision)}", LATE))
                    continue
                self._measure(model, precision)
                keep(self.report)
        return self.report

    def _set_up(self, name: str) -> None:
        contender = self._known[name]
        try:
            self._programs[name] = contender.program(self._plan.setting, self._watch.say)
            self.report.settings[name] = contender.settings
        except PeerUnavailable as error:
            self._fail(name, "everything", error)

    def _roofline(self) -> Roofline:
        self._watch.say("what the machine can do at best")
        with start(OURS, self._programs[OURS], self._log("roofline")) as process:
            found = process.ask({"do": "roofline", "scale": self._plan.roofline_scale})
        return msgspec.convert(found, Roofline)

    def _measure(self, model: str, precision: str) -> None:
        with ExitStack() as stack:
            running: dict[str, PeerProcess] = {}
            entries: dict[str, Entry] = {}
            for name in self._programs:
                if precision not in self._known[name].weights:
                    self.report.failures.append(Failure(name, f"{model}, {label(precision)}", "not one of its forms"))
                    continue
                self._watch.say(f"{model}, {label(precision)}: starting {name}")
                try:
                    entries[name] = self._start(name, model, precision, running, stack)
                except (PeerFailed, PeerUnavailable) as error:
                    running.pop(name, None)
                    self._fail(name, f"{model}, {label(precision)}", error)
            self._watch.expect(len(running) * len(self._plan.metrics) * (self._plan.rounds + 1))
            self._tokens = {name: {} for name in running}
            for metric in self._plan.metrics:
                if time.monotonic() > self._end_s:
                    self.report.failures.append(Failure("everyone", f"{model}, {label(precision)}, {metric}", LATE))
                    continue
                self._measure_cell(Cell(model, label(precision), metric), precision, running, entries)
            for name, entry in entries.items():
                share = agreement(self._tokens.get(name, {}), self._tokens.get(OURS, {}))
                score = self._score(name, model, running) if name in running else None
                self.report.entries.append(msgspec.structs.replace(entry, agreement=share, score=score))

    def _start(self, name: str, model: str, precision: str, running: dict[str, PeerProcess], stack: ExitStack) -> Entry:
        command = self._command(name, model, precision)
        self._check_memory(name, Path(str(command["path"])))
        amx = self._amx(name, precision, command)
        process = start(name, self._programs[name], self._log(name))
        stack.callback(process.close, CLOSE_S)
        running[name] = process
        answer = process.ask(command)
        weights = self._known[name].weights[precision]
        return Entry(name, model, label(precision), weights, answer["weight_bytes"], answer["about"], amx)

    def _score(self, name: str, model: str, running: Mapping[str, PeerProcess]) -> Score | None:
        if not (self._plan.score_tokens and self._known[name].scores):
            return None
        self._watch.say(f"{model}: predictions of {name}")
        try:
            if model not in self._scorers:
                scorer = Scorer(self._models, model, self._plan.score_tokens, self._plan.logs)
                scorer.reference_by(start(OURS, self._programs[OURS], self._log("reference")))
                self._scorers = {model: scorer}  # a reference is some 200 MB
            return self._scorers[model].score(running[name])
        except PeerFailed as error:
            self._fail(name, f"{model}, predictions", error)
            return None

    def _check_memory(self, name: str, path: Path) -> None:
        """A machine without memory measures nothing, and may end whoever asks."""
        contender, available = self._known[name], memory_bytes()[1]
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        stored = read_card(path, name).size_bytes if contender.place == "store" else 0
        size = stored or sum(file.stat().st_size for file in files)
        need = contender.held * size + contender.held_gib * 2**30
        if need > available:
            raise PeerUnavailable(f"needs {need / 1e9:.1f} GB, {available / 1e9:.1f} GB are free")

    def _command(self, name: str, model: str, precision: str) -> dict[str, object]:
        contender, plan = self._known[name], self._plan
        weights = contender.weights[precision]
        if contender.place == "store":
            path = self._models.stored(model, LAYOUTS[weights], self._watch.say)
        elif contender.place == "hf":
            path = self._models.hf(model, self._watch.say)
        else:
            path = self._models.gguf(model, weights, self._quantise, self._watch.say)
        return {
            "do": "prepare",
            "path": str(path),
            "weights": weights,
            "options": contender.options,
            "vocab_size": self._models.spec(model).vocab_size,
            "longest": plan.longest,
            "most": plan.most,
            "each": plan.each,
        }

    def _quantise(self, source: Path, target: Path, kind: str) -> None:
        program = self._programs.get(LLAMA) or contenders()[LLAMA].program(self._plan.setting, self._watch.say)
        with start(LLAMA, program, self._log(LLAMA)) as process:
            process.ask({"do": "quantise", "path": str(source), "target": str(target), "weights": kind})

    def _amx(self, name: str, precision: str, command: dict[str, object]) -> str:
        """Asked once for each engine and precision, of a process of its own, because logging is slow. An engine that
        fails when it shall log (OpenVINO does) takes part all the same."""
        if not self._cpu.has_amx:
            return NO_AMX
        if (name, precision) not in self._probed:
            log = self._log(f"{name}-amx-{precision}")
            log.unlink(missing_ok=True)
            evidence, unseen = "", "no sign of AMX"
            try:
                with start(name, self._programs[name], log, {"ONEDNN_VERBOSE": "1"}) as process:
                    evidence = str(process.ask(command).get("evidence", ""))
                    process.ask({"do": _PROBE.kind, "size": _PROBE.size, "salt": 0})
            except PeerFailed:
                unseen = "not known whether by AMX, it failed when oneDNN was to log"
            seen = amx_evidence([evidence, log.read_text(errors="replace")])
            self._probed[name, precision] = seen or f"{unseen} (log: {log})"
        return self._probed[name, precision]

    def _measure_cell(
        self, cell: Cell, precision: str, running: dict[str, PeerProcess], entries: Mapping[str, Entry]
    ) -> None:
        taken: dict[str, list[float]] = {name: [] for name in running}
        native: dict[str, list[float]] = {name: [] for name in running}
        for turn in range(self._plan.rounds + 1):
            self._salt += 1
            for name in shifted(list(running), turn):
                self._watch.step(f"{cell.model}, {cell.precision}, {cell.metric}: {name}")
                try:
                    answer = self._one(name, running[name], cell.metric)
                    taken[name].append(float(answer["ms"]))
                    native[name] += [answer["native"]] if turn and answer.get("native") is not None else []
                except PeerFailed as error:
                    self._fail(name, f"{cell.model}, {cell.precision}", error)
                    del running[name], taken[name]
        counted = {name: each[1:] for name, each in taken.items()}
        weights = {name: entries[name].weights for name in counted}
        bounds = {name: self._least_ms(cell, precision, entries[name]) for name in counted}
        least = {name: bound for name, bound in bounds.items() if bound is not None}
        self.report.rows += fold(cell, counted, weights, least, native)

    def _one(self, name: str, process: PeerProcess, metric: Metric) -> dict[str, Any]:
        command = {"do": metric.kind, "size": metric.size, "salt": self._salt}
        answer = process.ask({**command, "prompt": PROMPT, "steps": self._plan.steps})
        if "token" in answer:
            self._tokens[name][self._salt] = answer["token"]
        return answer

    def _least_ms(self, cell: Cell, precision: str, entry: Entry) -> float | None:
        assert self.report.roofline is not None
        spec, size = self._models.spec(cell.model), cell.metric.size
        seconds = least_seconds(
            spec, entry.weight_bytes, size, cell.metric.batch, self.report.roofline, bits=int(precision)
        )
        return None if seconds is None else 1e3 * seconds

    def _fail(self, name: str, what: str, error: Exception) -> None:
        self.report.failures.append(Failure(name, what, str(error)))

    def _log(self, name: str) -> Path:
        return self._plan.logs / f"{name}.log"


def run_contest(
    plan: Plan,
    models: EngineModels,
    known: Mapping[str, Contender] | None = None,
    watch: Watch | None = None,
    keep: Keep = lambda report: None,
) -> Report:
    """`keep` is given what there is after each model and precision, so that an interruption loses little."""
    known = contenders() if known is None else known
    for name in plan.engines:
        if name not in known or name == OURS:
            raise ConfigError(f"--peers: {name!r} is none of {', '.join(each for each in known if each != OURS)}")
    return Contest(plan, models, known, watch or Watch()).run(keep)


def merged(old: Report, new: Report) -> Report:
    """What was measured again replaces what was there; the rest stays, as long as it is of this machine and threads."""
    if (old.machine, old.threads) != (new.machine, new.threads):
        return new

    def key(one: Row | Entry) -> tuple[object, ...]:
        own = (one.metric, one.batch) if isinstance(one, Row) else (one.engine,)
        return one.model, one.precision, *own

    rows, entries = {key(row) for row in new.rows}, {key(entry) for entry in new.entries}
    measured = {(row.engine, f"{row.model}, {row.precision}") for row in new.rows}
    return msgspec.structs.replace(
        new,
        settings=old.settings | new.settings,
        rows=[*(row for row in old.rows if key(row) not in rows), *new.rows],
        entries=[*(entry for entry in old.entries if key(entry) not in entries), *new.entries],
        failures=[
            *(each for each in old.failures if (each.engine, each.what) not in measured and each not in new.failures),
            *new.failures,
        ],
    )
