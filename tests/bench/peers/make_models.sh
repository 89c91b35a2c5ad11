#!/usr/bin/env bash
# The models of `remora bench peers`, in every form that a peer reads: make_models.sh FOLDER SMOLLM2.gguf
# FOLDER has the peers already (install_vllm.sh, install_llama.sh).
set -euo pipefail
folder=$1 gguf=$2
here=$(dirname "${BASH_SOURCE[0]}")
quantize=$folder/llama/bin/llama-quantize
mkdir -p "$folder/models"
made() { [ -e "$folder/models/$1" ]; }
made smollm2-q4_1.gguf || ln -sfn "$(realpath "$gguf")" "$folder/models/smollm2-q4_1.gguf"
# What the file holds in four bits, eight bits hold exactly up to the rounding of their scales.
made smollm2-q8_0.gguf || "$quantize" --allow-requantize "$gguf" "$folder/models/smollm2-q8_0.gguf" Q8_0 >/dev/null 2>&1
made smollm2/model.safetensors || "$folder/vllm/bin/python" "$here/export_folder.py" "$gguf" "$folder/models/smollm2"
if ! made random-1b-bf16.gguf; then
  "$folder/vllm/bin/python" "$here/make_random_model.py" "$folder/models/smollm2" "$gguf" "$folder/models/random-1b" \
    "$folder/models/random-1b.tmp"
  mv "$folder/models/random-1b.tmp" "$folder/models/random-1b-bf16.gguf"
fi
for kind in Q8_0 Q4_1; do
  name=random-1b-${kind,,}.gguf
  made "$name" || "$quantize" "$folder/models/random-1b-bf16.gguf" "$folder/models/$name" $kind >/dev/null 2>&1
done
