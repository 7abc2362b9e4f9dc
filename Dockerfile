# Holdfast with Flower, reports and private training. For a GPU: docker build --build-arg DEVICE=cuda .
ARG PYTHON=3.11
ARG DEVICE=cpu

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim AS cpu
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

# On PyPI, torch for Linux is the build with CUDA; Triton compiles its launchers with a C compiler.
FROM python:${PYTHON}-slim AS cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM ${DEVICE}
ARG UID=1000
COPY constraints.txt /tmp/constraints.txt
# torch has one version at all sites; the other pins of constraints.txt are newer than Flower allows.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    grep '^torch==' /tmp/constraints.txt > /tmp/torch.txt \
    && pip install --no-cache-dir --constraint /tmp/torch.txt "$(ls /wheels/*.whl)[data,flower,privacy,report]" \
    && rm /tmp/constraints.txt /tmp/torch.txt
RUN useradd --create-home --uid "${UID}" holdfast \
    && install --directory --owner=holdfast --group=holdfast \
        /srv/fl /srv/fl/app /srv/fl/home /srv/fl/keys /srv/fl/runs /srv/fl/state
ENV FLWR_HOME=/srv/fl/home \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
USER ${UID}
WORKDIR /srv/fl
CMD ["holdfast", "doctor"]
