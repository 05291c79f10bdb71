"""``python -m bighorn.cli``, and ``torchrun -m bighorn.cli train`` for several processes."""

from bighorn.cli import main

if __name__ == "__main__":
    main()
