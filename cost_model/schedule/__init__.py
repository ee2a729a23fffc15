"""Schedules of plans: tasks in one global order, and the timelines that follow."""
