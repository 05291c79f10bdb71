"""The command line: what is behind ``bighorn train``, ``bighorn compare`` and the other commands.

The commands are in :mod:`bighorn_launcher.commands`, which imports these modules when a command is called. The extra
``bighorn[cli]`` has the packages that they need beyond torch; the library itself imports none of them.
"""
