"""Rotary position embedding (arXiv:2104.09864): the tables that :func:`engine.model.layers.rotate`
takes."""

import math

import torch
from torch import Tensor

from engine.model.config import Llama3Scaling, ModelConfig


def rope_tables(config: ModelConfig, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, ``float32[context_length, 1, head_dim]`` each.

    The first half of the sines is negated, which makes a rotation ``x * cos + swap_halves(x) *
    sin``.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if isinstance(config.rope_scaling, Llama3Scaling):
        frequencies = _llama3_frequencies(frequencies, config.rope_scaling)
    else:
        frequencies = frequencies / config.rope_scaling
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=1).unsqueeze(1), torch.cat((-sin, sin), dim=1).unsqueeze(1)


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, and blend linearly between the
    two."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_context_length / wavelengths
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * kept + frequencies / scaling.factor * (1 - kept)
