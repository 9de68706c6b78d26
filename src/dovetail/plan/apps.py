"""`apps.yaml`: applications with their models, rates and SLOs, and the prices to plan with."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from dovetail.config import Duration
from dovetail.errors import ConfigError
from dovetail.plan.batching import App
from dovetail.plan.function_profile import FunctionProfile, OnnxFile, read_function_profile
from dovetail.plan.onnx_graph import digest_of
from dovetail.plan.options import ALL_MODES, Mode
from dovetail.plan.prices import PriceSheet, Section, parse_section, read_sheet, read_yaml


class AppSection(Section):
    model: str
    rate: float = Field(gt=0)  # requests/s
    slo: Duration = Field(gt=0)


class ModelSection(Section):
    profile: str | None = None  # a name of the package, or a file beside this one; None = the package's of this model
    onnx: str | None = None  # the model itself, where it lies elsewhere than when it was profiled


class AppsFile(Section):
    prices: str
    cold_starts: bool = True  # whether functions that fall idle are started again, and waited for
    # The share by which a run on CPUs may be longer than its profiled 99th percentile; None = as the profile measured.
    reserve: float | None = Field(default=None, ge=0)
    modes: tuple[Mode, ...] = Field(default=ALL_MODES, min_length=1)  # that functions may run in
    models: dict[str, ModelSection] = Field(default_factory=dict)
    apps: dict[str, AppSection] = Field(min_length=1)

    def applications(self) -> list[App]:
        return [App(name, app.model, app.rate, app.slo) for name, app in self.apps.items()]


class Inputs(Section):
    """A file of applications with everything that it names."""

    file: AppsFile
    sheet: PriceSheet
    profiles: dict[str, FunctionProfile]  # by model


def read_apps(path: Path, prices: str | None = None) -> Inputs:
    file = parse_section(AppsFile, read_yaml(path), str(path))
    given = {model: section.profile for model, section in file.models.items() if section.profile is not None}
    names = {app.model: given.get(app.model, app.model) for app in file.apps.values()}
    profiles = {model: read_function_profile(beside(path, name)) for model, name in names.items()}
    for model, section in file.models.items():
        if section.onnx is not None and model in profiles:
            profiles[model] = _with_file(profiles[model], path.parent / section.onnx, f"models.{model}.onnx")
    profiles = {model: profile.model_copy(update={"model": model}) for model, profile in profiles.items()}
    return Inputs(file=file, sheet=read_sheet(beside(path, prices or file.prices)), profiles=profiles)


def _with_file(profile: FunctionProfile, file: Path, key: str) -> FunctionProfile:
    if profile.onnx is None:
        raise ConfigError(f"{key}: its profile was not measured with an ONNX file; `dovetail plan profile {file}` does")
    if digest_of(file) != profile.onnx.sha256:
        raise ConfigError(f"{key}: {file} is not the file that was profiled; run `dovetail plan profile {file}` again")
    return profile.model_copy(update={"onnx": OnnxFile(file=str(file.resolve()), sha256=profile.onnx.sha256)})


def beside(path: Path, name: str) -> str:
    """A file name of a file is relative to that file."""
    other = path.parent / name
    return str(other) if Path(name).suffix in (".yaml", ".yml") and not Path(name).is_absolute() else name
