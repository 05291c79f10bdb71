"""``python -m bighorn_workbench``, and ``torchrun -m bighorn_workbench train`` for several processes."""

from bighorn_workbench.launch import main

if __name__ == "__main__":
    main()
