"""A pipeline at work: stage modules, schedules, what crosses the cuts."""
