"""Function profiles of the thesis's networks: templates by the partitioner, latency by the platform's arithmetic.

The templates of a profile: the one with the best score (P3), and the chain cut evenly by weights into 2, 3 and 4 stages
of one worker each, which are slower but need the least memory.
"""

from __future__ import annotations

from dovetail.plan.chains import Chain
from dovetail.plan.function_profile import FunctionProfile
from dovetail.plan.known_chains import even_stages
from dovetail.plan.prices import PriceSheet
from dovetail_bench.thesis_hardware import Platform, profile_of
from dovetail_bench.thesis_templates import Partitioner, Template

REFERENCE_VCPUS = 4.0  # of the function that templates are measured by
EVEN_STAGES = (2, 3, 4)


def assumed_profile(chain: Chain, platform: Platform, sheet: PriceSheet) -> FunctionProfile:
    best = Partitioner(chain, platform, sheet, REFERENCE_VCPUS).best()
    even = [even_stages(chain, stages) for stages in EVEN_STAGES]
    return profile_of(chain, platform, [stages_of(best), *even])


def stages_of(template: Template) -> list[tuple[int, int, int]]:
    return [(stage.first, stage.end, stage.workers) for stage in template.stages]
