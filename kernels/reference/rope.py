"""Rotary position embedding as Hugging Face applies it (half-rotation). Shapes: T tokens, H heads, D head_dim."""

from __future__ import annotations

import torch


def rope_tables(
    positions_T: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos_TD and sin_TD in fp32, scaled by `attention_factor` (yarn, longrope)."""
    angle = positions_T.to(torch.float32)[:, None] * inv_freq.to(torch.float32)[None, :]
    angle_TD = torch.cat((angle, angle), dim=-1)
    return angle_TD.cos() * attention_factor, angle_TD.sin() * attention_factor


def rotate(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotates each head of each token by its position's angles."""
    half = x_THD.shape[-1] // 2
    turned = torch.cat((-x_THD[..., half:], x_THD[..., :half]), dim=-1)
    return x_THD * cos_TD[:, None, :] + turned * sin_TD[:, None, :]
