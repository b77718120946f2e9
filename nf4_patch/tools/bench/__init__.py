"""``nf4-patch bench`` and ``nf4-patch calibrate``: what is measured, next to what, and how."""
