"""The hands: doctor, verify, bench, run, demo. Each returns a report object, which cli.py prints."""
