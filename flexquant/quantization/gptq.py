# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run GPTQ with equal weight for every calibration token, except a row's first token, which has more.

GPTQ weights the error of a linear by H = sum of x x^T over the calibration tokens. A few tokens have
activations hundreds of times larger than all others ("massive activations"): in front of some down_proj of
SmolLM2 the first token of each row makes up nearly all of the sum. H then describes that token alone, and
damping, a share of H's mean diagonal, exceeds the contribution of all other tokens: for these, GPTQ in effect
rounds to nearest. Dividing each x by its norm gives all tokens equal weight. But the first token is the
"attention sink": every later token attends to it, so its error costs more, and it gets the weight of several
tokens. benchmarks/results/quality-methods compares the methods.
"""

from __future__ import annotations

import torch
from llmcompressor.modifiers.gptq import GPTQModifier

from flexquant.errors import FlexQuantError

FLOOR = 1e-6


class TokenNormalizedGPTQ(GPTQModifier):
    """llmcompressor's GPTQ on inputs of equal norm; each row must begin at the beginning of a sequence."""

    first_token_weight: float = 1.0
    """Number of tokens that a row's first token counts for."""

    def calibrate_module(
        self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], _output: torch.Tensor
    ) -> None:
        """Add a linear's inputs ``args[0]``, [rows, tokens, in] or [tokens, in] of one row, to its Hessian.

        Experts get [tokens, in], as llmcompressor runs one row at a time and gives its tokens to every
        expert. Raises FlexQuantError for inputs of another shape, in which a row's first token cannot be
        found.
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
