"""What to do and where: the Plan, what it offloads, the schedules of pipelines, and the Mesh with its groups."""

from tensorshard.plan.offload import Offload
from tensorshard.plan.plan import Plan

__all__ = ["Offload", "Plan"]
