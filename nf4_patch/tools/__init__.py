"""The commands of ``nf4-patch``: doctor, verify, run and calibrate. Each returns a report, which cli.py prints."""
