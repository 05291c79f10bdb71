"""Callbacks for trainers, one file for each; a file imports its trainer, and nothing else here does."""
