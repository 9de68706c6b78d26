"""The state of several gateways in a real etcd: facts as in SQLite, one leader, and nothing from a deposed one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_fixture import Etcd, need_etcd, running_etcd
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.cluster.durable import Durable, SqliteDurable
from dovetail.config import Config
from dovetail.errors import ConfigError, Overloaded
from dovetail.gateway.workers import etcd_state
from dovetail.gateway.workers.adopted import WorkerRecords
from dovetail.gateway.workers.etcd import EtcdClient, EtcdUnreachable, parse_address
from dovetail.gateway.workers.etcd_state import Deposed, EtcdDurable, Leadership
from dovetail.gateway.workers.remote_workers import WireKeys

NUMBERS = itertools.count()  # for prefixes that nobody had before


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def prefix() -> str:
    return f"tests/{next(NUMBERS)}"


def leading(etcd: Etcd, name: str, folder: Path, lease_s: int = 3) -> EtcdDurable:
    durable = EtcdDurable(parse_address(etcd.state(name, lease_s)), folder, "the test")
    durable.check()
    assert durable.campaign() is None
    durable.start(lambda why: None)
    return durable


# The same facts in both

KINDS, NAMES = st.sampled_from(["model", "worker", "worker@a"]), st.sampled_from(["left", "org/name", "a@b"])
CHANGES = st.lists(st.tuples(KINDS, NAMES, st.none() | st.integers(0, 9) | st.just({"pid": [1]})), max_size=8)
Open = Callable[[], Durable]


def check_facts(open_again: Open, changes: list[tuple[str, str, Any]]) -> None:
    """Each is dropped if it is there with this value, else put: to be seen at once, and by the next one."""
    expected: dict[tuple[str, str], Any] = {}
    durable = open_again()
    for kind, name, value in changes:
        is_there = (kind, name) in expected and expected[kind, name] == value
        expected.pop((kind, name), None)
        if is_there:
            durable.drop(kind, name)
        else:
            durable.put(kind, name, value)
            expected[kind, name] = value
        assert durable.get(kind, name) == expected.get((kind, name))
    for one in (durable, open_again):
        durable = one() if callable(one) else one
        durable.flush()
        for kind in ("model", "worker", "worker@a"):
            mine = [(name, value) for (of, name), value in expected.items() if of == kind]
            assert list(durable.all(kind).items()) == mine, "the last one written comes last"
        durable.close()


@settings(max_examples=15, deadline=None)
@given(changes=CHANGES)
def test_facts_in_a_file_are_there_for_the_next_server(
    changes: list[tuple[str, str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("s")
    check_facts(lambda: SqliteDurable(folder), changes)


@settings(max_examples=15, deadline=None)
@given(changes=CHANGES)
def test_facts_in_etcd_are_there_for_the_next_gateway(
    changes: list[tuple[str, str, Any]], etcd: Etcd, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name, folder = prefix(), tmp_path_factory.mktemp("s")
    check_facts(lambda: leading(etcd, name, folder), changes)


# One leads

STEPS = st.lists(
    st.tuples(st.sampled_from(["campaign", "renew", "write", "write", "lapse", "resign"]), st.integers(0, 2)),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_whatever_happens_only_the_last_one_that_began_to_lead_writes(steps: list[tuple[str, int]], etcd: Etcd) -> None:
    address = parse_address(etcd.state(prefix(), 60))
    client = EtcdClient(address, 5.0)
    candidates = [Leadership(client, address, str(index)) for index in range(3)]
    last: int | None = None  # who began to lead last
    holds = False  # its key is there
    written: dict[str, str] = {}
    for number, (step, index) in enumerate(steps):
        one = candidates[index]
        if step == "campaign":
            other = one.campaign(0.0)
            assert other == (None if not holds or last == index else str(last))
            last, holds = (index, True) if other is None else (last, holds)
        elif step == "renew" and one.revision:
            if last == index:
                one.renew(0.0)  # nobody has led since, whatever became of the lease
                holds = True
            else:
                with pytest.raises(Deposed):
                    one.renew(0.0)
        elif step == "write" and one.revision:
            if last == index and holds:
                one.write("kind/name", str(number))
                written = {"kind/name": str(number)}
            else:
                with pytest.raises(Deposed):
                    one.write("kind/name", str(number))
        elif step in ("lapse", "resign") and one._lease:  # as after seconds without a word
            client.revoke(one._lease)
            one._lease = one._lease if step == "lapse" else 0
            holds = holds and last != index
        assert one.facts() == written
    client.close()


def test_a_leader_that_was_deposed_says_so_and_has_changed_nothing(etcd: Etcd, tmp_path: Path) -> None:
    name, heard = prefix(), list[str]()
    first = leading(etcd, name, tmp_path)
    first._on_deposed = heard.append
    first.put("model", "mine", 1)
    first.flush()
    first._client.revoke(first.leadership._lease)  # it was out of reach for longer than its lease
    second = leading(etcd, name, tmp_path)
    first.put("model", "mine", 2)
    assert first._thread is not None
    first._thread.join(10)
    assert heard
    assert second.leadership.facts() == {"model/mine": "1"}
    second.close()
    third = leading(etcd, name, tmp_path)
    assert third.all("model") == {"mine": 1}
    third.close()


def test_another_machine_has_the_keys_of_the_wire_and_leaves_the_first_ones_processes_alone(
    etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = prefix()
    first = leading(etcd, name, tmp_path / "a")
    keys = WireKeys.kept(first)
    WorkerRecords(first).started("left", os.getpid(), ["--node", "left"])
    first.close()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(etcd_state, "machine_id", lambda: "elsewhere")
        second = leading(etcd, name, tmp_path / "b")
        assert WireKeys.kept(second)._keys == keys._keys
        assert WorkerRecords(second).host_pool() is None
        WorkerRecords(second).end_others([])  # it has no nodes, and ends nobody: this test is one of those processes
        second.close()
    third = leading(etcd, name, tmp_path / "a")
    assert third.get(f"worker{third.machine}", "left")["pid"] == os.getpid()
    third.close()


class Unheard(EtcdClient):
    """The answer to its next transaction is lost, and that is carried out before the loss, or when `late` is called."""

    is_deaf, is_slow = False, False

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.is_deaf and path == "kv/txn":
            self.is_deaf = False
            self.late = lambda: EtcdClient.call(self, path, body)
            if not self.is_slow:
                self.late()
            raise EtcdUnreachable("lost")
        return super().call(path, body)


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_write_whose_answer_was_lost_holds_once_and_never_after_a_later_one(etcd: Etcd, is_slow: bool) -> None:
    address = parse_address(etcd.state(prefix(), 60))
    client = Unheard(address, 5.0)
    client.is_slow = is_slow
    one = Leadership(client, address, "one")
    assert one.campaign(0.0) is None
    client.is_deaf = True
    with pytest.raises(EtcdUnreachable):
        one.write("kind/name", "1")
    one.write("kind/name", None)
    client.late()
    assert one.facts() == {}
    client.is_deaf = True
    with pytest.raises(EtcdUnreachable):
        one.write("kind/name", "2")
    client.revoke(one._lease)
    one.regain(0.0)  # it was the last one to lead, whatever has become of its write
    one.write("kind/name", "3")
    client.late()
    assert one.facts() == {"kind/name": "3"}
    client.close()


# Trouble


def test_while_etcd_does_not_answer_nothing_is_lost_and_after_the_lease_nothing_is_decided(
    etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = leading(etcd, prefix(), tmp_path, lease_s=2)
    assert durable.trouble() is None
    monkeypatch.setattr(etcd_state, "FLUSH_S", 2.5)
    etcd.pause()
    try:
        durable.put("model", "mine", 1)
        with pytest.raises(Overloaded, match=etcd.host):
            durable.flush()
        assert durable.get("model", "mine") == 1
        assert durable.trouble() is not None
    finally:
        etcd.resume()
    monkeypatch.setattr(etcd_state, "FLUSH_S", 20.0)
    durable.flush()
    assert durable.leadership.facts() == {"model/mine": "1"}
    assert durable.trouble() is None, "nobody else has led"
    durable.close()


def test_an_etcd_that_is_not_there_is_named_at_start(tmp_path: Path) -> None:
    durable = EtcdDurable(parse_address("etcd://u:geheim@127.0.0.1:1,127.0.0.1:2/mine"), tmp_path, "me")
    with pytest.raises(
        ConfigError, match=r"127\.0\.0\.1:1: .*127\.0\.0\.1:2: .*start it, or correct etcd://"
    ) as refused:
        durable.check()
    assert "geheim" not in str(refused.value)


def test_a_prefix_of_somebody_else_is_left_alone(etcd: Etcd, tmp_path: Path) -> None:
    name = prefix()
    address = parse_address(etcd.state(name))
    client = EtcdClient(address, 5.0)
    client.transact([], [etcd_state.etcd.put(f"{name}/theirs", "1")])
    with pytest.raises(ConfigError, match=f"{name}/theirs"):
        EtcdDurable(address, tmp_path, "me").check()
    client.transact([], [etcd_state.etcd.put(f"{name}/format", "dovetail state 9")])
    with pytest.raises(ConfigError, match="dovetail state 9"):
        EtcdDurable(address, tmp_path, "me").check()


def test_a_user_and_a_password_are_asked_for_and_never_said(etcd: Etcd, tmp_path: Path) -> None:
    name = prefix()
    client = EtcdClient(parse_address(etcd.state(name)), 5.0)
    own = {
        "permType": "READWRITE",
        "key": etcd_state.etcd._coded(f"{name}/"),
        "range_end": etcd_state.etcd._coded(f"{name}0"),
    }
    for user in ("root", "dove"):
        client.call("auth/user/add", {"name": user, "password": "ge:heim"})
        client.call("auth/role/add", {"name": user})
        client.call("auth/user/grant", {"user": user, "role": user})
    client.call("auth/role/grant", {"name": "dove", "perm": own})
    client.call("auth/enable", {})
    try:
        address = parse_address(f"etcd://dove:ge%3Aheim@{etcd.host}/{name}?lease=3s")
        durable = EtcdDurable(address, tmp_path, "me")
        durable.check()
        assert durable.campaign() is None
        durable.close()
        for login, where, why in (
            ("", name, "asks for a user"),
            ("dove:geraten@", name, "does not know"),
            ("dove:ge%3Aheim@", "other", "may not read and write other/"),
        ):
            with pytest.raises(ConfigError, match=why) as refused:
                EtcdDurable(parse_address(f"etcd://{login}{etcd.host}/{where}"), tmp_path, "me").check()
            assert "heim" not in str(refused.value)
            assert "geraten" not in str(refused.value)
        assert "heim" not in f"{address!r} {address}"
    finally:
        root = EtcdClient(parse_address(f"etcd://root:ge%3Aheim@{etcd.host}/x"), 5.0)
        root.call("auth/disable", {})


def test_a_connection_with_tls_trusts_whom_it_was_told_to(tmp_path: Path) -> None:
    with running_etcd(tmp_path / "etcd", tls=True) as etcd:
        (certificate,) = etcd.folder.rglob("client/cert.pem")
        durable = EtcdDurable(parse_address(f"etcds://{etcd.host}/mine?ca={certificate}"), tmp_path / "s", "me")
        durable.check()
        durable.close()
        with pytest.raises(ConfigError, match=f"{etcd.host}.*certificate"):
            EtcdDurable(parse_address(f"etcds://{etcd.host}/mine"), tmp_path / "s", "me").check()
    with pytest.raises(ConfigError, match="ca=/nowhere"):
        EtcdDurable(parse_address("etcds://127.0.0.1:1/mine?ca=/nowhere"), tmp_path / "s", "me")


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("etcd://127.0.0.1:2379", "same prefix"),
        ("etcd://u:geheim@nowhere/mine", "expected etcd://"),
        ("etcd://u:geheim@127.0.0.1:2379/mine?leese=3s", "leese"),
        ("etcd://127.0.0.1:2379/mine?lease=1s", "two at least"),
        ("etcd://127.0.0.1:2379/mine?lease=soon", "lease: expected a duration"),
        ("etcd://127.0.0.1:2379/mine?ca=/x", "for etcds"),
        ("etcds://127.0.0.1:2379/mine?cert=/x", "go together"),
    ],
)
def test_what_is_no_address_is_said_without_repeating_it(state: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        parse_address(state)
    assert "geheim" not in str(refused.value)


def test_an_address_has_several_servers_and_a_login() -> None:
    address = parse_address("etcds://u:p%40ss@one:1,[::1]:2/a/b/?lease=1m&cert=c&key=k&ca=a")
    assert address.endpoints == ("https://one:1", "https://[::1]:2")
    assert (address.prefix, address.lease_s, address.user, address.password) == ("a/b", 60, "u", "p@ss")
    assert dict(address.files) == {"ca": "a", "cert": "c", "key": "k"}
    assert str(address) == "etcds://one:1,[::1]:2/a/b"


def test_a_configuration_is_shown_without_the_password() -> None:
    config = Config.model_validate({"server": {"state": "etcd://u:geheim@127.0.0.1:2379/mine"}})
    assert "geheim" not in config.model_dump_json()
    assert "etcd://***@127.0.0.1:2379/mine" in config.model_dump_json()
    assert "geheim" not in repr(config)
    assert config.server.state is not None
    assert "geheim" in config.server.state


def test_a_machine_without_etcd_skips_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.skip.Exception, match="no etcd"):
        need_etcd()
