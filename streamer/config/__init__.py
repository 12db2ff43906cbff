"""Configuration dataclasses, their loader, and the exception tree. Importable by every streamer module; no torch."""
