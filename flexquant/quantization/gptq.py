# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""GPTQ in which every calibration token counts the same, except the first of a row, which counts more.

GPTQ weighs the error of a linear by H = sum of x x^T over the calibration tokens. A few tokens have
activations hundreds of times larger than all others ("massive activations"): in front of some down_proj of
SmolLM2 the first token of each row holds nearly all of the sum. H then describes that token alone, and
damping, a share of H's mean diagonal, exceeds what the other tokens contribute: their weights are in effect
rounded to nearest. Dividing each x by its norm lets all tokens speak. But the first token is where
attention heads park their attention (the "attention sink"): every later token reads it, so its error costs
more than another's, and it gets the weight of several. benchmarks/results/quality-methods compares.
"""

from __future__ import annotations

import torch
from llmcompressor.modifiers.gptq import GPTQModifier

from flexquant.errors import FlexQuantError

FLOOR = 1e-6


class TokenNormalizedGPTQ(GPTQModifier):
    """llmcompressor's GPTQ on inputs of equal norm; rows have to begin where a sequence begins."""

    first_token_weight: float = 1.0
    """How many tokens the first one of a row counts for."""

    def calibrate_module(
        self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], _output: torch.Tensor
    ) -> None:
        """Add a linear's inputs ``args[0]``, [rows, tokens, in] or, of one row, [tokens, in], to its Hessian.

        Experts get the latter: llmcompressor takes one row at a time, and every expert all of its tokens.
        Raises FlexQuantError for inputs of another shape, in which the first token of a row cannot be found.
        """
        x = args[0].float()
        x = x / x.norm(dim=-1, keepdim=True).clamp_min(FLOOR)
        if self.first_token_weight != 1:
            x = x.unsqueeze(0) if x.ndim == 2 else x
            if x.ndim != 3:
                raise FlexQuantError(
                    f"the inputs of {self._module_names.get(module, 'a linear')} have the shape "
                    f"{list(x.shape)}, expected [rows, tokens, in], so the first token of a row cannot be "
                    "found; remove first_token_weight from the recipe"
                )
            x[:, 0] *= self.first_token_weight**0.5
        super().calibrate_module(module, (x,), _output)
