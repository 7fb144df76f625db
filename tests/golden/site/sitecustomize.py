"""With GOLDEN_COUNTS=FOLDER and this folder on PYTHONPATH, every Python process counts what it does from its start."""

import os
import sys

if "GOLDEN_COUNTS" in os.environ:
    import counter

    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # libraries would import it where it is installed
    counter.start(os.environ["GOLDEN_COUNTS"])
