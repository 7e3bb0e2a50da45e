"""The tests; whatever they import, bitsandbytes does not bring torch's compiler, which takes seconds of a worker."""

from server.engine.imports import import_bitsandbytes

import_bitsandbytes()
