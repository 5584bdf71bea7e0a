"""The search for plans: the best ones for a model and the machines at hand, on the estimates, with their reasons."""

from tensorshard.planner.find_plans import find_plans
from tensorshard.planner.plan_search import FoundPlan, PlanSearch

__all__ = ["FoundPlan", "PlanSearch", "find_plans"]
