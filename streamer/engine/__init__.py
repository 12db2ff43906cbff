"""Sequences, scheduling, sampling and state. Counts tokens; knows nothing about text."""
