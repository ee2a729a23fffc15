"""Prices and classes of devices that do equal work, of which one stands for all."""
