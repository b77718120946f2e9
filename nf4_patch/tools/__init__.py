"""The commands of ``nf4-patch``: doctor, verify and run. doctor and verify return a report, which cli.py prints."""
