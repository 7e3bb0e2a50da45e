"""The container's health check: exit status 0 when /health answers 200, over HTTP or, where the server uses it, TLS."""

import http.client
import os
import ssl
import sys
import urllib.error
import urllib.request

# The server's certificate names the host that clients use, not this address.
unverified = ssl._create_unverified_context()
reasons = []
for scheme in ("http", "https"):
    url = f"{scheme}://127.0.0.1:{os.environ['NF4_HTTP__PORT']}/health"
    try:
        with urllib.request.urlopen(url, timeout=2, context=unverified if scheme == "https" else None) as answer:
            sys.exit(0 if answer.status == 200 else 1)
    except urllib.error.HTTPError as e:
        sys.exit(f"unhealthy: {e}")
    except (OSError, http.client.HTTPException) as e:
        reasons.append(str(e))
sys.exit(f"unhealthy: {'; '.join(reasons)}")
