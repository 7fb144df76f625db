"""Installs the soft device where SOFTCUDA=1, before anything imports torch; with SOFTCUDA_WATCH=1 it is watched."""

import os
import sys

if os.environ.get("SOFTCUDA") == "1":
    sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))
    from tests.softcuda import install

    install()
    if os.environ.get("SOFTCUDA_WATCH") == "1":
        from tests.softcuda import program

        program.watch()
