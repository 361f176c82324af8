# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Vision-language models: prompts with images under each variant alone, in layered plans, over HTTP."""

import base64
import functools
import io
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from openai import OpenAI

from examples.vllm_server import vllm_serve
from flexquant.merge import merge_checkpoints
from tests import vision
from tests.checkpoints import StateDict
from tests.integration.conftest import Served, check_variants, edited_json, generate
from tests.integration.live_server import flexquant_options
from tests.integration.test_architectures import LAYERED, OPTIONS, SAMPLING
from tests.integration.test_serving_errors import configure, refusal
from tests.publishers import edits
from tests.states import merge_twins
from tests.vision import KINDS, Kind, make_vision_checkpoint, prompts

pytestmark = pytest.mark.engine

VARIANTS = ("w8a8", "w4a16")
needs = "transformers reads images for this model with torchvision"
WITH_TORCHVISION = [pytest.mark.full, pytest.mark.skipif(find_spec("torchvision") is None, reason=needs)]


class Made(NamedTuple):
    """A folder with w8a8, w4a16 and merged, and their kind."""

    path: Path
    kind: Kind


@pytest.fixture(scope="module")
def make(tmp_path_factory) -> Callable[[str], Made]:
    @functools.cache
    def of(name: str) -> Made:
        folder, kind = tmp_path_factory.mktemp(name), KINDS[name]
        sources = {v: make_vision_checkpoint(folder / v, v, kind) for v in VARIANTS}
        merge_checkpoints(sources, folder / "merged")
        return Made(folder, kind)

    return of


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "idefics3" else WITH_TORCHVISION) for name in KINDS],
)
def made(request: pytest.FixtureRequest, make: Callable[[str], Made]) -> Made:
    return make(request.param)


@pytest.fixture
def folder(make: Callable[[str], Made]) -> Path:
    """Return the folder of the model that needs no torchvision."""
    return make("idefics3").path


@pytest.fixture(scope="module")
def served(made: Made) -> dict[str, Served]:
    """Return what the constant policies and a layered one answer."""
    policies = [*VARIANTS, LAYERED]
    found = generate(made.path / "merged", policies, prompts(made.kind), sampling=SAMPLING, **OPTIONS)
    return dict(zip((*VARIANTS, "layered"), found, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_constant_policy_equals_stock_vllm(variant: str, made: Made, served: dict[str, Served]) -> None:
    (stock,) = generate(made.path / variant, None, prompts(made.kind), sampling=SAMPLING, **OPTIONS)
    assert served[variant].answers == stock.answers


@pytest.mark.full
def test_a_constant_policy_equals_stock_vllm_compiled(made: Made) -> None:
    options = {**OPTIONS, "enforce_eager": False}
    (stock,) = generate(made.path / "w4a16", None, prompts(made.kind), sampling=SAMPLING, **options)
    (found,) = generate(made.path / "merged", ["w4a16"], prompts(made.kind), sampling=SAMPLING, **options)
    assert found.answers == stock.answers


@pytest.mark.parametrize("tied", ["nowhere", "not in the text", "said at the top"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=WITH_TORCHVISION) for n in ("mistral3", "gemma3")])
def test_a_head_is_served_at_every_path_whatever_the_config_says(tied, name, tmp_path):
    """The variants' tensors have the names of two releases of transformers."""
    kind = KINDS[name]

    def own_head(state: StateDict) -> StateDict:
        (embedding,) = (tensor for key, tensor in state.items() if key.endswith("embed_tokens.weight"))
        return state | {"language_model.lm_head.weight": embedding.flip(0).contiguous()}

    sources = {v: make_vision_checkpoint(tmp_path / v, v, kind, transform=own_head) for v in VARIANTS}
    vision.write_as_another_release(sources["w4a16"], name)
    for folder in sources.values():
        with edited_json(folder / "config.json") as config:
            for place in (config, config["text_config"]):
                place.pop("tie_word_embeddings", None)
            config["text_config"] |= {"tie_word_embeddings": False} if tied == "not in the text" else {}
            config |= {"tie_word_embeddings": True} if tied == "said at the top" else {}
    merge_checkpoints(sources, tmp_path / "merged")
    asked = ["a prompt without an image", "another one"]
    check_variants(tmp_path / "merged", sources, asked, sampling=SAMPLING, **OPTIONS)


def test_variants_and_images_matter(served: dict[str, Served]) -> None:
    """Otherwise the test above would show less than it says."""
    assert served["w8a8"].answers != served["w4a16"].answers
    for variant in VARIANTS:
        ((one, other, *_),) = served[variant].answers
        assert one != other


def test_layers_of_both_variants_read_one_image(served: dict[str, Served]) -> None:
    layered = served["layered"]
    plans = {(found["phase"] == "decode", found["plan"]) for found in layered.passes}
    assert plans == {(False, "w8a8"), (True, "w8a8+w4a16[1-2]")}
    assert layered.answers not in (served["w8a8"].answers, served["w4a16"].answers)


def test_a_pass_sees_its_images_whichever_plan_ran_before(made: Made) -> None:
    """Images are embedded before the plan of a pass is known, by whatever plan ran last."""
    merge_twins(made.path)
    one_by_one = [[asked] for asked in prompts(made.kind)]
    stock, twins = (
        generate(made.path / name, None, *one_by_one, sampling=SAMPLING, **OPTIONS)[0].answers
        for name in ("w8a8", "twins")
    )
    assert twins == stock


@pytest.mark.full
def test_chat_with_an_image_over_http(made: Made, served: dict[str, Served]) -> None:
    """The answers are those offline; bytes that are no image are refused, and the server goes on."""
    arguments = ["--enforce-eager", "--max-model-len", "512", "--served-model-name", "tiny"]
    with vllm_serve(made.path / "merged", *arguments, *flexquant_options(policy="w8a8")) as url:
        client = OpenAI(base_url=url, api_key="none")

        def png(seed: int) -> bytes:
            vision.picture(seed).save(file := io.BytesIO(), "PNG")
            return file.getvalue()

        def ask(data: bytes) -> list[int]:
            image = {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}
            before, after = ({"type": "text", "text": text} for text in ("what is in ", "?"))
            content: Any = [before, {"type": "image_url", "image_url": image}, after]
            messages: Any = [{"role": "user", "content": content}]
            asked: Any = {"model": "tiny", "messages": messages, "temperature": 0}
            more = {"ignore_eos": True, "return_token_ids": True, "max_tokens": SAMPLING["max_tokens"]}
            return client.chat.completions.create(**asked, extra_body=more).choices[0].token_ids

        ((first, second, *_),) = served["w8a8"].answers
        assert ask(png(0)) == first[0]
        with pytest.raises(openai.BadRequestError, match="image"):
            ask(b"no image")
        assert ask(png(1)) == second[0]


@pytest.mark.full
def test_a_variant_that_is_tied_beside_one_with_a_head_of_its_own(tmp_path: Path) -> None:
    def without_head(state: StateDict) -> StateDict:
        return {name: tensor for name, tensor in state.items() if not name.startswith("lm_head.")}

    def with_part_of_the_norm(state: StateDict) -> StateDict:
        """Return the same model: the head has a share of the final norm's weight."""
        embedding = state["model.text_model.embed_tokens.weight"].float()
        norm = state["model.text_model.norm.weight"].float()
        share = 0.5 + torch.rand(norm.shape, generator=torch.Generator().manual_seed(0))
        folded = {"lm_head.weight": embedding * share, "model.text_model.norm.weight": norm / share}
        return state | {name: tensor.bfloat16() for name, tensor in folded.items()}

    sources = {}
    for name, transform in {"w8a8": with_part_of_the_norm, "w4a16": without_head}.items():
        sources[name] = make_vision_checkpoint(tmp_path / name, name, transform=transform)
        with edited_json(sources[name] / "config.json") as config:
            config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    merge_checkpoints(sources, tmp_path / "merged")
    asked = vision.same_text(KINDS["idefics3"])
    check_variants(tmp_path / "merged", sources, asked, sampling=SAMPLING, **OPTIONS)


DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"speculative_config": DRAFTS}, "speculative decoding for vision models"),
        ({"enable_lora": True}, "LoRA for vision models"),
        ({"mm_encoder_only": True}, "--mm-encoder-only"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism for vision models"),
    ],
)
def test_what_is_refused_for_vision_models(options: dict[str, Any], named: str, folder: Path) -> None:
    configure(folder / "merged")
    assert named in refusal(folder / "merged", **options)


def test_variants_with_embeddings_of_their_own_are_refused(folder: Path, tmp_path: Path) -> None:
    merged = shutil.copytree(folder / "merged", tmp_path / "edited")
    with edited_json(merged / "config.json") as config:
        config["quantization_config"]["shared_modules"].remove("model.text_model.embed_tokens")
    assert re.search("different embeddings.*leave the embedding out", refusal(merged))
    configure(merged, additional_config={"flexquant": {"policy": "w4a16"}})


def test_another_vision_architecture_is_refused_before_anything_is_loaded(folder, tmp_path):
    sources = {v: shutil.copytree(folder / v, tmp_path / v) for v in VARIANTS}
    for source in sources.values():
        edits.config(architectures=["LlavaForConditionalGeneration"])(source)
    merge_checkpoints(sources, tmp_path / "merged")
    message = "LlavaForConditionalGeneration, which reads more than text.*Idefics3ForConditionalGeneration"
    assert re.search(message, refusal(tmp_path / "merged"))
