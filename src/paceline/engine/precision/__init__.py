"""Precision: autocast, Apex levels, loss scaling, master weights."""
