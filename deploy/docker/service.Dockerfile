# One service of Outrider; EXTRAS say which, and so what is in the image:
#   gateway        the gateway: no torch, no compiler
#   draft          n-gram drafts: no torch
#   draft,engine   drafts by models
#   engine,models  the verify service
# Build from the top of the repository: docker build -f deploy/docker/service.Dockerfile --build-arg EXTRAS=gateway .
ARG BASE_IMAGE=python:3.11-slim
ARG BUILD_IMAGE=""

FROM ${BUILD_IMAGE:-${BASE_IMAGE}} AS build
ARG EXTRAS
# Where torch is looked for beside PyPI: https://download.pytorch.org/whl/cpu has the one without CUDA.
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/outrider
WORKDIR /src
COPY constraints.txt pyproject.toml deploy/docker/requirements.py ./
RUN python3 requirements.py pyproject.toml "${EXTRAS:?}" > requirements.txt \
    && PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" /opt/outrider/bin/pip install -c constraints.txt -r requirements.txt setuptools
COPY . .
RUN /opt/outrider/bin/pip install --no-deps --no-build-isolation .

FROM ${BASE_IMAGE}
# Packages of Debian that it needs when it runs: a C compiler, where kernels are compiled for the CPU they meet.
ARG PACKAGES=""
RUN if [ -n "${PACKAGES}" ]; then \
        apt-get update -qq && apt-get install -y -qq --no-install-recommends ${PACKAGES} \
        && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --uid 10001 --no-create-home --home-dir /var/lib/outrider --shell /usr/sbin/nologin outrider \
    && install -d -o outrider -g outrider /var/lib/outrider
COPY --from=build /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:${PATH} OUTRIDER_HOME=/var/lib/outrider HF_HOME=/var/lib/outrider/huggingface PYTHONUNBUFFERED=1
USER outrider
VOLUME /var/lib/outrider
ENTRYPOINT ["outrider"]
