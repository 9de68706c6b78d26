"""What Ray's own package reads out of our RayCluster resource."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

config = pytest.importorskip(
    "ray.autoscaler._private.kuberay.autoscaling_config",
    reason="the extra `cluster` is not installed; `make cluster` runs this",
)

MANIFEST = Path(__file__).parents[2] / "deploy" / "kuberay.yaml"
GIB = 2**30


def test_ray_derives_a_valid_configuration_from_the_manifest() -> None:
    (cluster,) = (one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "RayCluster")
    derived = config._derive_autoscaling_config_from_ray_cr(cluster)  # validates it, too
    assert derived["cluster_name"] == "dovetail"
    types = derived["available_node_types"]
    assert types.keys() == {"headgroup", "joiners"}
    assert (types["joiners"]["min_workers"], types["joiners"]["max_workers"]) == (0, 16)
    assert derived["max_workers"] == 16
    for one in types.values():
        assert one["resources"] == {"CPU": 2, "memory": 8 * GIB}


def test_ray_refuses_a_manifest_whose_containers_name_no_cores() -> None:
    (cluster,) = (one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "RayCluster")
    del cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]
    with pytest.raises(ValueError, match="CPU"):
        config._derive_autoscaling_config_from_ray_cr(cluster)
