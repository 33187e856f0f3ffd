"""Lines that somebody should read now, pushed to a webhook: an approval that waits, a stage that
stands still.

``EBBFLOW_WEBHOOK`` holds the address, which is a secret; without it nothing is sent. The body is
``{"text": ...}``, which Slack, Mattermost and Google Chat take as it is.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from http.client import HTTPException
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from ebbflow.recipe.secrets import redact_secrets

WEBHOOK = "EBBFLOW_WEBHOOK"
SECONDS = 10
"""Longest wait for the webhook's answer."""

logger = logging.getLogger(__name__)


def send_alert(text: str) -> bool:
    """Send a line to the webhook; return whether it took it. One that does not is only a warning: a
    run must not fail because a chat is away.
    """
    address = os.environ.get(WEBHOOK)
    if not address:
        return False
    body = json.dumps({"text": redact_secrets(text)}).encode()
    try:
        # Without the check, urlopen would also read a file:.
        if urlsplit(address).scheme not in ("http", "https"):
            raise ValueError("it is no address that begins with http:// or https://")
        request = Request(address, body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=SECONDS):
            return True
    # The third is of an address with a space in it, and of an answer that is no HTTP.
    except (OSError, ValueError, HTTPException) as error:
        # The address may have a token in its path, which errors of the third kind quote in parts.
        reason = str(error).replace(address, WEBHOOK)
        if isinstance(error, HTTPException):
            reason = type(error).__name__
        logger.warning("%s did not take a line (%s): %s", WEBHOOK, redact_secrets(reason), text)
        return False


def send_alert_in_background(text: str) -> None:
    """Send a line to the webhook while the caller goes on."""
    threading.Thread(target=send_alert, args=(text,), name="alert", daemon=True).start()
