"""Operations on KV on NVIDIA GPUs: raw CUDA sources, compiled by NVRTC and launched through CuPy.

`src/` holds the kernels, `source` names one with its macros, `compile` makes machine code of it (no GPU needed),
`module` runs it on a card and `host` on the processor, for tests. Nothing is imported before it is asked for.
"""
