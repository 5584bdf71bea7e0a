"""What to do and where: the Plan, what it offloads, the schedules of pipelines, and the Mesh with its groups."""

from tensorshard.plan.offload import Offload
from tensorshard.plan.plan import Plan

__all__ = ["Offload", "Plan"]

Plan.__module__ = Offload.__module__ = __name__  # configs name classes by the module that they are imported from
