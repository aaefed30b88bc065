# weightpush with vLLM's CPU build:
#   docker build -f deploy/docker/server-cpu.Dockerfile -t weightpush-server-cpu .
# torch comes from the default index with libraries for GPUs; an index of CPU builds (TORCH_INDEX) saves gigabytes.
FROM python:3.11-slim
ARG TORCH_INDEX=""
WORKDIR /src
COPY requirements/cpu.txt requirements/cpu.txt
# In the order of the Makefile: torch first and with its dependencies, then what is pinned without any.
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' requirements/cpu.txt)" \
    && pip install --no-cache-dir --no-deps -r requirements/cpu.txt
# For vLLM's kernels, and for torch's compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 g++ \
    && rm -rf /var/lib/apt/lists/*
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && useradd --uid 10001 --user-group --create-home weightpush \
    # A volume that is mounted here for the first time belongs to whom this belongs.
    && install --directory --owner 10001 --group 10001 /models
# vLLM on a CPU takes nearly all memory for its KV cache unless it is told how much, in GiB.
ENV HOME=/home/weightpush VLLM_CPU_KVCACHE_SPACE=4
USER 10001:10001
WORKDIR /home/weightpush
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=15m --retries=1 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/reload/status', timeout=4)"]
ENTRYPOINT ["weightpush", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--help"]
