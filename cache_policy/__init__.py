"""Expert cache policies: what to keep, load and evict. Standard library only; no IO, no threads, no clock."""

# streamer/__init__.py looks for this marker: a package of another distribution under the same name lacks it.
MOE_STREAMER_PACKAGE = "cache_policy"
