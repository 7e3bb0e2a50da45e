"""The container's health check: exit status 0 when /health answers 200."""

import os
import sys
import urllib.error
import urllib.request

try:
    with urllib.request.urlopen(f"http://127.0.0.1:{os.environ['NF4_HTTP__PORT']}/health", timeout=4) as answer:
        sys.exit(0 if answer.status == 200 else 1)
except (urllib.error.URLError, OSError) as e:
    sys.exit(f"unhealthy: {e}")
