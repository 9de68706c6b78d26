"""`dovetail plan` from the command line: applications, comparisons, pictures, replays, fleets, and mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dovetail.cli.main import build_app
from dovetail.cli.plan_fleet import spread_labels
from dovetail.errors import ConfigError
from dovetail.plan.options import Mode
from dovetail.plan.plan_file import read_plan
from dovetail.plan.runtime import provisioners_for

APPS = """
prices: alibaba-fc
apps:
  search: {model: wrn50-5, rate: 2.0, slo: 500ms}
  tags: {model: wrn50-5, rate: 0.05, slo: 6s}
  archive: {model: wrn50-4, rate: 0.02, slo: 12s}
"""
FLEET = """
prices: own-machines
trace: trace.csv
profile: profile.json
catalogue: {all: {shape: small, share: 8}}
nodes: {amx-32c: {max: 3}, a100-80g: {max: 2}}
attainment: 0.9
"""


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build_app("plan"), ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_applications_become_a_plan_that_can_be_explained_compared_and_replayed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "apps.yaml").write_text(APPS)
    plan, plot = tmp_path / "plan.yaml", tmp_path / "frontier.svg"
    said = run(str(tmp_path / "apps.yaml"), "--explain", "--compare", "--out", str(plan), "--plot", str(plot))
    assert "the strictest SLO is search's 0.5 s" in said
    assert "HarmonyBatch" in said
    assert plot.read_text().startswith("<svg")
    replayed = json.loads(run("replay", str(plan), "--hours", "0.2", "--json"))
    assert replayed["requests"] > 500
    assert replayed["late_share"] < 0.011
    disturbed = run("replay", str(plan), "--hours", "0.05", "--cores", "40", "--kill", "20", "--change", "search*3@40",
                    "--window", "10")  # fmt: skip
    assert "replanned at" in disturbed
    with pytest.raises(ConfigError, match="--change sarch: no such application; there are search"):
        run("replay", str(plan), "--change", "sarch*3@40")


def test_the_machine_readable_plan_has_every_group(tmp_path: Path) -> None:
    (tmp_path / "apps.yaml").write_text(APPS)
    plan = json.loads(run(str(tmp_path / "apps.yaml"), "--json", "--compare"))
    assert sorted(name for group in plan["groups"] for name in group["apps"]) == ["archive", "search", "tags"]
    assert plan["cost_per_hour"] == pytest.approx(sum(g["forecast"]["cost_per_hour"] for g in plan["groups"]))
    exact = next(other for other in plan["compared"] if other["name"] == "exact")
    assert exact["cost_per_hour"] <= plan["compared"][0]["cost_per_hour"] * (1 + 1e-6)


def test_a_file_says_in_which_modes_functions_may_run_and_so_does_its_plan(tmp_path: Path) -> None:
    (tmp_path / "apps.yaml").write_text(APPS.replace("slo: 500ms", "slo: 9s") + "modes: [partitioned]\n")
    run(str(tmp_path / "apps.yaml"), "--out", str(tmp_path / "plan.yaml"))
    plan = read_plan(tmp_path / "plan.yaml")
    assert {group.mode for group in plan.groups} == {Mode.PARTITIONED}
    assert {provisioner.modes for provisioner in provisioners_for(plan).values()} == {(Mode.PARTITIONED,)}


def test_frontiers_are_shown() -> None:
    regions = json.loads(run("frontier", "wrn50-5", "--no-cold-starts", "--json"))
    assert {region["mode"] for region in regions["slo_s"]} <= {"gpu", "cpu", "partitioned"}
    ends = [region["end"] for region in regions["slo_s"]]
    assert ends == sorted(ends)


def test_the_thesiss_templates_are_shown() -> None:
    found = CliRunner().invoke(build_app("bench"), ["bench", "templates", "wrn50-4", "--json"])
    assert found.exit_code == 0, found.output
    assert all(row["cheaper"] > 0 for row in json.loads(found.output)["sweep"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (APPS.replace("rate: 2.0", "rate: 0"), r"apps\.search\.rate"),
        (APPS.replace("prices: alibaba-fc", "prices: alibaba-fc\nreserve: -1"), "reserve"),
        (APPS.replace("prices: alibaba-fc", "prices: alibaba-fc\nmodes: [tpu]"), "modes"),
        (APPS.replace("slo: 6s", "slo: soon"), r"apps\.tags\.slo: expected a duration"),
        (APPS.replace("model: wrn50-4", "model: wrn51"), "no function profile 'wrn51'"),
        (APPS.replace("alibaba-fc", "gcp"), "no sheet 'gcp'"),
        (APPS.replace("slo: 500ms", "slo: 1ms"), r"apps\.search\.slo: wrn50-5 cannot be answered within 0\.001 s"),
        (APPS + "  extra: 1\n", r"apps\.extra"),
        (FLEET.replace("amx-32c", "tpu"), r"nodes\.tpu: own-machines has no such machine; it has amx-32c, a100-80g"),
    ],
)
def test_a_mistake_names_its_key(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        run(str(tmp_path / "file.yaml"))


def small_profile() -> dict[str, Any]:
    def hardware(kind: str, scale: float) -> dict[str, Any]:
        rows = [{"mean_length": n, "batch_ms": [[1, 20 * scale], [64, 60 * scale]]} for n in (128, 4096)]
        return {"kind": kind, "prefill_ms": [[1, 10 * scale], [4096, 900 * scale]], "decode_ms": rows}

    shape = {"weight_gib": 12.6, "kv_kib_per_token": 512, "layers": 32}
    return {"models": {"small": {"shape": shape, "hardware": {"c": hardware("cpu", 4), "g": hardware("gpu", 1)}}}}


def test_the_guides_plan_can_be_applied_and_one_with_gpus_says_what_to_do(tmp_path: Path) -> None:
    from dovetail.plan.plan_file import read_plan
    from dovetail.plan.runtime import check_runnable

    page = (Path(__file__).parents[2] / "docs/guide/costs.md").read_text()
    text = page.split("```yaml\n")[1].split("```")[0]
    assert "apps:" in text
    (tmp_path / "apps.yaml").write_text(text)  # as it is: a newcomer has no other file
    out = tmp_path / "plan.yaml"
    run(str(tmp_path / "apps.yaml"), "--out", str(out))
    check_runnable(read_plan(out))
    (tmp_path / "gpu.yaml").write_text(APPS)
    planned = run(str(tmp_path / "gpu.yaml"), "--out", str(out))
    assert "on GPU functions, which `dovetail apply` does not run" in planned
    with pytest.raises(ConfigError, match=r"--prices own-machines"):
        check_runnable(read_plan(out))


def test_labels_of_fleets_do_not_lie_over_each_other() -> None:
    boxes = [(10.0, 50.0, 30.0), (12.0, 50.0, 31.0), (30.0, 50.0, 29.0), (200.0, 50.0, 30.0)]
    rises = spread_labels(boxes, 9.0)
    places = [(left, left + width, at + rise) for (left, width, at), rise in zip(boxes, rises, strict=True)]
    for number, (left, right, at) in enumerate(places):
        for other_left, other_right, other_at in places[:number]:
            assert right <= other_left or left >= other_right or abs(at - other_at) >= 9.0
    assert rises[3] == 0.0


def test_what_is_no_plan_or_no_template_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "apps.yaml").write_text(APPS)
    with pytest.raises(ConfigError, match=r"apps.yaml: not a plan of functions, which `dovetail plan FILE --out"):
        run("replay", str(tmp_path / "apps.yaml"))
    for template in ("0-9,10-18", "0-9", "0-9,9-17", "0-9x0,9-18"):
        with pytest.raises(ConfigError, match=f"--template {template}: "):
            run("profile", "wrn50-1", "--template", template)


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    rows = [f"{n * 0.5:.3f},{n * 7 % 8},{200 + n % 700},{20 + n % 90}" for n in range(120)]
    (tmp_path / "trace.csv").write_text("\n".join(["arrival_s,model,input_tokens,output_tokens", *rows]))
    (tmp_path / "profile.json").write_text(json.dumps(small_profile()))
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return tmp_path / "fleet.yaml"


def test_the_cheapest_fleet_is_the_cheapest_of_all_that_suffice(fleet: Path) -> None:
    """Against every number of nodes, simulated one by one."""
    from dovetail.plan.fleet import fleet_planner

    with fleet_planner(fleet) as planner:
        found = planner.run()
        every = [(cpus, gpus) for cpus in range(4) for gpus in range(3) if cpus or gpus]
        simulated = planner.simulate(planner.trial(counts) for counts in every)
    best = found.enough()[0]
    enough = [tried.counts for tried in simulated if tried.attainment >= 0.9]
    assert found.per_hour(best.counts) == pytest.approx(min(found.per_hour(counts) for counts in enough))
    assert best.attainment == next(tried.attainment for tried in simulated if tried.counts == best.counts)
    assert len(found.tries) < 11


def test_a_fleet_that_only_one_seed_can_do_with_is_passed_over(fleet: Path) -> None:
    from dovetail.plan.fleet import fleet_planner

    with fleet_planner(fleet) as planner:
        found = planner.run()
        lucky, next_best = found.enough()[:2]
        planner.simulate = lambda trials: [  # type: ignore[method-assign]
            replace(lucky, met=0) if trial.counts == lucky.counts else next_best for trial in trials
        ]
        confirmed = planner.confirm(found, 2)
    assert [(each.best, each.holds(0.9)) for each in confirmed] == [(lucky, False), (next_best, True)]


def test_two_processes_find_what_one_does(fleet: Path) -> None:
    one, two = (json.loads(run(str(fleet), "--jobs", jobs, "--json")) for jobs in ("1", "2"))
    assert (one["nodes"], one["attainment_by_seed"]) == (two["nodes"], two["attainment_by_seed"])
    assert [row["attainment"] for row in one["references"]] == [row["attainment"] for row in two["references"]]


def test_a_fleet_that_cannot_suffice_says_how_close_it_came(fleet: Path) -> None:
    fleet.write_text(FLEET.replace("attainment: 0.9", "attainment: 0.9999").replace("{max: 3}", "{max: 1}").replace(
        "{max: 2}", "{max: 1}"))  # fmt: skip
    with pytest.raises(ConfigError, match=r"99.99|100.0% is not reached .* the best try was"):
        run(str(fleet), "--jobs", "1")
