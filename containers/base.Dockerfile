# Every task of the pipeline on CPUs. Build from the repository's root.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends tesseract-ocr && rm -rf /var/lib/apt/lists/*
WORKDIR /root
COPY pyproject.toml constraints.txt README.md ./
COPY ebbflow ebbflow
COPY tasks tasks
COPY workflows workflows
RUN pip install --no-cache-dir uv && uv pip install --system --no-cache --constraints constraints.txt --editable .
ENV MLFLOW_DISABLE_TELEMETRY=true
