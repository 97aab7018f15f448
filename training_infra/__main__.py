"""``python -m training_infra`` is the command ``training-infra``."""

import sys

from training_infra.cli import main

if __name__ == "__main__":
    sys.exit(main())
