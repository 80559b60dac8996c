# docker build -t shardwright .
# docker build -t shardwright:train --build-arg EXTRAS=train .
# docker run --rm -v "$PWD:/data" --user "$(id -u):$(id -g)" shardwright inspect CHECKPOINT
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY ckpt ckpt
COPY shardwright shardwright
COPY tools tools
COPY train train
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# Extras of pyproject.toml, with commas between them; none is the base, without torch.
ARG EXTRAS=""
COPY --from=build /wheels /wheels
RUN wheel="$(echo /wheels/*.whl)" \
    && pip install --no-cache-dir "${wheel}${EXTRAS:+[${EXTRAS}]}" \
    && rm -r /wheels \
    && useradd --create-home shardwright
USER shardwright
WORKDIR /data
ENTRYPOINT ["shardwright"]
CMD ["--help"]
