"""Losses: rewritten on the logical call, so that a mean divides by the logical count, weights and all.

The fused kernels divide by what they see; a part of the batch sees the wrong count. Their decompositions
(torch's own) pick, multiply and sum, and every one of these steps has a rule.
"""

from __future__ import annotations

from shardwright.rules.catalog.decomposing import take_apart

_LOSSES = """
    mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
    soft_margin_loss soft_margin_loss_backward binary_cross_entropy binary_cross_entropy_backward
    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
    binary_cross_entropy_with_logits
"""

take_apart(*(f"aten::{name}.default" for name in _LOSSES.split()))
