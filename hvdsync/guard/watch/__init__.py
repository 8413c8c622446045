"""Bounded waits: no rank waits for ever, and every rank says whom it waited for, where and why."""
