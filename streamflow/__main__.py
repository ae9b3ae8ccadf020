"""``python -m streamflow``: the same program as the command ``streamflow``.

The one place where ``streamflow`` reaches up to ``streamflow.tools``, and only when it is run: importing this module
imports nothing.
"""

from __future__ import annotations

if __name__ == "__main__":
    import sys

    from streamflow.tools.cli import main

    sys.exit(main())
