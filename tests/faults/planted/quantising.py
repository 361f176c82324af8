# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Quantising: recipes and calibration."""

from __future__ import annotations

from tests.faults.fault import Fault

QUANTISING = (
    Fault(
        "smoothing-strength-ignored",
        "SmoothQuant uses one strength, 0.5, whatever the recipe says.",
        "flexquant/quantization/smoothing.py",
        "            self._chosen[name] = self.fixed[name]\n",
        "            self._chosen[name] = None if self.fixed[name] is None else REFERENCE\n",
        ("tests/quantize/test_smoothing.py::test_a_fixed_strength_is_the_one_that_scales",),
        "quantize",
    ),
    Fault(
        "smoothing-formula-ignores-alpha",
        "SmoothQuant's scales have the exponent 0.5, whatever the strength.",
        "flexquant/quantization/smoothing.py",
        "clamp(min=FLOOR).pow(alpha)",
        "clamp(min=FLOOR).pow(0.5)",
        ("tests/quantize/test_smoothing.py::test_scales_are_smoothquants",),
        "quantize",
    ),
    Fault(
        "sensitive-layers-quantised",
        "The linears that were found sensitive are quantised like the others.",
        "flexquant/quantization/sensitivity.py",
        "        self._hand_over({name: linears[name] for name in self.spared})\n",
        "",
        ("tests/quantize/test_sensitivity.py::test_the_hard_linear_stays_in_16_bit",),
        "quantize",
    ),
    Fault(
        "own-text-alone",
        "Without other text a model is calibrated on what it writes itself alone.",
        "flexquant/quantization/self_calibration.py",
        "_documentation(tokenizer, needed // 2, settings.seed)",
        "_documentation(tokenizer, 0, settings.seed)",
        ("tests/quantize/test_self_calibration.py::test_half_of_the_text_is_of_pythons_documentation",),
        "quantize",
    ),
    Fault(
        "teacher-is-the-quantised-model",
        "Scales are trained towards what the quantised model itself says.",
        "flexquant/quantization/distillation.py",
        "            expected = teacher(",
        "            expected = model(",
        ("tests/quantize/test_distillation.py::test_the_answers_are_nearer_to_16_bit",),
        "quantize",
    ),
    Fault(
        "trained-scales-forgotten",
        "Scales are saved as they were before they were trained.",
        "flexquant/quantization/distillation.py",
        "scale = module.weight_scale.float() * factor.detach()",
        "scale = module.weight_scale.float() * torch.ones_like(factor)",
        ("tests/quantize/test_distillation.py::test_the_integers_are_those_of_gptq",),
        "quantize",
    ),
)
