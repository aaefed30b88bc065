# weightpush on vLLM's own image, for GPUs:
#   docker build -f deploy/docker/server.Dockerfile -t weightpush-server .
# VLLM_IMAGE must bring vLLM 0.32 or 0.33; the extra `server` refuses any other.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.33.0

FROM python:3.12-slim AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${VLLM_IMAGE}
# vLLM's image has torch and vLLM: they satisfy the extra, and pip leaves them as they are.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir "$(ls /wheels/weightpush-*.whl)[server]"
# vLLM, torch and Triton write their caches below the home.
RUN useradd --uid 10001 --user-group --create-home weightpush
ENV HOME=/home/weightpush
USER 10001:10001
WORKDIR /home/weightpush
EXPOSE 8000
# 503 while no whole weights are served: `unhealthy` says that a server gets no requests, not that it must be killed.
HEALTHCHECK --interval=5s --timeout=5s --start-period=15m --retries=1 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/reload/status', timeout=4)"]
ENTRYPOINT ["weightpush", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--help"]
