"""Replay: a stored event log carries its settings; running them again must give the same bytes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.eventlog import EventLog
from dovetail.sim.compositions import from_values
from dovetail.sim.layout import Layout
from dovetail.sim.setup import Setup, build


def settings_of(setup: Setup) -> dict[str, Any]:
    values = {key: str(value) if isinstance(value, Path) else value for key, value in vars(setup).items()}
    values["composition"] = setup.composition.values()
    values["layout"] = None if setup.layout is None else setup.layout.model_dump(mode="json")
    return values


def setup_of(settings: dict[str, Any]) -> Setup:
    values = {**settings, "composition": from_values(settings["composition"])}
    values["trace"] = Path(values["trace"])
    values["profile"] = Path(values["profile"])
    for key in ("config", "lengths", "clients"):
        values[key] = Path(values[key]) if values.get(key) else None
    values["layout"] = Layout.model_validate(values["layout"]) if values["layout"] else None
    values.pop("dovetail_sim")
    return Setup(**values)


def replay(path: Path) -> int:
    """Number of lines that came out the same; the first that differs is an error."""
    try:
        stored = path.read_text(encoding="utf-8").splitlines()
        setup = setup_of(json.loads(stored[0]))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{path}: line 1: not the header of an event log: {error}") from error
    buffer = io.StringIO()
    log = EventLog(buffer)
    log.header(**settings_of(setup))
    build(setup, log).run()
    replayed = buffer.getvalue().splitlines()
    for number, (old, new) in enumerate(zip(stored, replayed, strict=False), start=1):
        if old != new:
            raise ConfigError(f"{path}: line {number}: stored {old}, replayed {new}")
    if len(stored) != len(replayed):
        raise ConfigError(f"{path}: {len(stored)} lines stored, {len(replayed)} replayed")
    return len(stored)
