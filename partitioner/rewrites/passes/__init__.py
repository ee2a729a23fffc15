"""The forward and the backward pass of a step: what each reads of the other, and when."""
