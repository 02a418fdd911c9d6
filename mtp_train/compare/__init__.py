"""Runs beside each other: settings that differ, acceptance, cost, verdicts."""
