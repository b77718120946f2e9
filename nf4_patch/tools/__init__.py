"""The hands: doctor, verify, run, bench, calibrate. Each returns a report object, which cli.py prints."""
