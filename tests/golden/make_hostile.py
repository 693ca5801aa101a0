"""How hostile inputs end, by kind: python tests/golden/make_hostile.py [FAMILY ...]

Writes tests/golden/hostile again, or some of its files, and prints how many cases each has. What
changed is to be reviewed: each line there is a promise. The inputs are in tests/support/hostile.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from support import hostile

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as top:
        counts = hostile.write(Path(top), sys.argv[1:])
    for name, count in counts.items():
        print(f"{count:6,} {name}")
    print(f"{sum(counts.values()):6,} in all")
