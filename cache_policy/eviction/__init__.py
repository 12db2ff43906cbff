"""Eviction policies, one a file, named by the field's term."""
