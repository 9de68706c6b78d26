"""Price sheets as YAML files: what a platform charges, in which quanta it bills, and which sizes it offers (P2).

Knows no models. Sheets that come with the package are named without a path: alibaba-fc, aws-lambda, own-machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dovetail.config import FROM_FILE, Duration, describe
from dovetail.errors import ConfigError

SHEETS = Path(__file__).parent / "sheets"
T = TypeVar("T", bound=BaseModel)
_TINY = 1e-9  # of a quantum: what floats add to a whole number of quanta


class Section(BaseModel):
    """Part of a YAML file: a key that it does not know is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Rates(Section):
    """In the sheet's currency."""

    vcpu_s: float = Field(ge=0)
    memory_gb_s: float = Field(ge=0)
    gpu_gb_s: float = Field(default=0.0, ge=0)  # per GB of GPU memory
    invocation: float = Field(default=0.0, ge=0)
    idle_share: float | None = Field(default=None, ge=0, le=1)  # of these, for a function kept warm; None = not sold


class CpuSizes(Section):
    vcpus: tuple[float, ...] = Field(min_length=1)
    gb_per_vcpu: tuple[float, float]  # least and most memory that a vCPU may have
    max_memory_gb: float = Field(gt=0)

    @field_validator("vcpus")
    @classmethod
    def _rising(cls, vcpus: tuple[float, ...]) -> tuple[float, ...]:
        if list(vcpus) != sorted(set(vcpus)) or vcpus[0] <= 0:
            raise ValueError("expected positive numbers that rise")
        return vcpus

    def memory_gb(self, vcpus: float, need_gb: float) -> float | None:
        """The least memory for sale with so many vCPUs that holds the need; None if there is none."""
        low, high = (vcpus * ratio for ratio in self.gb_per_vcpu)
        gb = max(low, need_gb)
        return gb if gb <= min(high, self.max_memory_gb) + _TINY else None


class GpuSizes(Section):
    memory_gb: tuple[float, ...] = Field(min_length=1)  # parts of a card for sale
    card_gb: float = Field(gt=0)
    slice: Duration = 0.0  # a part of a card is served in turns of this length per GB; 0 = parts do not share
    vcpus: float = Field(default=0.0, ge=0)  # of the function beside the GPU
    host_memory_gb: float = Field(default=0.0, ge=0)


class Machine(Section):
    """A machine by the hour, as one node of a fleet."""

    per_hour: float = Field(gt=0)
    device: Literal["cpu", "gpu"]
    hardware: str | None = None  # as `nodes.hardware` of a simulator's configuration


class PriceSheet(Section):
    name: str
    source: str  # where the figures come from, and which are assumptions
    currency: str = "USD"
    rates: Rates
    quantum: Duration = Field(ge=0)  # billed time is rounded up to it; 0 = not rounded
    keep_alive: Duration = Field(ge=0)  # how long an idle function stays warm
    cold_start_billed: bool = True
    cpu: CpuSizes
    gpu: GpuSizes | None = None
    max_stages: int = Field(default=8, ge=1)  # of a partitioned model
    run_limit: Duration = 900.0  # of one invocation
    machines: dict[str, Machine] = {}

    def billed_s(self, seconds: float) -> float:
        if not self.quantum:
            return seconds
        return math.ceil(seconds / self.quantum - _TINY) * self.quantum

    def per_second(self, vcpus: float, memory_gb: float, gpu_gb: float = 0.0) -> float:
        rates = self.rates
        return rates.vcpu_s * vcpus + rates.memory_gb_s * memory_gb + rates.gpu_gb_s * gpu_gb

    def smallest_per_second(self, need_gb: float) -> float | None:
        """Of the function with the fewest vCPUs that holds so much."""
        sizes = ((vcpus, self.cpu.memory_gb(vcpus, need_gb)) for vcpus in self.cpu.vcpus)
        return next((self.per_second(vcpus, memory_gb) for vcpus, memory_gb in sizes if memory_gb is not None), None)

    def invocation(self, per_second: float, seconds: float) -> float:
        """One call of a function that costs `per_second` and ran for `seconds`."""
        return self.rates.invocation + per_second * self.billed_s(seconds)


def read_sheet(name: str | Path) -> PriceSheet:
    """A sheet of the package by its name, or a file."""
    known = SHEETS / f"{name}.yaml"
    if known.exists():
        return _shipped(known)
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"prices: no sheet {str(name)!r}; there are {', '.join(sheet_names())}, or give a .yaml file")
    return parse_section(PriceSheet, read_yaml(path), str(path))


def sheet_names() -> Iterable[str]:
    return sorted(path.stem for path in SHEETS.glob("*.yaml"))


@cache
def _shipped(path: Path) -> PriceSheet:
    return parse_section(PriceSheet, read_yaml(path), str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping at the top, got {type(raw).__name__}")
    return raw


def parse_section(kind: type[T], raw: dict[str, Any], origin: str, *, is_written_by_us: bool = False) -> T:
    """A file that a command has written has plain numbers of seconds; whoever writes one by hand gives units."""
    try:
        return kind.model_validate(raw, context=None if is_written_by_us else FROM_FILE)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {describe(error)}") from error
