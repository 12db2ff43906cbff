"""Command line: parse and render, no logic."""
