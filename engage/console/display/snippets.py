# SPDX-License-Identifier: Apache-2.0
"""The lines that send a first event, with a real key and the server's address in them."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from engage.config import Config

__all__ = ["CALLS", "Snippet", "event_as_curl", "listener_url", "server_url", "snippets"]

#: The path of the server's calls; aliases of other products' paths exist too.
CALLS: Final = "/api/public/apps/"


class Snippet(NamedTuple):
    """Some lines to copy."""

    #: Of its tab.
    name: str
    code: str
    #: What to do with it.
    hint: str


def server_url(config: Config) -> str:
    """Return the address that clients send to, without a slash at the end."""
    return config.server.public_url or listener_url(config)


def listener_url(config: Config) -> str:
    """Return the address that the server listens on, for this machine."""
    server = config.server
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::", "") else server.host  # noqa: S104
    return f"http://{f'[{host}]' if ':' in host else host}:{server.port}"


def snippets(url: str, key: str) -> list[Snippet]:
    """Return the snippets of all clients, the shortest first.

    :param url: see :func:`server_url`.
    :param key: a write key.
    """
    parts = urlsplit(url)
    host = parts.netloc + parts.path
    protocol = '    protocol: "http",\n' if parts.scheme == "http" else ""
    quoted = json.dumps(key)
    address = json.dumps(url)
    return [
        Snippet(
            "curl",
            f"curl -u {shlex.quote(key + ':')} -H 'Content-Type: application/json' \\\n"
            """  -d '{"userId": "ann", "event": "Signed Up"}' \\\n"""
            f"  {shlex.quote(url + CALLS + 'track')}",
            "Paste it into a terminal.",
        ),
        Snippet(
            "Web page",
            f"""<script>
  (function (calls) {{
    ["identify", "track", "page", "group", "setUserHash", "reset"].forEach(function (name) {{
      calls[name] = calls[name] || function () {{ calls.push([name, [].slice.call(arguments)]); }};
    }});
  }})((window.engage = window.engage || []));
  engage.page();
</script>
<script async src="{url}/engage.js" data-write-key="{key}"></script>""",
            "Paste it before </head>.",
        ),
        Snippet(
            "Node",
            f"""const response = await fetch({json.dumps(url + CALLS + "track")}, {{
  method: "POST",
  headers: {{
    "Content-Type": "application/json",
    Authorization: "Basic " + btoa({json.dumps(key + ":")}),
  }},
  body: JSON.stringify({{ userId: "ann", event: "Signed Up" }}),
}});
console.log(response.status, await response.text());""",
            "Node 18 or newer, without a package.",
        ),
        Snippet(
            "Python",
            f"""import segment.analytics as analytics  # pip install segment-analytics-python

analytics.write_key = {quoted}
analytics.host = {address}
analytics.track("ann", "Signed Up")
analytics.shutdown()""",
            "With segment-analytics-python.",
        ),
        Snippet(
            "Segment",
            f"""import {{ AnalyticsBrowser }} from "@segment/analytics-next";

const analytics = AnalyticsBrowser.load(
  {{ writeKey: {quoted}, cdnURL: {address} }},
  {{ integrations: {{ "Segment.io": {{
    apiHost: {json.dumps(host + "/v1")},
{protocol}  }} }} }},
);
analytics.track("Signed Up");""",
            "Segment's Analytics.js, unmodified.",
        ),
        Snippet(
            "RudderStack",
            f"""import {{ RudderAnalytics }} from "@rudderstack/analytics-js/bundled";

const analytics = new RudderAnalytics();
analytics.load({quoted}, {address}, {{ configUrl: {address} }});
analytics.track("Signed Up");""",
            "RudderStack's JavaScript SDK, unmodified.",
        ),
    ]


def event_as_curl(url: str, key: str, text: str) -> str:
    """Return a curl command that sends an event again.

    :param text: the event as JSON, with its ``type``.
    """
    body = '{"batch": [' + text + "]}"
    return (
        f"curl -u {shlex.quote(key + ':')} -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(body)} \\\n"
        f"  {shlex.quote(url + CALLS + 'batch')}"
    )
