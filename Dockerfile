# SPDX-License-Identifier: Apache-2.0
FROM python:3.13-slim AS build
COPY . /source
RUN python -m venv /engage && /engage/bin/pip install --no-cache-dir '/source[kafka]'

FROM python:3.13-slim
COPY --from=build /engage /engage
RUN useradd --system --create-home --home-dir /data engage
USER engage
WORKDIR /data
VOLUME /data
ENV PATH=/engage/bin:$PATH ENGAGE_CONFIG=/data/engage.toml PYTHONUNBUFFERED=1
EXPOSE 8080 8081
# Mount your config at /data/engage.toml. SQLite keeps its file in the same folder. If the config has
# a [console], publish its port with -p 127.0.0.1:8081:8081; `docker exec NAME engage console-link`
# prints the link to sign in.
# `engage load` in this image needs another health check, see deploy/kafka.yaml.
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/healthz', timeout=3)"]
CMD ["engage", "serve", "--host", "0.0.0.0", "--port", "8080", "--console-host", "0.0.0.0"]
