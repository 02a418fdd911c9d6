"""Experiments whose results the documentation states: runs in, committed figures out."""
