"""Bighorn's workbench: the command ``bighorn``, tasks to train on, studies and their reports.

A distribution of its own, which imports public names of :mod:`bighorn` only. This module imports nothing, so that
``bighorn --help`` takes a tenth of a second.
"""

__version__ = "0.1.0"
