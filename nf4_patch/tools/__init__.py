"""The commands ``doctor``, ``verify`` and ``run`` of ``nf4-patch``. doctor and verify return a report, which cli.py prints."""
