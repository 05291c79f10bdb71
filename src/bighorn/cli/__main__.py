"""``python -m bighorn.cli``, and ``torchrun -m bighorn.cli train`` for several processes.

A Ctrl-C ends it as it ends the console script, except in the second before this module runs, in which Python imports
``bighorn``, and so torch, to find it.
"""

from bighorn_launcher import main

if __name__ == "__main__":
    main()
