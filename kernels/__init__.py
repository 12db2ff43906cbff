"""Kernels of the forward pass: arrays in, arrays out. Definitions in reference/, fast versions beside it."""

# streamer/__init__.py looks for this marker: a package of another distribution under the same name lacks it.
MOE_STREAMER_PACKAGE = "kernels"
