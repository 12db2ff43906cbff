"""The second half of a layer: the dense MLP, or the router, shared experts and routed experts of a LatentMoE."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernels.activation import situ_glu
from kernels.expert import ExpertShape, combine, expert_mlp
from kernels.norm import rms_norm
from kernels.router import route
from streamer.config.model import ModelConfig
from streamer.experts.source import ExpertSource
from streamer.experts.weights import MlpWeights, MoeWeights
from streamer.model.projection import project
from streamer.model.times import PartTimes

# called with (layer, experts int32 [R, k] in rank order, weights float32 [R, k]) once a layer
RoutingObserver = Callable[[int, np.ndarray, np.ndarray], None]


@dataclass(frozen=True, slots=True)
class MoeRun:
    """What the LatentMoE layers of one step share.

    `predict(layer)` runs while the reads of a decode step's layer are in flight: whoever can tell what later layers
    will want tells the source.
    """

    config: ModelConfig
    source: ExpertSource
    prefill: bool
    observer: RoutingObserver | None
    predict: Callable[[int], None]
    times: PartTimes


def mlp(x: np.ndarray, weights: MlpWeights, config: ModelConfig) -> np.ndarray:
    """down · situ(gate x, up x) (k3-spec §3.7): float32 [R, D] to float32 [R, D]."""
    gate, up = project(x, weights.gate_proj), project(x, weights.up_proj)
    situ_glu(gate, up, np.float32(config.situ_beta), np.float32(config.situ_linear_beta), gate)
    return project(gate, weights.down_proj)


def latent_moe(x: np.ndarray, layer: int, weights: MoeWeights, run: MoeRun) -> np.ndarray:
    """LatentMoE (k3-spec §3.6) of float32 [R, D]; returns float32 [R, D].

    Reads are in flight while the latent projection and the shared experts are computed; experts are computed as they
    land, into per-rank buffers, and summed in rank order.
    """
    config, moe, times = run.config, run.config.moe, run.times
    with times.router:
        experts, shares = route(project(x, weights.gate), weights.bias, moe.top_k, moe.routed_scaling_factor)
    if run.observer:
        run.observer(layer, experts, shares)
    shape = ExpertShape(moe.latent_size, moe.intermediate_size)
    outputs = np.empty((x.shape[0], moe.top_k, moe.latent_size), np.float32)
    with run.source.open(layer, experts, run.prefill) as ready:
        with times.shared:
            z = project(x, weights.down_proj)
            shared = mlp(x, weights.shared, config)
        with times.router:
            run.predict(layer)
        with times.experts:
            for group in ready:
                for expert, block in group:
                    rows, ranks = np.nonzero(experts == expert)
                    outputs[rows, ranks] = expert_mlp(z, rows, block, shape, config.situ_beta, config.situ_linear_beta)
    with times.shared:
        routed = np.empty((x.shape[0], moe.latent_size), np.float32)
        combine(outputs, shares, routed)
        return project(rms_norm(routed, weights.norm, config.rms_norm_eps), weights.up_proj) + shared
