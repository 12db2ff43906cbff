"""The forward pass of Kimi K3 (k3-spec §3): one function over ragged rows, for prefill and decode alike."""

import threading
from collections.abc import Callable

import numpy as np

from kernels.activation import all_finite
from kernels.attn_res import mix
from kernels.norm import rms_norm
from kernels.router import route
from streamer.config.errors import NumericsError
from streamer.config.model import ModelConfig
from streamer.experts.source import ExpertSource, TrunkSource
from streamer.experts.weights import KdaWeights, LayerWeights, MoeWeights
from streamer.model.attention import kda_attention, mla_attention
from streamer.model.batch import StepBatch
from streamer.model.feed_forward import MoeRun, RoutingObserver, latent_moe, mlp
from streamer.model.projection import project
from streamer.model.state import KdaState, MemoryStates, MlaCache, StateStore
from streamer.model.times import PartTimes

# Kernels share one thread pool, and numba's workqueue layer aborts the process when two threads enter it.
_COMPUTE = threading.Lock()


class Model:
    """The text model over two sources of weights and a store of states. Holds no state of any sequence itself."""

    def __init__(
        self, config: ModelConfig, trunk: TrunkSource, experts: ExpertSource, states: StateStore | None = None
    ) -> None:
        self.config = config
        self.trunk = trunk
        self.experts = experts
        self.states: StateStore = states or MemoryStates()
        self.observer: RoutingObserver | None = None
        self.times = PartTimes()

    def forward(self, batch: StepBatch, tick: Callable[[int], None] | None = None) -> np.ndarray:
        """Logits float32 [M, vocab] of `batch.logit_rows`. The sequences' states hold the step pending.

        `tick(layer)` runs before each layer; what it raises cancels the step (the caller rolls the states back).
        Raises NumericsError naming the layer when NaN or infinity appears, StorageError when a read fails.
        """
        with _COMPUTE:
            return self._forward(batch, tick)

    def _forward(self, batch: StepBatch, tick: Callable[[int], None] | None) -> np.ndarray:
        config = self.config
        snapshots = -(-config.n_layers // config.attn_res_block_size)
        # Snapshots in order, the running sum right behind them: to archive the sum is to move on by one plane.
        sources = np.empty((snapshots + 1, batch.tokens.shape[0], config.hidden_size), np.float32)
        with self.times.head:
            sources[0] = self.trunk.embed(batch.tokens)
        archived = 0
        for layer in range(config.n_layers):
            if tick:
                tick(layer)
            archived = self._layer(layer, batch, sources, archived)
            if not all_finite(sources[archived]):
                raise NumericsError(
                    f"layer {layer}: the hidden state became NaN or infinite. The answer would be noise from here on; "
                    "check the checkpoint with `streamer inspect`, and report the prompt if it is whole."
                )
        with self.times.head:
            return self._logits(batch, sources, archived + 1)

    def _layer(self, layer: int, batch: StepBatch, sources: np.ndarray, archived: int) -> int:
        """One decoder layer (k3-spec §3.2) on `sources` in place; returns the number of archived snapshots."""
        config, weights = self.config, self.trunk.layer(layer)
        eps = config.rms_norm_eps
        with self.times.attention:
            h = mix(sources, archived + 1, weights.attention_gamma, eps)
            attended = self._attention(layer, weights, rms_norm(h, weights.input_norm, eps), batch)
        if layer % config.attn_res_block_size == 0:
            archived += 1
            sources[archived] = attended  # the residual restarts
        else:
            sources[archived] += attended
        m = mix(sources, archived + 1, weights.mlp_gamma, eps)
        x = rms_norm(m, weights.post_attention_norm, eps)
        count = archived + 1

        def predict(layer: int) -> None:
            if not batch.prefill:
                self._predict(layer, sources, count)

        if isinstance(weights.ffn, MoeWeights):
            run = MoeRun(config, self.experts, batch.prefill, self.observer, predict, self.times)
            sources[archived] += latent_moe(x, layer, weights.ffn, run)
        else:
            predict(layer)
            with self.times.shared:
                sources[archived] += mlp(x, weights.ffn, config)
        return archived

    def _predict(self, layer: int, sources: np.ndarray, count: int) -> None:
        """Ask the routers of later layers what they would choose now, from `count` snapshots and running sums.

        What a later layer will really see is its own mix of the sources then; the best estimate is that mix of the
        sources now. Where a block restarts in between, today's running sum is a snapshot of it: the same mix.
        """
        config = self.config
        for later in self.experts.ahead(layer):
            router = self.trunk.router(later)
            if router is None:
                return
            m = mix(sources, count, router.mlp_gamma, config.rms_norm_eps)
            logits = project(rms_norm(m, router.norm, config.rms_norm_eps), router.gate)
            moe = config.moe
            self.experts.predict(later, route(logits, router.bias, moe.top_k, moe.routed_scaling_factor)[0])

    def _attention(self, layer: int, weights: LayerWeights, x: np.ndarray, batch: StepBatch) -> np.ndarray:
        config = self.config
        sequences = [segment.state for segment in batch.segments]
        with self.states.open(layer, sequences) as states:
            pairs = list(zip(batch.segments, states, strict=True))
            if isinstance(weights.attention, KdaWeights):
                kda_rows = [(segment, state) for segment, state in pairs if isinstance(state, KdaState)]
                return kda_attention(x, weights.attention, config.kda, config.rms_norm_eps, kda_rows)
            mla_rows = [(segment, state) for segment, state in pairs if isinstance(state, MlaCache)]
            return mla_attention(x, weights.attention, config.mla, mla_rows)

    def _logits(self, batch: StepBatch, sources: np.ndarray, count: int) -> np.ndarray:
        head = self.trunk.head()
        h = mix(np.ascontiguousarray(sources[:, batch.logit_rows]), count, head.gamma, self.config.rms_norm_eps)
        logits = project(rms_norm(h, head.norm, self.config.rms_norm_eps), head.lm_head)
        if not all_finite(logits):
            raise NumericsError(
                "lm_head: the logits became NaN or infinite after the last layer. Any token chosen from them would be "
                "noise; check the checkpoint with `streamer inspect`: is the shard with lm_head and norm whole?"
            )
        return logits
