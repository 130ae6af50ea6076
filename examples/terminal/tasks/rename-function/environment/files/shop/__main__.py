"""Prints a bill."""

from shop.price import calc

print("calc says", calc([3, 4], discount=0.5))
