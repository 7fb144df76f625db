"""Installs the soft device where SOFTCUDA=1, before anything imports torch."""

import os
import sys

if os.environ.get("SOFTCUDA") == "1":
    sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))
    from tests.softcuda import install

    install()
