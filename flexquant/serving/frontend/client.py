# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Send a policy to a live server, as the client of ``POST /flexquant/policy``."""

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import Policy

ADMIN_KEY = "FLEXQUANT_ADMIN_KEY"
"""Environment variable with the administrator's key, for the server and for the client."""
TIMEOUT = 3600.0
"""Largest number of seconds for a change, capturing CUDA graphs included."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects, so that the key reaches only the server that was named."""

    def redirect_request(self, *_: object) -> None:
        return None


def admin_key() -> str:
    """Return the environment's key; raise :class:`FlexQuantError`, without it, if it is not ASCII."""
    key = os.environ.get(ADMIN_KEY, "").strip()
    if not (key.isprintable() and key.isascii()):
        problem = f"the key in {ADMIN_KEY} has characters that not every client can send"
        raise FlexQuantError(f"{problem}; use printable ASCII alone")
    return key


def apply_policy(url: str, policy: Policy, *, dry_run: bool = False) -> JsonObject:
    """Change the policy of the server at ``url`` (with or without ``/v1``), or only ask (``dry_run``).

    Returns its answer. Raises :class:`FlexQuantError` without a key or such a server, and if it refuses.
    """
    key = admin_key()
    if not key:
        raise FlexQuantError(f"the environment has no {ADMIN_KEY}; set it to the key that the server has")
    if not url.startswith(("http://", "https://")):
        raise FlexQuantError(f"'{url}' is no URL of a server; write e.g. http://127.0.0.1:8000")
    query = urllib.parse.urlencode({"name": policy.name[-200:], "dry_run": str(dry_run).lower()})
    request = urllib.request.Request(
        f"{url.rstrip('/').removesuffix('/v1')}/flexquant/policy?{query}",
        data=json.dumps(policy.document).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT) as reply:
            if isinstance(answer := json.load(reply), dict) and "routes" in answer:
                return answer
            raise ValueError("the answer is not FlexQuant's")
    except urllib.error.HTTPError as e:
        raise FlexQuantError(_refusal(e)) from e
    except (OSError, ValueError, http.client.HTTPException) as e:
        reason = getattr(e, "reason", e)
        raise FlexQuantError(f"no answer from {url} ({reason}); check that vllm serve runs there") from e


def _refusal(error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return f"the server has another administrator's key; set {ADMIN_KEY} to that of the server"
    if error.code in (301, 302, 303, 307, 308):
        what = f"the server sends on to {error.headers['Location']!r} ({error.code}), and the key goes to no"
        return f"{what} server but the one that is named; name that one if it is to have the key"
    if error.code in (404, 405):
        what = "the server takes no other policy"
        return f"{what}; start it with VLLM_PLUGINS=flexquant and {ADMIN_KEY} in its environment"
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason
    return f"the server refused with {error.code}: {message}"
