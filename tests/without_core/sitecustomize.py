"""On PYTHONPATH, each Python, and all that it starts, is without the compiled core."""

import sys

sys.modules["shardio.native._core"] = None  # type: ignore[assignment]  # importing it is an ImportError
