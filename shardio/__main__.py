"""`python -m shardio`: the command line."""

import sys

try:
    from .cli.main import main

    code = main()
except KeyboardInterrupt:  # while that was imported; later ones are main's
    print("shardio: interrupted", file=sys.stderr)
    code = 130
sys.exit(code)
