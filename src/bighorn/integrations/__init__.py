"""Callbacks for trainers. Each file imports the trainer that it is for, and no other module imports one."""
