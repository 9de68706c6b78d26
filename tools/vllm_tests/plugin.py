"""Pytest's side: stand-ins for the modules of vLLM that tests import, and every case's outcome with its reason."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partialmethod
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import anthropic.resources
import openai.resources.responses
import pytest

from vllm_tests import standins
from vllm_tests.not_applicable import DIFFERENT, FORCED, RULES
from vllm_tests.server import OurServer

FOREIGN = ("vllm", "anthropic", "tensorizer", "openai_harmony")
OWN_TOOLS = ("tests.models", "tests.conftest", "tests.entrypoints.pooling.scoring.util")
_cases: dict[str, dict[str, str]] = {}
# What makes a request call a tool, by the client's class that sends it.
_FORCING: list[tuple[Any, dict[str, Any]]] = [
    (openai.resources.responses.AsyncResponses, {"tool_choice": "required", "parallel_tool_calls": False}),
    (anthropic.resources.AsyncMessages, {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
]


class _StandIns(MetaPathFinder, Loader):
    """Any module of vLLM's: what `standins` has under its name, and else classes that nobody may use."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(OWN_TOOLS) and fullname.partition(".")[0] not in FOREIGN:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: standins.find(module.__name__, name)  # type: ignore[method-assign]


sys.meta_path.insert(0, _StandIns())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, reason in RULES:
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))
                break


@pytest.fixture(autouse=True)
def forced_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if re.search(FORCED, request.node.nodeid):
        for resource, options in _FORCING:
            monkeypatch.setattr(resource, "create", partialmethod(resource.create, **options))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped or report.failed:
        rule = next((reason for pattern, reason in RULES if re.search(pattern, report.nodeid)), None)
        outcome = "not applicable" if report.skipped or rule else "failed"
        _cases[report.nodeid] = {"id": report.nodeid, "outcome": outcome, "reason": rule or _reason(report.longrepr)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if report.when == "call" or not report.passed:
        outcome = {"passed": "passed", "failed": "failed", "skipped": "not applicable"}[report.outcome]
        if item.nodeid not in _cases or _cases[item.nodeid]["outcome"] == "passed":
            decided = next((why for pattern, why in DIFFERENT if re.search(pattern, item.nodeid)), None)
            reason = "" if report.passed else decided or _reason(report.longrepr)
            _cases[item.nodeid] = {"id": item.nodeid, "outcome": outcome, "reason": reason}
    return report


def _reason(longrepr: Any) -> str:
    """One line of it."""
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(getattr(longrepr, "errorstring", longrepr)).strip()
    return " ".join(text.split())[:240]


def pytest_runtest_logfinish() -> None:
    """After each case, so that a run that is ended early has its results too."""
    with open(os.environ["DOVETAIL_TEST_CASES"], "w") as file:
        json.dump(list(_cases.values()), file)


def pytest_sessionfinish() -> None:
    OurServer.stop()
    pytest_runtest_logfinish()
