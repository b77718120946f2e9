"""``nf4-patch bench`` and ``nf4-patch calibrate``: what is measured, beside what, and how."""
