# What a trainer needs to push: torch and weightpush, no vLLM.
#   docker build -f deploy/docker/trainer.Dockerfile -t weightpush-trainer .
# Build your own trainer on it, or install weightpush into the image that you have.
FROM python:3.12-slim
ARG TORCH_INDEX=""
WORKDIR /src
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.7"
COPY . .
RUN pip install --no-cache-dir . && useradd --uid 10001 --user-group --create-home weightpush
COPY deploy/docker/push_steps.py /opt/weightpush/push_steps.py
ENV HOME=/home/weightpush
USER 10001:10001
WORKDIR /home/weightpush
# A trainer answers nobody; one that waits in a push is well.
HEALTHCHECK NONE
ENTRYPOINT ["python3"]
CMD ["/opt/weightpush/push_steps.py", "--help"]
