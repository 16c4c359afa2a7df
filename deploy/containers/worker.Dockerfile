# syntax=docker/dockerfile:1.17
# The worker: torch with its own CUDA libraries, so that the node brings only the driver (arm64 for Jetson Thor).
# Build from the repository's root: docker buildx build -f deploy/containers/worker.Dockerfile --platform linux/amd64,linux/arm64 .
# The tag is exact; a site that mirrors images passes its own by digest: --build-arg PYTHON_IMAGE=...@sha256:...
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1 \
    UV_PYTHON_DOWNLOADS=never \
    UV_PROJECT_ENVIRONMENT=/opt/taktline
RUN pip install uv==0.13.9
WORKDIR /src
# The dependencies first, exactly those of uv.lock with their hashes: they change less often than our code.
COPY pyproject.toml uv.lock README.md ./
COPY protocol/pyproject.toml protocol/pyproject.toml
COPY client/pyproject.toml client/pyproject.toml
COPY gateway/pyproject.toml gateway/pyproject.toml
COPY worker/pyproject.toml worker/pyproject.toml
COPY kernels/pyproject.toml kernels/pyproject.toml
COPY operator/pyproject.toml operator/pyproject.toml
COPY demo/pyproject.toml demo/pyproject.toml
COPY deploy/local-cluster/pyproject.toml deploy/local-cluster/pyproject.toml
COPY dashboards/pyproject.toml dashboards/pyproject.toml
# Extras of taktline-worker that the image brings: "--extra=video", "--extra=ray", or both.
ARG WORKER_EXTRAS=""
# hadolint ignore=SC2086
RUN uv sync ${WORKER_EXTRAS} --frozen --no-dev --no-install-workspace --package taktline-worker
COPY protocol/src protocol/src
COPY kernels/src kernels/src
COPY worker/src worker/src
# hadolint ignore=SC2086
RUN uv sync ${WORKER_EXTRAS} --frozen --no-dev --no-editable --package taktline-worker

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="taktline-worker" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Triton compiles its launchers where it runs, with a C compiler and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/taktline /opt/taktline
ENV PATH=/opt/taktline/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# A number, so that runAsNonRoot can be checked; the same as in the manifests.
USER 10001:10001
WORKDIR /
EXPOSE 50051 9464
ENTRYPOINT ["taktline-worker"]
CMD ["--help"]
