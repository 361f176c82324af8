# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What quantising lost, measured on what was written and against a bound; what training of scales regains."""

from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from flexquant import cli
from flexquant.checkpoint.measured_loss import PROMPT_TOKENS, read_losses
from flexquant.documents.texts import draw_rows, read_corpus, read_documents
from flexquant.quantization import loss as lost
from flexquant.quantization.loss import TOKENS, measure_answers, measuring_rows, read_prompts, read_reference
from flexquant.quantization.recipe import load_recipe
from tests.checkpoints import StateDict, make_checkpoint
from tests.quantize.quantizing import RTN, W4A16, digests, quantize, recipe, report

COARSE = {"QuantizationModifier": {"ignore": ["lm_head"], "scheme": "W4A16", "group_size": 128}}


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(model)


def load(folder: Path) -> Any:
    """Return a model in float32, its weights decompressed, and inputs of down_proj rotated if they are."""
    quantised = "quantization_config" in (folder / "config.json").read_text()
    how = {"quantization_config": CompressedTensorsConfig(run_compressed=False)} if quantised else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    stored = load_file(folder / "model.safetensors")
    for matrix in (stored[name].float() for name in stored if name.endswith("_input.weight")):

        def rotated(_: Any, inputs: tuple[torch.Tensor], matrix: torch.Tensor = matrix) -> torch.Tensor:
            blocks = inputs[0].unflatten(-1, (-1, len(matrix)))
            return (blocks @ matrix / len(matrix) ** 0.5).flatten(-2)

        for name, module in model.named_modules():
            if name.endswith("down_proj"):
                module.register_forward_pre_hook(rotated)
    return model


def test_a_model_loses_nothing_against_itself(model: Path, tokenizer: AutoTokenizer) -> None:
    same = load(model)
    losses = lost.measure_loss(same, read_reference(same, tokenizer))
    assert {"prose", "code", "conversation"} <= losses.keys()
    for loss in losses.values():
        assert (loss.kl, loss.perplexity, loss.same_top) == (0, 0, 1)


@pytest.mark.parametrize("variant", ["w8a8", "w4a16"])
def test_what_is_recorded_is_the_loss_of_what_was_written(variant, model, variants, tokenizer):
    """The reference computes both models' whole logits by itself."""
    recorded = read_losses({variant: variants / variant / "recipe.yaml"})[variant]
    original, written = load(model), load(variants / variant)
    for kind, rows in measuring_rows(read_corpus(held_out=True), (), tokenizer).items():
        divergences, growth = [], []
        for row in rows:
            ids = torch.tensor([row])
            with torch.inference_mode():
                was, found = (m(ids).logits[0, :-1].log_softmax(-1) for m in (original, written))
            divergences.append((was.exp() * (was - found)).sum(-1).mean())
            growth.append((was - found).gather(-1, ids[0, 1:, None]).mean())
        assert recorded[kind].documents == len(rows)
        assert recorded[kind].kl == pytest.approx(float(torch.stack(divergences).mean()), abs=2e-4)
        expected = float(torch.stack(growth).mean().exp()) - 1
        assert recorded[kind].perplexity == pytest.approx(expected, abs=4e-4)


def test_answers_are_measured_with_prompts_that_another_variant_read(model, variants, tokenizer):
    """The reference reads token by token, as a server does, and has whole logits."""
    original, first, second = load(model), load(variants / "w8a8"), load(variants / "w4a16")
    reference = read_reference(original, tokenizer)
    prompts, own = read_prompts(first, reference), read_prompts(second, reference)
    assert prompts is not None and own is not None
    losses = measure_answers(second, prompts, reference)
    assert losses != measure_answers(second, own, reference)
    for kind in ("code", "tables"):
        divergences = []
        for row in reference.rows[kind]:
            ids = torch.tensor([row])
            with torch.inference_mode():
                was = original(ids).logits[0, PROMPT_TOKENS - 1 : -1].log_softmax(-1)
                said = first(ids[:, :PROMPT_TOKENS], use_cache=True)
                logits, cache = [said.logits[:, -1]], said.past_key_values
                for token in row[PROMPT_TOKENS:-1]:
                    said = second(torch.tensor([[token]]), past_key_values=cache)
                    logits.append(said.logits[:, -1])
            found = torch.cat(logits).log_softmax(-1)
            divergences.append((was.exp() * (was - found)).sum(-1).mean())
        assert losses[kind].kl == pytest.approx(float(torch.stack(divergences).mean()), abs=2e-4)


def test_the_command_says_what_was_lost_and_marks_what_lost_too_much(tmp_path, capsys):
    model = make_checkpoint(tmp_path / "model", scheme=None, transform=with_outliers)
    recipe = {"schema": "flexquant.recipe/v1", "variants": {"w8a8": RTN, "w4a16": COARSE}}
    (by := tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    arguments = ["quantize", str(model), "--output", str(tmp_path / "out"), "--recipe", str(by)]
    assert cli.main([*arguments, "--max-loss", "30"]) == 0
    printed = capsys.readouterr().out
    assert "w8a8: perplexity" in printed and "conversation" in printed
    assert "more than 30 % of perplexity or a KL divergence of 0.3 is lost by w4a16 on " in printed
    assert "; w8a8 on" not in printed and "by w8a8 on" not in printed
    assert (tmp_path / "out" / "w4a16" / "model.safetensors").is_file()
    assert cli.main([*arguments, "--resume", "--max-loss", "100000"]) == 0
    kept = capsys.readouterr().out
    assert "is lost by" not in kept and "w4a16: perplexity" in kept


def test_text_in_one_language_is_calibrated_on_and_measured_on_all_kinds(model: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("Il pleut sur la ville, et le marché est fermé. " * 20)
    (variant,) = quantize(model, tmp_path / "out", recipe(w4a16=W4A16), calibration=tmp_path / "texts.txt")
    assert variant.losses.keys() >= {"prose", "code", "conversation", "instructions", "tables"}


def with_outliers(state: StateDict) -> StateDict:
    """Make answers depend on the weights, and some weights large, so that few bits hurt."""
    for name, tensor in state.items():
        if name.endswith("proj.weight"):
            tensor *= 6
            tensor[:, ::64] *= 10
    return state


def test_a_kind_to_which_the_model_itself_answers_nan_is_not_measured(model, tokenizer):
    rows = measuring_rows(read_corpus(held_out=True), (), tokenizer)
    broken = load(model)
    only_code = set(sum(rows["code"], [])) - set(sum(rows["prose"], []))
    broken.get_input_embeddings().weight.data[list(only_code)] = torch.nan
    assert set(lost.reference_of(broken, {k: rows[k] for k in ("code", "prose")}).answers) == {"prose"}


def test_without_a_chat_template_conversations_name_their_speakers(tokenizer: AutoTokenizer) -> None:
    rows = measuring_rows(read_corpus(held_out=True), (), tokenizer)
    assert tokenizer.chat_template is None
    assert all("User: " in tokenizer.decode(row) for row in rows["conversation"])


def test_a_document_counts_with_the_token_that_begins_it(model: Path) -> None:
    """The texts have as many letters as tokens: with the first token, one is as long as a row.

    What begins with that token, as chat templates write it, gets no second one.
    """
    tokenizer, long, short = AutoTokenizer.from_pretrained(model), "a" * (TOKENS - 1), "b" * (TOKENS - 2)
    tokenizer._tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    chat = tokenizer.decode([256]) + long
    rows = measuring_rows({"prose": [long, short], "chat": [chat]}, (), tokenizer)
    assert rows == dict.fromkeys(rows, [[256] + [tokenizer.convert_tokens_to_ids("a")] * (TOKENS - 1)])
    assert [*rows] == ["prose", "chat"]


def test_the_divergence_is_from_the_16_bit_model() -> None:
    was, found = torch.tensor([[0.6, 0.4]]).log(), torch.tensor([[0.9, 0.1]]).log()
    expected = (0.6 * log(0.6 / 0.9) + 0.4 * log(0.4 / 0.1), log(0.6 / 0.9), 1.0)
    assert lost._compare(found, [0, 0], lost._answers(was, [0, 0])) == pytest.approx(expected, abs=1e-5)


def test_errors_are_standard_errors_over_the_documents() -> None:
    """Three documents lie 0.1 and 0.2 apart: deviations of 0.1 and 0.2, divided by the square root of 3."""
    found = lost._loss([(0.1, 0.4, 1.0), (0.3, 0.0, 0.25), (0.2, 0.2, 0.25)])
    assert (found.documents, found.kl, found.same_top) == (3, 0.2, 0.5)
    assert found.kl_error == pytest.approx(0.1 / 3**0.5, abs=5e-5)
    assert found.perplexity == pytest.approx(1.221403 - 1, abs=5e-5)
    assert found.perplexity_error == pytest.approx(1.221403 * 0.2 / 3**0.5, abs=5e-5)
    alone = lost._loss([(0.1, 0.4, 1.0)])
    assert (alone.kl, alone.kl_error, alone.perplexity_error) == (0.1, None, None)


def test_a_loss_beyond_any_number_is_not_finite() -> None:
    found = lost._loss([(1e3, 1e3, 0.0), (2e3, 2e3, 0.0)])
    assert (found.kl, found.perplexity, found.perplexity_error) == (1500.0, None, None)
    assert found.exceeds(1e6)


EPOCHS = 8
WAYS = {"plain": W4A16, "distilled": {**W4A16, "scale_distillation": {"epochs": EPOCHS}}}
WITH_ZEROS = {"GPTQModifier": {**W4A16["GPTQModifier"], "scheme": "W4A16_ASYM"}}


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("distilled") / "variants"
    quantize(model, output, recipe(**WAYS), samples=32)
    return output


def divergence(model: Path, variant: Path) -> float:
    """Return the KL divergence of a variant to the 16-bit model on other rows of the text calibrated on."""
    tokenizer, teacher, student = AutoTokenizer.from_pretrained(model), load(model), load(variant)
    found = []
    for ids in draw_rows(read_documents(None), tokenizer, samples=8, length=64, seed=1):
        with torch.inference_mode():
            expected, given = (m(torch.tensor([ids])).logits.log_softmax(-1) for m in (teacher, student))
        found.append(float((expected.exp() * (expected - given)).sum(-1).mean()))
    return sum(found) / len(found)


def test_the_answers_are_nearer_to_16_bit(model: Path, both: Path) -> None:
    plain, distilled = (divergence(model, both / way) for way in WAYS)
    assert distilled < 0.98 * plain


def test_every_epoch_is_told(both: Path) -> None:
    found = report(both / "distilled")["distillation"]["kl_by_epoch"]
    assert len(found) == EPOCHS and found[-1] < 0.95 * found[0]
    assert report(both / "plain")["distillation"] is None


def test_scales_are_trained_beside_zero_points_and_the_recipe_makes_them_again(model, tmp_path):
    ways = {"plain": WITH_ZEROS, "distilled": {**WITH_ZEROS, "scale_distillation": {"epochs": 1}}}
    quantize(model, tmp_path, recipe(**ways), samples=8)
    plain, distilled = (load_file(tmp_path / way / "model.safetensors") for way in ways)
    assert {name: w.shape for name, w in plain.items()} == {name: w.shape for name, w in distilled.items()}
    different = {name.rpartition(".")[2] for name in plain if not plain[name].equal(distilled[name])}
    assert different == {"weight_scale"}, "the integers are those of GPTQ"
    assert any(name.endswith("weight_zero_point") for name in plain)
    again = load_recipe(tmp_path / "distilled/recipe.yaml")
    assert again.variants["distilled"].scale_distillation is not None
    quantize(model, tmp_path / "again", again, samples=8)
    first, second = (digests(folder / "distilled") for folder in (tmp_path, tmp_path / "again"))
    assert first["model.safetensors"] == second["model.safetensors"]
