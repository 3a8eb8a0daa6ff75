"""Drafters: what makes token trees. base.py has their interface."""
