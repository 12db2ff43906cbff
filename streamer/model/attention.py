"""The two attentions of a layer on ragged rows: projections on all rows together, memory per sequence."""

import numpy as np

from kernels import kda as kda_kernels
from kernels import mla as mla_kernels
from kernels.activation import exp_vector, gate_by_sigmoid
from kernels.norm import rms_norm
from streamer.config.model import KdaConfig, MlaConfig
from streamer.experts.weights import KdaWeights, MlaWeights
from streamer.model.batch import Segment
from streamer.model.projection import project, whole
from streamer.model.state import Journal, KdaState, MlaCache


def kda_attention(
    x: np.ndarray, weights: KdaWeights, config: KdaConfig, eps: float, rows: list[tuple[Segment, KdaState]]
) -> np.ndarray:
    """Kimi Delta Attention (k3-spec §3.3) of float32 [R, D]; returns float32 [R, D]. States keep the step pending."""
    heads, d = config.n_heads, config.head_dim
    shape = (x.shape[0], heads, d)
    u = [project(x, w) for w in (weights.q_proj, weights.k_proj, weights.v_proj)]
    z = project(project(x, weights.f_a_proj), weights.f_b_proj).reshape(shape)
    alpha = np.empty_like(z)
    kda_kernels.decay(z, exp_vector(weights.a_log), weights.dt_bias, np.float32(config.gate_lower_bound), alpha)
    beta = np.empty((x.shape[0], heads), np.float32)
    kda_kernels.sigmoid_rows(project(x, weights.b_proj), beta)

    recents = [_convolve(u, weights, segment, state) for segment, state in rows]
    q, k, v = (inputs.reshape(shape) for inputs in u)
    kda_kernels.normalise_heads(q, np.float32(d**-0.5))
    kda_kernels.normalise_heads(k, np.float32(1.0))

    o = np.empty(shape, np.float32)
    for (segment, state), recent in zip(rows, recents, strict=True):
        at = slice(segment.start, segment.stop)
        o[at] = state.advance(q[at], Journal(k[at], v[at], alpha[at], beta[at]), recent)
    kda_kernels.norm_and_gate(o, weights.o_norm, np.float32(eps), project(x, weights.g_proj).reshape(shape))
    return project(o.reshape(x.shape[0], -1), weights.o_proj)


def _convolve(u: list[np.ndarray], weights: KdaWeights, segment: Segment, state: KdaState) -> np.ndarray:
    """Replace the rows of q, k, v inputs in `u` by their convolutions; returns the inputs [3, taps - 1 + T, C]."""
    at = slice(segment.start, segment.stop)
    recent = np.concatenate([state.history, np.stack([inputs[at] for inputs in u])], axis=1)
    for index, taps in enumerate((weights.q_conv, weights.k_conv, weights.v_conv)):
        kda_kernels.short_conv(recent[index], taps, u[index][at])
    return recent


def mla_attention(
    x: np.ndarray, weights: MlaWeights, config: MlaConfig, rows: list[tuple[Segment, MlaCache]]
) -> np.ndarray:
    """Gated latent attention (k3-spec §3.4) of float32 [R, D]; returns float32 [R, D]. Writes the rows' latents."""
    count, latent = x.shape[0], config.kv_lora_rank
    q_latent = rms_norm(project(x, weights.q_a_proj), weights.q_a_norm, config.latent_norm_eps)
    q = project(q_latent, weights.q_b_proj).reshape(count, config.n_heads, config.qk_head_dim)
    c = project(x, weights.kv_a_proj)
    c[:, :latent] = rms_norm(np.ascontiguousarray(c[:, :latent]), weights.kv_a_norm, config.latent_norm_eps)

    o = np.empty((count, config.n_heads, config.v_head_dim), np.float32)
    scale = np.float32(config.qk_head_dim**-0.5)
    with whole(weights.kv_b_proj) as kv_b:
        kv_b = kv_b.reshape(config.n_heads, config.qk_nope_head_dim + config.v_head_dim, latent)
        for segment, cache in rows:
            at = slice(segment.start, segment.stop)
            first = segment.position
            cache.latents[first : first + segment.stop - segment.start] = c[at]
            mla_kernels.attention(q[at], kv_b, cache.latents, first, scale, o[at])
    y = o.reshape(count, -1)
    gate_by_sigmoid(y, project(x, weights.g_proj))
    return project(y, weights.o_proj)
