"""The words of a model: a tokenizer in a process of its own that encodes as the library does, and what tokens are."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from gateway_builders import byte_fallback_tokenizer, byte_level_tokenizer, word_piece_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel

from dovetail.gateway.text import tokenizer_process
from dovetail.gateway.text.token_table import TokenTable
from dovetail.gateway.text.tokenizer_bundle import TokenizerBundle, open_tokenizer
from dovetail.gateway.text.tokenizer_child import framed
from dovetail.gateway.text.tokenizer_process import ForkServer, TokenizerLost, fork_server

TEXTS = [
    "",
    "the cats sat",
    "<s>an anna, banana! <tool> ana<|end|> Äh <mask>\n" * 3,
    "naïve Paris 🗼 日本語 👩‍👩‍👧‍👦 \u0000 \ufffd e\u0301",
    "<|user|>hi<|end|>\n\n  two  spaces\t",
    "word " * 1500,
    "лог 123 " * 9000,
]


def merging_tokenizer() -> Tokenizer:
    """Merges, special tokens in and beyond the vocabulary with plain ones between them, truncation, a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["an", "na", "ana", "nan", "anna", "ban"]
    merges = [("a", "n"), ("n", "a"), ("an", "a"), ("na", "n"), ("an", "na"), ("b", "an")]
    tokenizer = Tokenizer(BPE({token: at for at, token in enumerate(["<s>", *alphabet, *words])}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", AddedToken("<|end|>", rstrip=True)])
    tokenizer.add_tokens([AddedToken("<tool>", single_word=True), AddedToken("banana", normalized=True)])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(40)
    return tokenizer


def unigram_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(Unigram([("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("c", -3.0), ("at", -2.5)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def gapped_tokenizer() -> Tokenizer:
    return Tokenizer(WordLevel({"?": 0, "the": 7, "longest one": 70_000}, unk_token="?"))


MAKERS = [
    byte_level_tokenizer,
    byte_fallback_tokenizer,
    word_piece_tokenizer,
    merging_tokenizer,
    unigram_tokenizer,
    gapped_tokenizer,
]


def saved(folder: Path, tokenizer: Tokenizer, end: str = "") -> Path:
    path = folder / "tokenizer.json"
    path.write_text(tokenizer.to_str() + end)
    return path


@pytest.mark.parametrize("make", MAKERS)
def test_a_process_encodes_and_the_table_decodes_as_the_library_does(
    make: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    tokenizer = make()
    bundle = open_tokenizer(saved(tmp_path, tokenizer))
    tokenizer.no_truncation()

    async def test() -> None:
        for special in (True, False):
            wanted = [tokenizer.encode(text, add_special_tokens=special).ids for text in TEXTS]
            assert await bundle.encode(TEXTS, add_special_tokens=special) == wanted
            for text, ids in zip(TEXTS, wanted, strict=True):
                assert await bundle.encode([text], add_special_tokens=special) == [ids]
                assert await bundle.decode(ids, skip_special_tokens=special) == tokenizer.decode(
                    ids, skip_special_tokens=special
                )
        pair = await bundle.encode_pair("the", "an anna")
        assert pair == tokenizer.encode("the", "an anna").ids

    asyncio.run(test())
    assert bundle.pid != os.getpid()


@pytest.mark.parametrize("make", MAKERS)
def test_a_table_knows_every_token_and_nothing_else(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    table = msgspec.msgpack.decode(msgspec.msgpack.encode(TokenTable.of(tokenizer)), type=TokenTable)
    vocab = tokenizer.get_vocab()
    assert {token: table.token_to_id(token) for token in vocab} == vocab
    last = max(vocab.values())
    for number in {*vocab.values(), 1, 2, 6, 8, last + 1, 2**31, -1}:
        assert table.id_to_token(number) == (tokenizer.id_to_token(number) if number >= 0 else None)
    assert table.token_to_id("no such token") is None
    assert table.token_to_id("") is None
    assert table.max_token_chars == max(map(len, vocab))
    assert table.vocab_size == len(vocab)
    added = tokenizer.get_added_tokens_decoder()
    assert table.added == {number: token.content for number, token in added.items()}
    assert table.special_ids == {number for number, token in added.items() if token.special}


def test_tables_of_the_same_tokens_have_the_same_digest_and_others_have_not() -> None:
    first, second = TokenTable.of(byte_level_tokenizer()), TokenTable.of(byte_level_tokenizer())
    assert first.digest == second.digest
    other = byte_level_tokenizer()
    other.add_tokens(["more"])
    assert TokenTable.of(other).digest != first.digest


def test_a_tokenizer_of_nothing_has_tokens_of_one_character() -> None:
    assert TokenTable.of(Tokenizer(models.BPE())).max_token_chars == 1


def test_models_with_the_same_file_share_their_words_while_they_live(tmp_path: Path) -> None:
    path = saved(tmp_path, byte_level_tokenizer())
    first = open_tokenizer(path)
    assert open_tokenizer(path) is first
    assert open_tokenizer(saved(tmp_path, byte_level_tokenizer(), "\n")) is not first
    with pytest.raises(ValueError, match="checksum"):
        open_tokenizer(path, "00" * 32)
    kept, process = weakref.ref(first), psutil.Process(first.pid)
    asyncio.run(first.encode(["a"], add_special_tokens=False))
    del first
    gc.collect()
    assert kept() is None
    wait_until(lambda: not process.is_running())


@pytest.mark.parametrize("damage", ["cut", "merges", "pieces"])
def test_a_damaged_file_is_refused_and_leaves_no_process(damage: str, tmp_path: Path) -> None:
    path = saved(tmp_path, merging_tokenizer())
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:500])
    elif damage == "merges":
        content = json.loads(path.read_text())
        content["model"]["merges"][0] = ["missing", "a"]
        path.write_text(json.dumps(content))
    else:
        path.write_text('{"version": "1.0"}')
    before = forks()
    with pytest.raises(ValueError, match=r"."):
        open_tokenizer(path)
    gc.collect()
    wait_until(lambda: forks() <= before)


def forks() -> set[int]:
    assert fork_server.pid is not None or not fork_server.warm()
    assert fork_server.pid is not None
    return {process.pid for process in psutil.Process(fork_server.pid).children()}


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come true")


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


@pytest.fixture
def bundle(tmp_path: Path) -> TokenizerBundle:
    return open_tokenizer(saved(tmp_path, byte_level_tokenizer()))


def test_a_process_that_ends_is_replaced_and_its_calls_are_answered(bundle: TokenizerBundle) -> None:
    async def test() -> None:
        wanted = await bundle.encode(["hello"], add_special_tokens=False)
        first = bundle.pid
        stop(first)
        calls = [asyncio.create_task(bundle.encode(["hello"], add_special_tokens=False)) for _ in range(20)]
        await asyncio.sleep(0.02)
        os.kill(first, signal.SIGKILL)
        assert await asyncio.gather(*calls) == [wanted] * 20
        assert bundle.pid != first

    asyncio.run(test())


def test_a_process_that_hangs_is_killed_and_only_the_call_that_it_was_at_is_refused(
    bundle: TokenizerBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        wanted = await bundle.encode(["hello"], add_special_tokens=False)
        first = psutil.Process(bundle.pid)
        stop(first.pid)
        with monkeypatch.context() as patched:  # for the first call alone: the next process may take its time
            patched.setattr(tokenizer_process, "WAIT_S", 0.3)
            calls = [asyncio.create_task(bundle.encode(["hello"], add_special_tokens=False)) for _ in range(3)]
            await asyncio.sleep(0)
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(found[0], TokenizerLost)
        assert "takes more than" in str(found[0])
        assert found[1:] == [wanted] * 2
        await asyncio.to_thread(wait_until, lambda: not first.is_running())

    if sys.platform == "linux":
        asyncio.run(test())


def test_a_call_that_ends_two_processes_is_refused(bundle: TokenizerBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        call = asyncio.create_task(bundle.encode(["hello " * 20_000], add_special_tokens=False))
        ended = set()
        while not call.done():
            if bundle.pid not in ended:
                ended.add(bundle.pid)
                stop(bundle.pid)  # before it can answer
                await asyncio.sleep(0.05)
                os.kill(bundle.pid, signal.SIGKILL)
            await asyncio.sleep(0.001)
        with pytest.raises(TokenizerLost, match="has ended"):
            await call
        assert len(ended) == 2
        assert await bundle.encode(["a"], add_special_tokens=False)

    asyncio.run(test())


def test_the_process_that_forks_is_replaced_when_it_has_ended(bundle: TokenizerBundle, tmp_path: Path) -> None:
    assert fork_server.pid is not None
    os.kill(fork_server.pid, signal.SIGKILL)
    other = open_tokenizer(saved(tmp_path, byte_level_tokenizer(), "\n"))
    assert asyncio.run(other.encode(["a"], add_special_tokens=False))
    assert asyncio.run(bundle.encode(["a"], add_special_tokens=False))


def test_no_process_outlives_a_gateway_that_is_killed(tmp_path: Path) -> None:
    path = saved(tmp_path, byte_level_tokenizer())
    code = (
        "import sys, time; from pathlib import Path\n"
        "from dovetail.gateway.text.tokenizer_bundle import open_tokenizer\n"
        "from dovetail.gateway.text.tokenizer_process import fork_server\n"
        "bundle = open_tokenizer(Path(sys.argv[1])); print(bundle.pid, fork_server.pid, flush=True); time.sleep(60)"
    )
    gateway = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert gateway.stdout is not None
        helpers = [psutil.Process(int(pid)) for pid in gateway.stdout.readline().split()]
    finally:
        gateway.kill()
        gateway.wait()
    assert len(helpers) == 2
    wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in helpers))


def test_a_gateway_that_goes_while_a_file_is_read_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServer()
    control, pid = server.fork()
    process = psutil.Process(pid)
    with control:
        control.sendall(framed(byte_level_tokenizer().to_str().encode()))
    process.wait(timeout=10)
    server._stop()
    assert capfd.readouterr().err == ""


def test_a_cancelled_call_keeps_the_answers_of_the_others_in_their_order(bundle: TokenizerBundle) -> None:
    async def test() -> None:
        calls = [asyncio.create_task(bundle.encode([letter], add_special_tokens=False)) for letter in "abcdef"]
        await asyncio.sleep(0)
        calls[2].cancel()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(found[2], asyncio.CancelledError)
        ids = [bundle.table.token_to_id(letter) for letter in "abdef"]
        assert [answer for place, answer in enumerate(found) if place != 2] == [[[number]] for number in ids]

    asyncio.run(test())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no niceness of their own")
def test_long_texts_give_way_and_short_ones_do_not(bundle: TokenizerBundle) -> None:
    async def test() -> None:
        for size in (1, 10_000, 100_000):
            await bundle.encode(["a" * size], add_special_tokens=False)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    asyncio.run(test())
    threads = [int(task.name) for task in Path(f"/proc/{bundle.pid}/task").iterdir()]
    found = sorted(os.getpriority(os.PRIO_PROCESS, thread) for thread in threads)
    assert found[-1] == min(before + 10, 19)
    assert set(found[:-1]) == {before}
