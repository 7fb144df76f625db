"""With GOLDEN_COUNTS=FOLDER and this folder on PYTHONPATH, every Python process counts what it does from its start."""

import os

if "GOLDEN_COUNTS" in os.environ:
    import counter

    counter.start(os.environ["GOLDEN_COUNTS"], os.environ.get("GOLDEN_COUNTS_UNTIL"))
