# syntax=docker/dockerfile:1
# Targets: cuda (the default; NVIDIA GPUs from sm_80 to sm_120) and cpu. See docs/operations.md.
#   docker build -t nf4-server .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -v "$PWD/NAME:/models/NAME:ro" -v nf4-cache:/models/.cache \
#     nf4-server --model /models/NAME
ARG BASE=python:3.12-slim-bookworm

# Both targets run on this. g++ stays in it: attention on CPU is compiled for the processor at hand, and on CUDA
# Triton and FlashInfer call g++.
# hadolint ignore=DL3006
FROM ${BASE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/nf4
ENV PATH=/opt/nf4/bin:$PATH

FROM base AS cpu-packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY nf4_kernels/pyproject.toml nf4_kernels/pyproject.toml
COPY docker/requirements.py docker/requirements.py
# The packages are a layer of their own, so that a change of the source does not install them again.
RUN python docker/requirements.py > requirements.txt \
 && pip install --extra-index-url "${TORCH_INDEX}" -r requirements.txt
COPY nf4_kernels nf4_kernels
# -P: of the installed package, into whose folder the libraries go.
RUN pip install --no-deps ./nf4_kernels && python -P -m nf4_kernels.build --cpu-only
COPY server server
COPY nf4_server nf4_server
RUN pip install --no-deps .

FROM base AS cuda-packages
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY nf4_kernels/pyproject.toml nf4_kernels/pyproject.toml
COPY docker/requirements.py docker/requirements.py
# PyPI's torch comes with CUDA's libraries, and nvcc as NVIDIA's wheels. nvcc stays in the image: FlashInfer compiles its
# attention for the GPU and the model at hand and keeps it in the volume; all kinds for all GPUs would take hours.
RUN python docker/requirements.py > requirements.txt \
 && python docker/requirements.py cuda build-cuda >> requirements.txt \
 && pip install -r requirements.txt
COPY nf4_kernels nf4_kernels
RUN pip install --no-deps ./nf4_kernels && python -P -m nf4_kernels.build --force \
 && test -s /opt/nf4/lib/python*/site-packages/nf4_kernels/lib/*/libnf4_cuda.so
COPY server server
COPY nf4_server nf4_server
RUN pip install --no-deps .

FROM base AS runtime
RUN useradd --uid 10001 --create-home nf4 && mkdir -p /models/.cache && chown -R nf4 /models
ENV NF4_HTTP__HOST=0.0.0.0 NF4_HTTP__PORT=8000 XDG_CACHE_HOME=/models/.cache HF_HOME=/models/.cache/huggingface
WORKDIR /home/nf4
COPY --chown=nf4 config.yaml docker/healthcheck.py ./
USER 10001
VOLUME /models
EXPOSE 8000
# A model may take minutes to load, and a 503 does not count during the start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["python", "healthcheck.py"]
# The server itself is process 1, so it gets SIGTERM and drains.
STOPSIGNAL SIGTERM
ENTRYPOINT ["nf4-server", "--config", "config.yaml"]

FROM runtime AS cpu
COPY --from=cpu-packages /opt/nf4 /opt/nf4

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Caches of what is compiled at the first start: FlashInfer adds .cache itself.
ENV FLASHINFER_WORKSPACE_BASE=/models TRITON_CACHE_DIR=/models/.cache/triton
COPY --from=cuda-packages /opt/nf4 /opt/nf4
