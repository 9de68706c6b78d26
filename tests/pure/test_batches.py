"""Batches without a server: lines and whose turn it is, the pace, files of results, the check of what was uploaded."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.daytime import parse_hours
from dovetail.errors import ConfigError, Conflict, InvalidRequest
from dovetail.gateway.batches import job
from dovetail.gateway.batches.check import CheckOrder, CheckReport, check_file, lines_of_models
from dovetail.gateway.batches.lines import LINE, BatchLines
from dovetail.gateway.batches.pacing import Pace, Pressure
from dovetail.gateway.batches.progress import Progress
from dovetail.gateway.batches.records import Batch, BatchUsage, Counts, StoredFile
from dovetail.gateway.batches.results import LineResponse, LineResult, ResultFiles, result_id
from dovetail.gateway.batches.schedule import LineSchedule
from dovetail.gateway.batches.store import BatchStore
from dovetail.gateway.batches.uploads import FormReader, plain_name

BATCH = Batch(
    id="batch_1",
    owner="",
    api="openai",
    endpoint="/v1/completions",
    input_file="file-in",
    output_file="file-out",
    error_file="file-err",
    completion_window="24h",
    created_s=100,
    expires_s=200,
)


def make_lines(*models: int) -> BatchLines:
    index = np.zeros(len(models), dtype=LINE)
    index["model"] = models
    return BatchLines(index, max(models) + 1)


def serve(schedule: LineSchedule, count: int, tokens: dict[str, int], warm: set[str] | None = None) -> list[str]:
    """The models of so many lines, four at a time; `tokens` of each line by batch."""
    running, models = [], []
    loaded = warm
    for now in range(count):
        cost = (lambda model: 0.0) if loaded is None else (lambda model: 0.0 if model in loaded else 5000.0)
        line = schedule.next(now, cost, lambda model: True)
        assert line is not None
        if loaded is not None:
            loaded.add(line.model)
        models.append(line.model)
        running.append(line)
        if len(running) == 4:
            first = running.pop(0)
            schedule.done(first.batch, first.number, tokens[first.batch])
    for line in running:
        schedule.done(line.batch, line.number, tokens[line.batch])
    return models


# Whose line is next


@given(st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_two_keys_get_equal_tokens_however_long_their_lines_are(a: int, b: int) -> None:
    schedule, tokens = LineSchedule(), {"a": a, "b": b}
    lines = {name: make_lines(*[0] * 4000) for name in tokens}
    for name in tokens:
        schedule.add(name, name, ("m",), lines[name])
    for _ in range(40):  # until the shorter ones have had enough to be compared
        serve(schedule, 100, tokens)
        had = {name: lines[name].num_done * tokens[name] for name in tokens}
        if min(had.values()) > 60 * max(a, b):
            break
    else:
        return  # one line of the one is hundreds of the other's
    assert min(had.values()) > 0.9 * max(had.values()) - 4 * max(a, b)


def test_a_key_with_many_batches_has_no_more_than_one_with_one() -> None:
    schedule, tokens = LineSchedule(), dict.fromkeys(("a0", "a1", "a2", "b0"), 50)
    lines = {name: make_lines(*[0] * 1000) for name in tokens}
    for name in tokens:
        schedule.add(name, name[0], ("m",), lines[name])
    serve(schedule, 600, tokens)
    had = {name: one.num_done for name, one in lines.items()}
    assert abs(had["b0"] - 300) < 12
    assert all(abs(had[name] - 100) < 12 for name in ("a0", "a1", "a2"))


def test_who_comes_later_is_not_owed_the_past() -> None:
    schedule, tokens = LineSchedule(), {"a": 50, "b": 50}
    lines = {name: make_lines(*[0] * 1000) for name in tokens}
    schedule.add("a", "a", ("m",), lines["a"])
    serve(schedule, 400, tokens)
    schedule.add("b", "b", ("m",), lines["b"])
    serve(schedule, 200, tokens)
    assert abs(lines["b"].num_done - 100) < 12


def test_a_guess_at_the_first_lines_is_nobodys_advantage() -> None:
    """All of the first key's lines ran before any had ended, when the other came."""
    schedule, lines = LineSchedule(), {name: make_lines(*[0] * 1000) for name in ("a", "b")}
    schedule.add("a", "a", ("m",), lines["a"])
    running = [schedule.next(0.0, lambda model: 0.0, lambda model: True) for _ in range(64)]
    schedule.add("b", "b", ("m",), lines["b"])
    for _ in range(600):
        first = running.pop(0)
        assert first is not None
        schedule.done(first.batch, first.number, 50)
        running.append(schedule.next(0.0, lambda model: 0.0, lambda model: True))
    assert abs(lines["a"].num_done - lines["b"].num_done) <= 64


def test_models_that_alternate_in_a_file_are_loaded_once() -> None:
    schedule = LineSchedule()
    schedule.add("a", "", ("m", "n"), make_lines(*[0, 1] * 100))
    models = serve(schedule, 200, {"a": 10}, warm={"m"})
    assert models == ["m"] * 100 + ["n"] * 100


def test_a_key_whose_model_is_not_loaded_waits_no_longer_than_the_load_is_worth() -> None:
    schedule, tokens = LineSchedule(), {"a": 100, "b": 100}
    schedule.add("a", "a", ("m",), make_lines(*[0] * 1000))
    schedule.add("b", "b", ("n",), make_lines(*[0] * 1000))
    models = serve(schedule, 200, tokens, warm={"m"})
    assert 45 < models.index("n") < 60, "a load costs 5,000 tokens here"
    assert Counter(models[models.index("n") :])["n"] > 90, "then it catches up"


def test_a_line_that_is_tried_again_is_given_once_more_and_not_before_its_time() -> None:
    schedule = LineSchedule()
    schedule.add("a", "", ("m",), make_lines(0, 0))
    first = schedule.next(0.0, lambda model: 0.0, lambda model: True)
    assert first is not None
    schedule.give_back("a", first.number, 5.0)
    second = schedule.next(1.0, lambda model: 0.0, lambda model: True)
    assert second is not None
    assert second.number != first.number
    assert schedule.next(4.9, lambda model: 0.0, lambda model: True) is None
    again = schedule.next(5.0, lambda model: 0.0, lambda model: True)
    assert again == first
    assert schedule.next(6.0, lambda model: 0.0, lambda model: True) is None


@given(st.lists(st.tuples(st.sampled_from("tgd"), st.integers(0, 99)), max_size=200), st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_whatever_happens_each_line_is_done_once(events: list[tuple[str, int]], count: int) -> None:
    schedule, lines = LineSchedule(), make_lines(*[number % 3 for number in range(count)])
    schedule.add("a", "", ("k", "l", "m"), lines)
    taken: list[int] = []
    done: list[int] = []
    for kind, at in events:
        if kind == "t":
            line = schedule.next(0.0, lambda model: 0.0, lambda model: True)
            if line is not None:
                assert line.number not in [*taken, *done]
                taken.append(line.number)
        elif taken:
            number = taken.pop(at % len(taken))
            if kind == "g":
                schedule.give_back("a", number, 0.0)
            else:
                schedule.done("a", number, 3)
                done.append(number)
    while (line := schedule.next(1.0, lambda model: 0.0, lambda model: True)) is not None:
        taken.append(line.number)
    assert sorted([*taken, *done]) == list(range(count))
    assert sorted(lines.unanswered()) == sorted(taken)


# The pace


def test_the_pace_rises_when_nobody_else_is_there_and_gives_way_when_clients_wait() -> None:
    pace = Pace(64)
    for step in range(20):
        pace.observe(Pressure(), step * 0.25)
    assert pace.limit == 64
    for step in range(8):
        pace.observe(Pressure(online=5, online_waiting=2), 10 + step)
    assert pace.limit == 1
    assert pace.held_by() == "requests of clients wait for a place"
    pace.observe(Pressure(online=5), 20.0)
    assert pace.limit == 2, "slowly, while clients are there"


def test_late_answers_halve_the_pace_once_each_second() -> None:
    pace = Pace(64)
    for step in range(20):
        pace.observe(Pressure(), step * 0.25)
    for step in range(4):
        pace.observe(Pressure(online=1, late=step + 1), 10 + step * 0.1)
    assert pace.limit >= 32


def test_lines_that_no_node_takes_hold_further_ones_of_their_model() -> None:
    pace = Pace(64)
    pace.observe(Pressure(waiting={"m": 2}), 0.0)
    assert not pace.has_room("m", 0)
    assert pace.has_room("n", 0)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [("22:00-06:00", (22 * 60, 0, 359), (360, 21 * 60 + 59)), ("09:30-17:00", (570, 1019), (569, 1020, 0))],
)
def test_hours_may_pass_midnight(text: str, inside: tuple[int, ...], outside: tuple[int, ...]) -> None:
    hours = parse_hours(text)
    assert str(hours) == text
    assert all(hours.contains(minute) for minute in inside)
    assert not any(hours.contains(minute) for minute in outside)


@pytest.mark.parametrize("text", ["", "22-06", "22:00", "25:00-06:00", "22:60-06:00", "10:00-10:00", "a:b-c:d"])
def test_hours_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hours"):
        parse_hours(text)


# Files of results


def result(number: int, status: int = 200) -> LineResult:
    body = {"usage": {"prompt_tokens": 3, "completion_tokens": number}}
    response = LineResponse(status, "r", msgspec.Raw(json.dumps(body).encode()))
    return LineResult(result_id("batch_1", number), f"line {number}", response, None)


@pytest.mark.parametrize("torn", [b"", b'{"id": "batch_req_1_7", "cus', b"\0" * 4096, b'{"id": "batch_req_1_7"}'])
def test_what_a_machine_left_unfinished_is_cut_off_and_the_rest_counts(tmp_path: Path, torn: bytes) -> None:
    paths = (tmp_path / "out", tmp_path / "err")
    files = ResultFiles(*paths)
    files.append([result(0), result(1, 400), result(2)])
    files.close()
    with paths[0].open("ab") as out:
        out.write(torn)
    files = ResultFiles(*paths)
    found = files.recover()
    assert sorted(found.numbers) == [0, 1, 2]
    assert (found.counts, found.usage) == (Counts(completed=2, failed=1), BatchUsage(9, 3))
    files.append([result(3)])
    assert [json.loads(line)["custom_id"] for line in paths[0].read_text().splitlines()] == [
        "line 0",
        "line 2",
        "line 3",
    ]
    files.close()


def test_an_answer_is_one_line_for_whoever_splits_texts(tmp_path: Path) -> None:
    said = "a\x85b\u2028c\u2029d\x0be\x1cf\n"
    body = msgspec.Raw(json.dumps({"text": said}, ensure_ascii=False).encode())
    paths = (tmp_path / "out", tmp_path / "err")
    files = ResultFiles(*paths)
    files.append([LineResult(result_id("batch_1", 0), "first\u2028line", LineResponse(200, "r", body), None)])
    files.close()
    (line,) = paths[0].read_text(encoding="utf-8").splitlines()
    found = json.loads(line)
    assert (found["response"]["body"]["text"], found["custom_id"]) == (said, "first\u2028line")


# The check of a file


def checked(file: Path, content: bytes, **changes: object) -> CheckReport:
    file.write_bytes(content)
    order = CheckOrder(str(file), str(file.with_suffix(".index")), "/v1/completions", 2000, 50)
    return check_file(msgspec.structs.replace(order, **changes))


def entry(name: str, model: str = "m") -> bytes:
    body = {"model": model, "prompt": "x"}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}).encode() + b"\n"


def test_the_index_says_where_each_line_is_and_what_model_it_asks(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    content = b"\xef\xbb\xbf" + entry("a") + b"\r\n\n  " + entry("b", "n") + entry("c")[:-1]
    report = checked(file, content)
    assert (report.total, report.models, report.problems) == (3, ("m", "n"), ())
    index = np.fromfile(file.with_suffix(".index"), dtype=LINE)
    read = [json.loads(content[one["offset"] : one["offset"] + one["length"]])["custom_id"] for one in index]
    assert read == ["a", "b", "c"]
    assert lines_of_models(file, file.with_suffix(".index"), [1]) == [(4, 1)]


@pytest.mark.parametrize("at", [1, 25, 50])
def test_a_line_over_the_limit_is_named_wherever_it_is(tmp_path: Path, at: int) -> None:
    lines = [entry(str(number)) for number in range(49)]
    lines.insert(at - 1, b'"' + b"x" * 70_000 + b'"\n')
    [problem] = checked(tmp_path / "lines", b"".join(lines)).problems
    assert (problem.code, problem.line) == ("line_too_long", at)


def test_more_lines_than_a_batch_may_have_are_refused(tmp_path: Path) -> None:
    [problem] = checked(tmp_path / "lines", b"".join(entry(str(number)) for number in range(51))).problems
    assert (problem.code, problem.line) == ("too_many_lines", 51)
    assert "batch.max_lines" in problem.message


def test_a_hundred_problems_are_named_and_no_more(tmp_path: Path) -> None:
    assert len(checked(tmp_path / "lines", b"{}\n" * 5000).problems) == 100
    assert checked(tmp_path / "lines", b"\n\n").problems[0].code == "empty_file"


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_no_bytes_end_the_check(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    report = checked(tmp_path_factory.getbasetemp() / "fuzzed", entry("a") + content)
    assert report.problems or report.total == 1


# Forms


@pytest.mark.parametrize("step", [1, 7, 4096])
def test_a_form_is_read_however_it_is_cut(step: int) -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        b'Content-Disposition: form-data; name="file"; filename="/tmp/x.jsonl"\r\n\r\nline\r\n--\r\n-b\r\n--b--\r\n'
    )
    content = bytearray()
    reader = FormReader("multipart/form-data; boundary=b", content.extend)
    for first in range(0, len(body), step):
        reader.feed(body[first : first + step])
    form = reader.finish()
    assert (form.fields, form.filename, bytes(content)) == ({"purpose": "batch"}, "x.jsonl", b"line\r\n--\r\n-b")


@pytest.mark.parametrize(
    ("given", "shown"), [("", "file"), ("..", "file"), ("C:\\a\\b", "b"), ("a\0b\nc", "abc"), ("x" * 999, "x" * 255)]
)
def test_a_name_is_no_path(given: str, shown: str) -> None:
    assert plain_name(given) == shown


# The life of a batch, and what is kept of it


def test_what_is_over_stays_over() -> None:
    begun = job.begin(BATCH, 5, ["m"], 110)
    cancelled = job.cancel(begun, 120)
    assert job.cancel(cancelled, 130) is cancelled
    over = job.finish(cancelled, Counts(5, 2, 1, 0, 2), BatchUsage(), 140)
    assert (over.status, over.ended_s) == ("cancelled", 140)
    assert not job.is_late(over, 1e9)
    with pytest.raises(Conflict):
        job.cancel(over, 150)
    with pytest.raises(AssertionError):
        job.finish(cancelled, Counts(5, 2, 1, 0, 1), BatchUsage(), 140)


def test_a_batch_is_late_from_its_last_second_on() -> None:
    assert not job.is_late(BATCH, 199.9)
    assert job.expire(BATCH, 200).ends_as == "expired"


def test_a_store_has_one_server_and_gives_the_next_what_it_had(tmp_path: Path) -> None:
    file = StoredFile(id="file-in", owner="a", filename="x", purpose="batch", size_bytes=1, created_s=1)

    async def fill(store: BatchStore) -> None:
        content = store.new_upload()
        content.write_bytes(b"x")
        await store.add_file(file, content)
        await store.put(BATCH)
        await store.put(job.begin(BATCH, 1, ["m"], 110))
        store.new_upload().write_bytes(b"of a server that was killed")

    store = BatchStore(tmp_path)
    with pytest.raises(ConfigError, match="another server uses"):
        BatchStore(tmp_path)
    asyncio.run(fill(store))
    store.close()
    store = BatchStore(tmp_path)
    assert store.files == {"file-in": file}
    assert store.batches["batch_1"].status == "in_progress"
    assert list((tmp_path / "work").iterdir()) == []
    assert store.content("file-in").read_bytes() == b"x"
    store.close()


def test_a_form_of_many_parts_is_refused_at_the_seventeenth() -> None:
    reader = FormReader("multipart/form-data; boundary=b", bytearray().extend)
    with pytest.raises(InvalidRequest, match="more than 16 fields"):
        reader.feed(b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\nx\r\n' * 17)


def test_what_ended_long_ago_is_forgotten_though_nobody_asks() -> None:
    progress = Progress(0.0)
    for second in range(1000):
        progress.add(10, float(second))
    assert len(progress._ended) < 40
    assert progress.speed(999.0).tokens_per_s == pytest.approx(10, rel=0.1)


def test_an_index_that_cannot_be_written_is_not_the_files_fault(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    body = {"model": "m", "prompt": "x"}
    file.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}))
    order = CheckOrder(str(file), str(tmp_path / "nowhere" / "index"), "/v1/completions", 1 << 20, 10)
    report = check_file(order)
    assert not report.problems
    assert "No such file" in str(report.trouble)


def test_what_is_the_same_for_all_batches_is_asked_once() -> None:
    schedule, asked = LineSchedule(), Counter[str]()
    for number in range(300):
        schedule.add(f"b{number}", "a", ("m",), make_lines(*[0] * 10))

    def load_tokens(model: str) -> float:
        asked["load"] += 1
        return 0.0

    def has_room(model: str, running: int) -> bool:
        asked["room"] += 1
        return running < 8

    taken = list(schedule.take(0.0, load_tokens, has_room))
    assert len({line.batch for line in taken}) == 8
    assert asked == {"load": 1, "room": 9}


def test_a_key_keeps_its_last_batches_and_those_that_are_not_over() -> None:
    def batch(owner: str, number: int, ended_s: int | None) -> Batch:
        return msgspec.structs.replace(BATCH, id=f"{owner}-{number}", owner=owner, ended_s=ended_s)

    many = [batch("a", number, 1000) for number in range(job.MAX_ENDED + 3)]
    kept = [batch("a", 9999, None), batch("b", 0, 1000)]
    found = job.out_of_date([*many, *kept], now=1001, keep_s=100)
    assert [one.id for one in found] == ["a-0", "a-1", "a-2"]
    assert len(job.out_of_date([*many, *kept], now=1100, keep_s=100)) == len(many) + 1
