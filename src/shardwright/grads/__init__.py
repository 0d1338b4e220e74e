"""Gradients across ranks: right losses, sums, norms."""

from shardwright.grads.clip import NonFiniteNormError, clip_grad_norm_
from shardwright.grads.loss import global_mean
from shardwright.grads.scaler import GradScaler
from shardwright.grads.synchronizer import GradientSynchronizer

__all__ = ["GradScaler", "GradientSynchronizer", "NonFiniteNormError", "clip_grad_norm_", "global_mean"]
