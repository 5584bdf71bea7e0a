"""The search for plans: finds the best plans for a model and some hardware by their estimates, and says why."""

from tensorshard.predict.search.find_plans import find_plans
from tensorshard.predict.search.plan_search import FoundPlan, PlanSearch

__all__ = ["FoundPlan", "PlanSearch", "find_plans"]
