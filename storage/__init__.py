"""Bytes, offsets, files and drives. Knows tensor names, not what they mean."""

# streamer/__init__.py looks for this marker: a package of another distribution under the same name lacks it.
MOE_STREAMER_PACKAGE = "storage"
