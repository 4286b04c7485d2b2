# syntax=docker/dockerfile:1
# vit_jax for the CPU (the default), for NVIDIA GPUs and for TPUs, at the tested versions:
#
#   docker build --target=cpu|cuda|tpu --build-arg=COMMIT="$(git rev-parse HEAD)" -t vit_jax:cpu .
#   docker run --rm --shm-size=16g -v "$PWD/runs:/mnt/work" vit_jax:cpu scripts/train.py \
#       --config=configs/quickstart.py --workdir=/mnt/work/quickstart
#   docker run --gpus=all ... vit_jax:cuda ...       on the machine: NVIDIA's driver and container toolkit
#   docker run --privileged --net=host ... vit_jax:tpu ...       on a TPU VM
#
# The user in it has the id 1000: what it writes to must be writable for that id, or give --user. On
# TPUs it is root, to whom their devices belong.

FROM python:3.12.12-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /vit_jax

# What changes seldom: the packages, from setup.py and the constraints alone. The empty package
# makes the installed link to /vit_jax valid; its files come later.
FROM base AS build
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY setup.py pyproject.toml LICENSE constraints.txt ./
RUN mkdir vit_jax && touch vit_jax/__init__.py \
    && pip install -c constraints.txt 'setuptools>=77'

FROM build AS build-cpu
RUN pip install -c constraints.txt --no-build-isolation -e '.[embedded,gcs,hf]'

FROM build AS build-cuda
RUN pip install -c constraints.txt --no-build-isolation -e '.[embedded,gcs,hf,cuda13]'

FROM build AS build-tpu
RUN pip install -c constraints.txt --no-build-isolation -e '.[embedded,gcs,hf,tpu]'

FROM base AS runtime
ARG COMMIT=unknown
ENV VIT_JAX_COMMIT=$COMMIT
LABEL org.opencontainers.image.licenses=Apache-2.0 org.opencontainers.image.revision=$COMMIT
RUN useradd --uid=1000 --create-home user && mkdir -p /mnt/work && chown user:user /mnt/work
ENV PATH=/opt/venv/bin:$PATH
COPY . .
USER 1000
ENTRYPOINT ["python"]
CMD ["scripts/train.py", "--help"]

FROM runtime AS tpu
USER root
COPY --from=build-tpu /opt/venv /opt/venv

FROM runtime AS cuda
# The first two are read by NVIDIA's container toolkit; GKE puts the driver where the third says. The
# CUDA libraries come with JAX's wheels. The last makes a missing driver an error, not a slow run.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64 JAX_PLATFORMS=cuda,cpu
COPY --from=build-cuda /opt/venv /opt/venv

FROM runtime AS cpu
COPY --from=build-cpu /opt/venv /opt/venv
