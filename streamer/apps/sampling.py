"""Sampling options as a person gave them, over what the checkpoint recommends."""

from dataclasses import dataclass, replace

from streamer.config.load import GenerationDefaults
from streamer.engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """None stands for the default of generation_config.json; see `SamplingParams` for meanings."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def params(self, defaults: GenerationDefaults) -> SamplingParams:
        """Return complete parameters; the seed is drawn where none was given. Raises UsageError for a bad value."""
        params = SamplingParams(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            min_p=0.0 if self.min_p is None else self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=self.stop,
            logprobs=self.logprobs,
        )
        return params.with_seed()


def redrawn(params: SamplingParams) -> SamplingParams:
    """Return `params` with another seed, so that the same question gets another answer."""
    return replace(params, seed=None).with_seed()
