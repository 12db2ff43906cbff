"""The exception tree of streamer. Each message says what was expected, what was found, where, and what to do.

The command line turns these (and `storage.errors.StorageError`, which lives in a leaf that cannot import this file)
into one sentence and exit code 2; `--debug` shows the traceback.
"""


class StreamerError(Exception):
    """Base of every error that is shown to a user as a sentence."""


class ConfigError(StreamerError):
    """config.json (or a TOML configuration) is missing, malformed, or describes what cannot be run."""


class UsageError(StreamerError):
    """A request that cannot be served as asked: a bad flag value, an empty prompt, an unknown token id."""


class TokenizerError(StreamerError):
    """Tokenizer files are missing or do not agree with the model."""


class ContextLimitError(StreamerError):
    """The prompt and the requested tokens do not fit the context size. Nothing is ever truncated silently."""


class NumericsError(StreamerError):
    """NaN or infinity appeared in a layer; the message names it."""
