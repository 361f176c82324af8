# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run commands on checkpoints whose files name what the libraries would load, fetch or run.

``python -m tests.what_configs_name FOLDER COMMAND ...`` prints a JSON object: command -> key -> status, what
the command printed or its last error, and what was loaded or asked for. FOLDER/COMMAND/a and b are what it
takes. The process has a package ``kernels``, which writes down whether it is asked, and no network.
"""

import io
import itertools
import json
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from tests import programs
from tests.publishers import edits

TOUCHED = "TOUCHED"
"""Variable with the file in which a package or a socket writes what it is asked for."""
KERNEL = "org/kernel"
OWN_CODE = "raise SystemExit('the checkpoint has run code of its own')"
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0]['content'] }}"
KERNELS = """
import os
def _touch(*args, **options):
    with open(os.environ["TOUCHED"], "a") as file:
        file.write(f"kernel {args}\\n")
    raise OSError("a kernel was asked for")
get_kernel = _touch
def use_kernel_forward_from_hub(*args, **options):
    return lambda decorated: decorated
use_kernelized_func = register_kernel_mapping = use_kernel_forward_from_hub
def __getattr__(name):
    return type(name, (), {"__init__": _touch, "INFERENCE": 1, "TRAINING": 2})
"""


def named(**values: object) -> list[edits.Edit]:
    return [edits.config(**values)]


CODE = [edits.file(f"{kind}_own.py", OWN_CODE) for kind in ("configuration", "modeling", "tokenization")]
AUTO_MAP = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
OWN_TOKENS = {"AutoTokenizer": ["tokenization_own.Own", None]}
OWN_IMAGES = '{"image_processor_type": "Own", "feature_extractor_type": "Own"}'
KEYS: dict[str, list[edits.Edit]] = {
    "nothing": [],
    "_attn_implementation": named(_attn_implementation=KERNEL),
    "attn_implementation": named(attn_implementation={"": KERNEL}),
    "attention that is not installed": named(_attn_implementation="flash_attention_2"),
    "_experts_implementation": named(_experts_implementation=KERNEL),
    "experts_implementation": named(experts_implementation=KERNEL),
    "attention of a layer": named(per_layer_config={"0": {"_attn_implementation": KERNEL}}),
    "use_kernels": named(use_kernels=True, kernel_config={"kernel_mapping": {"RMSNorm": KERNEL}}),
    "auto_map": [*CODE, *named(auto_map=AUTO_MAP)],
    "auto_map of the tokenizer": [*CODE, edits.tokenizer_config(tokenizer_class="Own", auto_map=OWN_TOKENS)],
    "auto_map to the Hub": named(auto_map={key: f"org/code--{name}" for key, name in AUTO_MAP.items()}),
    "custom_pipelines": named(custom_pipelines={"own": {"impl": "modeling_own.Own", "pt": ["AutoModel"]}}),
    "tokenizer_class": [edits.tokenizer_config(tokenizer_class="OwnTokenizer")],
    "processor_class": [edits.tokenizer_config(processor_class="OwnProcessor")],
    "image_processor_type": [edits.file("preprocessor_config.json", OWN_IMAGES)],
    "chat_template": [edits.file("chat_template.jinja", ESCAPE)],
    "backbone": named(backbone="org/backbone", use_timm_backbone=False, use_pretrained_backbone=True),
    "model_type with a backbone": named(model_type="detr", backbone="org/backbone", use_timm_backbone=False),
    "model_type that fetches": named(model_type="edgetam_vision_model"),
    "text_config": named(text_config={"model_type": "edgetam_vision_model", "num_hidden_layers": 1}),
    "quant_method": [
        edits.edit_json(
            "config.json", lambda c: c.setdefault("quantization_config", {}).update(quant_method="own")
        )
    ],
    "torch_dtype": named(torch_dtype="load", dtype="load"),
    "transformers_weights": named(transformers_weights="own.safetensors"),
    "_name_or_path": named(_name_or_path="org/name", base_model_name_or_path="org/name"),
    "adapter_config.json": [edits.file("adapter_config.json", '{"base_model_name_or_path": "org/name"}')],
    "custom_generate": [
        edits.file("custom_generate/generate.py", OWN_CODE),
        edits.generation(custom_generate="org/x"),
    ],
}
MAY_REFUSE = (
    *("attention of a layer", "auto_map of the tokenizer", "chat_template", "model_type with a backbone"),
    *("model_type that fetches", "text_config", "quant_method", "torch_dtype", "adapter_config.json"),
)
"""Keys whose values a command may refuse; with all others it does what it does without them."""
COMMANDS = {
    "merge": ["merge", "w8a8={0}", "w4a16={1}", "--output", "{2}"],
    "convert": ["convert", "{0}", "--output", "{2}", "--dtype", "float16"],
    "inspect": ["inspect", "{0}"],
    "advise": ["advise", "{0}", "--device", "l20"],
    "quantize": ["quantize", "{0}", "--output", "{2}", "--recipe", "rtn", "--variants", "w8a8"],
}
"""Command -> arguments, with two folders to read and one to write."""


def run_all(folder: Path, version: str, commands: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run ``commands`` on the checkpoints in ``folder``, beside a package ``kernels`` of this version."""
    fake = folder / "fake"
    (fake / "kernels").mkdir(parents=True)
    (fake / "kernels" / "__init__.py").write_text(KERNELS)
    (fake / f"kernels-{version}.dist-info").mkdir()
    about = f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n"
    (fake / f"kernels-{version}.dist-info" / "METADATA").write_text(about)
    paths = [str(fake), str(programs.ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), TOUCHED: str(fake / "touched")}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "tests.what_configs_name", folder, *commands]
    done = programs.run(command, timeout=600, environment=environment)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _main(folder: Path, touched: Path, commands: Sequence[str]) -> None:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        with touched.open("a") as file:
            file.write("network\n")
        raise OSError("there is no network")

    socket.getaddrinfo = socket.socket.connect = refuse  # type: ignore[method-assign, assignment]
    from flexquant.cli import main

    tried = folder / "tried"
    result: dict[str, Any] = {command: {} for command in commands}
    for command, (key, changes) in itertools.product(commands, KEYS.items()):
        touched.write_text("")
        made = [Path(shutil.copytree(folder / command / name, tried / name)) for name in ("a", "b")]
        for change, one in itertools.product(changes, made):
            change(one)
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as errors:
            status = main([part.format(*made, tried / "out") for part in COMMANDS[command]])
        said = errors.getvalue().splitlines()[-1] if status else printed.getvalue()
        result[command][key] = [status, said, touched.read_text()]
        shutil.rmtree(tried)
    print(json.dumps(result))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(os.environ[TOUCHED]), sys.argv[2:])
