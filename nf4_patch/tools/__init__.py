"""The commands of ``nf4-patch``: doctor, verify and run. Each returns a report, which cli.py prints."""
